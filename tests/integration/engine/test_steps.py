"""What the step loop does when room is short, reads are slow and requests leave early."""

import threading

import pytest
import torch

from engine.adapters.reader import Readers
from engine.messages import Abort, Evict, GetSnapshot, Load


@pytest.fixture
def cold(start_core):
    """Tokens and logprobs of one request on a fresh, roomy core."""

    def run(ids, adapter=None, **sampling):
        driver = start_core()
        if adapter is not None:
            driver.add(adapter)
        story = driver.submit("cold", ids, adapter.rev if adapter else None, logprobs=0, **sampling)
        driver.finish()
        return story.tokens, story.logprobs

    return run


def told(story):
    return story.tokens, story.logprobs


def pool_of(driver):
    return driver.call(GetSnapshot).snapshot.pool


def test_a_prompt_in_chunks_is_the_prompt_in_one_piece(start_core, adapters, prompt, cold) -> None:
    driver = start_core(max_batch_tokens=16)
    driver.add(adapters[0])
    base = driver.submit("base", prompt(90), logprobs=0)
    adapted = driver.submit("adapted", prompt(75, 1), adapters[0].rev, logprobs=0)
    driver.finish()
    assert told(base) == cold(prompt(90))
    assert told(adapted) == cold(prompt(75, 1), adapters[0])


def test_the_cost_of_a_prompt_is_learned_from_all_its_chunks(start_core, prompt) -> None:
    driver = start_core(max_batch_tokens=16)
    told = []
    driver.core._prefill._observe = lambda *learned: told.append(learned)
    driver.submit("r", prompt(90))
    driver.finish()
    assert [rows for _, rows in told] == [16] * 5 + [10]
    assert all(0 < seconds < 10 for seconds, _ in told)


def test_no_step_is_larger_than_the_budget(start_core, prompt) -> None:
    driver = start_core(max_batch_tokens=24)
    rows = []
    driver.core.machine.model.register_forward_hook(
        lambda _, inputs, __: rows.append(len(inputs[0]))
    )
    for n in range(5):
        driver.submit(f"r{n}", prompt(50, n))
    driver.finish()
    assert max(rows) == 24


def test_a_cached_prefix_changes_no_bit(start_core, adapters, prompt, cold) -> None:
    driver = start_core()
    driver.add(adapters[0])
    for rev, adapter in ((None, None), (adapters[0].rev, adapters[0])):
        driver.submit(f"warm {rev}", prompt(64), rev)
        driver.finish()
        story = driver.submit(f"hit {rev}", prompt(64) + prompt(20, 5), rev, logprobs=0)
        driver.finish()
        assert story.cached == 64
        assert told(story) == cold(prompt(64) + prompt(20, 5), adapter)


def test_a_full_hit_still_computes_a_token(start_core, prompt, cold) -> None:
    driver = start_core()
    driver.submit("warm", prompt(64))
    driver.finish()
    story = driver.submit("hit", prompt(64), logprobs=0)
    driver.finish()
    assert story.cached == 48 and told(story) == cold(prompt(64))


def test_preemption_changes_no_token(start_core, adapters, prompt, cold) -> None:
    driver = start_core(num_blocks=20, max_num_seqs=4)
    driver.add(adapters[2])
    revs = [None, adapters[2].rev, None, adapters[2].rev]
    stories = [
        driver.submit(f"r{n}", prompt(40, n), rev, max_tokens=60, logprobs=0)
        for n, rev in enumerate(revs)
    ]
    driver.finish()
    assert driver.call(GetSnapshot).snapshot.preemptions > 0
    for n, (story, rev) in enumerate(zip(stories, revs, strict=True)):
        assert told(story) == cold(prompt(40, n), adapters[2] if rev else None, max_tokens=60)


def test_kv_and_adapters_trade_places_in_a_small_arena_and_answers_stay_right(
    start_core, adapters, prompt, cold
) -> None:
    sizes = [a.manifest.num_blocks for a in adapters]
    arena = 16 + max(sizes)  # one long sequence beside the largest adapter, and nothing more
    assert sum(sizes) + 16 > arena
    driver = start_core(num_blocks=arena, max_num_seqs=2)
    driver.add(*adapters)
    for turn in range(2):
        for n, adapter in enumerate([None, *adapters]):
            ids = prompt(130 + 10 * n, 10 * turn + n)
            story = driver.submit(f"{turn}-{n}", ids, adapter.rev if adapter else None, logprobs=0)
            driver.finish()
            assert told(story) == cold(ids, adapter)
            driver.core.pool.check()
    evicted = [e for e in driver.events if e.before == "idle" and e.after in ("ram", "registered")]
    assert evicted, "no adapter gave way"
    assert all(e.cause == "cost" for e in evicted)


def test_freed_blocks_may_hold_anything(start_core, adapters, prompt, cold) -> None:
    driver = start_core(num_blocks=40, max_num_seqs=3)
    driver.add(adapters[0], adapters[2])
    arena, pool = driver.core.machine.arena, driver.core.pool

    def poison() -> None:
        free = [b for b in range(pool.num_blocks) if pool.owner(b) is None]
        arena.bytes.view(torch.float32)[free] = torch.nan

    for n in range(8):
        adapter = (None, adapters[0], adapters[2])[n % 3]
        ids = prompt(37 + 7 * n, n)
        story = driver.submit(f"r{n}", ids, adapter.rev if adapter else None, logprobs=0)
        while not story.finish:
            poison()
            driver.step()
        assert told(story) == cold(ids, adapter)
        if adapter is not None and n % 2:
            driver.call(lambda i, rev=adapter.rev: Evict(command_id=i, rev=rev, to="disk"))


def test_blocks_of_a_cancelled_load_serve_the_next_owner(
    start_core, make_adapter, prompt, cold
) -> None:
    large, small = make_adapter("large", rank=64, seed=41), make_adapter("small", rank=2, seed=42)
    room = large.manifest.num_blocks + 20
    driver = start_core(num_blocks=room)
    driver.add(large, small)
    assert driver.call(lambda i: Load(command_id=i, rev=large.rev, tier="ram")).code == ""
    for turn in range(5):
        driver.core.take(Load(command_id=700 + turn, rev=large.rev))
        driver.step()
        driver.core.take(Evict(command_id=800 + turn, rev=large.rev))
        stories = [
            driver.submit(f"{turn}-{n}", prompt(60, n), rev, logprobs=0)
            for n, rev in enumerate((None, small.rev))
        ]
        driver.finish()
        driver.until(lambda turn=turn: 800 + turn in driver.answers)
        assert [told(s) for s in stories] == [cold(prompt(60, 0)), cold(prompt(60, 1), small)]
        driver.call(lambda i: Evict(command_id=i, rev=small.rev))
        driver.core.pool.check()


@pytest.mark.parametrize("slow", ["read", "copy"])
def test_a_slow_load_holds_up_nobody_else(
    start_core, adapters, prompt, cold, monkeypatch, slow
) -> None:
    """The load stands still until the other stream has ended; a step that waits for it fails."""
    gate = threading.Event()
    begin, copy = Readers._begin, torch.Tensor.copy_

    def slow_read(readers, file):
        assert slow != "read" or gate.wait(20), "the gate is opened after the other stream's end"
        begin(readers, file)

    def slow_copy(tensor, source):
        in_copier = threading.current_thread().name == "lorad-copier"
        assert slow != "copy" or not in_copier or gate.wait(20)
        return copy(tensor, source)

    monkeypatch.setattr(Readers, "_begin", slow_read)
    monkeypatch.setattr(torch.Tensor, "copy_", slow_copy)
    driver = start_core()
    driver.add(adapters[0])
    late = driver.submit("late", prompt(20), adapters[0].rev, logprobs=0)
    if slow == "copy":
        driver.until(lambda: driver.core.machine.copier.in_flight)
    else:
        driver.step()
    quick = driver.submit("quick", prompt(20), max_tokens=30, logprobs=0)
    for _ in range(30):
        driver.step()
    assert quick.finish == "length", "a token every step"
    assert not late.tokens and driver.status(adapters[0].rev).state == "loading"
    gate.set()
    driver.finish()
    assert told(late) == cold(prompt(20), adapters[0])


def test_reads_can_be_made_slow_for_a_drill(start_core, adapters, prompt) -> None:
    driver = start_core(fail_reads_slowly=0.05)
    driver.add(adapters[0])
    assert driver.call(lambda i: Load(command_id=i, rev=adapters[0].rev, tier="ram")).code == ""
    read = next(e for e in driver.events if (e.before, e.after) == ("loading", "ram"))
    assert read.seconds >= 0.05


@pytest.mark.parametrize("tokens", [0, 5])
def test_abort_frees_everything_within_two_steps(start_core, adapters, prompt, tokens) -> None:
    driver = start_core()
    driver.add(adapters[0])
    driver.call(lambda i: Load(command_id=i, rev=adapters[0].rev))
    before = pool_of(driver)
    stories = [
        driver.submit(f"r{n}", prompt(20, n), rev, max_tokens=100)
        for n, rev in enumerate((None, adapters[0].rev))
    ]
    driver.until(lambda: all(len(s.tokens) >= tokens for s in stories))
    for n in range(2):
        driver.core.take(Abort(f"r{n}"))
    driver.step()
    driver.step()
    assert [s.finish for s in stories] == ["abort", "abort"]
    after = pool_of(driver)
    assert after.kv_active == 0 and after.adapter_active == 0
    assert after.free + after.kv_cached == before.free
    assert driver.status(adapters[0].rev).leases == 0
    assert driver.core.idle


def test_an_abort_of_a_waiting_request_ends_it(start_core, adapters, prompt) -> None:
    driver = start_core(fail_reads_slowly=0.2)
    driver.add(adapters[0])
    story = driver.submit("waiting", prompt(20), adapters[0].rev)
    driver.step()
    driver.core.take(Abort("waiting"))
    driver.step()
    driver.step()
    assert (story.finish, story.tokens) == ("abort", [])


def test_a_request_that_can_never_fit_is_refused_at_once(start_core, prompt) -> None:
    driver = start_core(max_model_len=64)
    story = driver.submit("long", prompt(65))
    driver.step()
    assert story.finish == "error" and story.code in ("invalid_value", "context_length_exceeded")


def test_ids_outside_the_vocabulary_are_refused_and_harm_nobody(start_core, prompt) -> None:
    driver = start_core()
    beside = driver.submit("beside", prompt(9))
    for n, bad in enumerate((-1, 256, 1 << 40)):
        story = driver.submit(f"bad{n}", [5, bad])
        driver.step()
        assert (story.finish, story.code) == ("error", "invalid_value")
    driver.finish()
    assert beside.finish == "length"


def test_an_eviction_of_a_running_adapter_can_end_its_requests(
    start_core, adapters, prompt
) -> None:
    driver = start_core()
    driver.add(adapters[0])
    story = driver.submit("r", prompt(9), adapters[0].rev, max_tokens=200, ignore_eos=True)
    driver.until(lambda: len(story.tokens) > 2)
    answer = driver.call(lambda i: Evict(command_id=i, rev=adapters[0].rev, abort_running=True))
    assert answer.code == "" and story.finish == "abort"


def test_shutdown_ends_what_runs_and_what_waits(start_core, adapters, prompt) -> None:
    driver = start_core(fail_reads_slowly=0.2)
    driver.add(adapters[0])
    running = driver.submit("running", prompt(9), max_tokens=200, ignore_eos=True)
    waiting = driver.submit("waiting", prompt(9), adapters[0].rev)
    driver.until(lambda: running.tokens)
    frame = driver.core.shutdown()
    for delta in frame.deltas:
        driver.stories[delta.request_id].add(delta, frame.step)
    assert (running.finish, waiting.finish) == ("abort", "abort")
