"""Graphs, lookahead and the draw on a card: the same bits as without, and no waiting."""

import importlib
import pkgutil
import random
import warnings

import pytest
import torch

import engine.kernels
from engine.kernels import launch
from engine.ladder import LATE_GRAPHS
from engine.messages import Evict, Load, SamplingParams
from engine.sampler import Sampler, SamplerLimits
from engine.sequence import Chunk, Sequence, StepWork

pytestmark = pytest.mark.gpu

#: A start compiles for all that may come: it is short where ranks are low and sizes are shared.
SIZES = {"max_rank": 16, "max_batch_tokens": 512}
CUDA = {"device": "cuda", "dtype": "float32", "deterministic": False, **SIZES}
WISHES = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.8},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"logit_bias": {9: 3.0}, "min_tokens": 5},
]


def told(stories) -> list:
    return [(story.tokens, story.logprobs, story.finish) for story in stories]


def play(driver, prompt, count: int, revs=(None,), **sampling) -> list:
    """`count` requests of one length, so that steps with and without lookahead are alike."""
    wishes = {"logprobs": 2, "max_tokens": 24, "ignore_eos": True, **sampling}
    stories = [
        driver.submit(f"r{n}", prompt(17, n), revs[n % len(revs)], **wishes, **WISHES[n % 5])
        for n in range(count)
    ]
    driver.finish()
    return stories


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_graph_computes_the_bits_of_the_eager_step(start_core, prompt, count) -> None:
    answers = []
    for use in (False, True):
        driver = start_core(**CUDA)
        graphs = driver.core.runner.graphs
        graphs.use_graphs = use
        answers.append(told(play(driver, prompt, count)))
        assert (graphs.num_replays > 20) == use
    assert answers[0] == answers[1]


@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_graph_with_adapters_computes_the_bits_of_the_eager_step(
    start_core, adapters, prompt, count
) -> None:
    answers = []
    for use in (False, True):
        driver = start_core(**CUDA)
        driver.add(*adapters)
        for adapter in adapters:
            assert driver.call(lambda i, rev=adapter.rev: Load(command_id=i, rev=rev)).code == ""
        graphs = driver.core.runner.graphs
        graphs.use_graphs = use
        revs = [a.rev for a in adapters[:2]] + [None]
        answers.append(told(play(driver, prompt, count, revs)))
        assert (graphs.num_replays > 15) == use
    assert answers[0] == answers[1]


def load(driver, *adapters) -> None:
    driver.add(*adapters)
    for adapter in adapters:
        assert driver.call(lambda i, rev=adapter.rev: Load(command_id=i, rev=rev)).code == ""


def play_mixed(driver, prompt, revs, number: int = 20, seed: int = 3) -> list:
    """Prompts of all lengths arrive beside sequences that decode, by the count of steps alone."""
    draw = random.Random(seed)
    stories = []
    for n in range(number):
        length = draw.choice([1, 2, 3, 5, 17, 60, 64, 129, 220])
        wishes = {"logprobs": 1, "max_tokens": draw.randrange(2, 12), "ignore_eos": True}
        rev = draw.choice(revs)
        stories.append(driver.submit(f"r{n}", prompt(length, n), rev, **wishes, **WISHES[n % 5]))
        for _ in range(draw.choice([0, 0, 1, 3])):
            driver.step()
    driver.finish()
    return told(stories)


MANY = {"max_num_seqs": 24, "mixed_tokens": 512}


@pytest.mark.parametrize("adapted", [False, True])
def test_graphs_of_mixed_steps_compute_the_bits_of_the_eager_ones(
    start_core, adapters, prompt, adapted
) -> None:
    answers = []
    for use in (False, True):
        driver = start_core(**CUDA, **MANY)
        load(driver, *adapters)
        graphs = driver.core.runner.graphs
        graphs.use_graphs = use
        passes, replays = driver.core.runner.forward_passes, graphs.num_replays
        revs = [None, *(a.rev for a in adapters)] if adapted else [None]
        answers.append(play_mixed(driver, prompt, revs))
        eager = driver.core.runner.forward_passes - passes - graphs.num_replays + replays
        assert eager == 0 if use else graphs.num_replays == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize("adapted", [False, True])
def test_lookahead_changes_no_bit_of_mixed_steps(start_core, adapters, prompt, adapted) -> None:
    answers = []
    for lookahead in (False, True):
        driver = start_core(lookahead=lookahead, **CUDA, **MANY)
        load(driver, *adapters)
        revs = [None, *(a.rev for a in adapters)] if adapted else [None]
        answers.append(play_mixed(driver, prompt, revs))
    assert answers[0] == answers[1]


def test_a_slot_given_anew_between_replays_of_one_graph_is_seen(
    start_core, adapters, prompt
) -> None:
    answers = []
    for use in (False, True):
        driver = start_core(**CUDA, **MANY, slots=1)
        driver.add(*adapters)
        driver.core.runner.graphs.use_graphs = use
        told_of = {}
        for turn, adapter in enumerate([adapters[0], adapters[2], adapters[0]]):
            assert driver.call(lambda i, a=adapter: Load(command_id=i, rev=a.rev)).code == ""
            names = [f"{turn} {n}" for n in range(3)]
            stories = [
                driver.submit(name, prompt(40, n), adapter.rev, logprobs=0, max_tokens=4)
                for n, name in enumerate(names)
            ]
            driver.finish()
            told_of[turn] = told(stories)
            driver.call(lambda i, a=adapter: Evict(command_id=i, rev=a.rev))
        # Whole prompts once, and what the prefix cache leaves of them the second time.
        tokens = {turn: [one[0] for one in answer] for turn, answer in told_of.items()}
        assert tokens[0] == tokens[2] != tokens[1]
        answers.append(told_of)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("adapted", [False, True])
def test_chunks_of_every_size_have_the_same_bits_whatever_the_buffers_held(
    start_core, adapters, prompt, adapted
) -> None:
    """Rows of up to 24 sequences, 2 to 512 in all, where there was NaN before the replay."""
    driver = start_core(**CUDA, **MANY)
    load(driver, *adapters)
    runner = driver.core.runner
    graphs, planner, batcher = runner.graphs, runner._planner, runner._batcher
    slots = [row.slot for row in driver.core.slots.rows.values()] if adapted else []
    pool = driver.core.pool
    free = [block for block in range(pool.num_blocks) if pool.owner(block) is None]
    draw = random.Random(5)
    sizes = [2, 3, 63, 64, 65, 128, 200, 511, 512, *(draw.randrange(2, 513) for _ in range(60))]
    for size in sizes:
        chunks, left, blocks = [], size, iter(free)
        while left and len(chunks) < 24:
            last = len(chunks) == 23
            length = left if last else min(left, draw.choice([1, 1, 1, 2, 4, 5, 16, 33, 240]))
            if length > 250:
                break  # longer than a sequence may be
            start = draw.randrange(0, 251 - length)
            seq = Sequence(
                request_id=f"{size} {left}",
                tokens=prompt(start + length, left),
                num_prompt=start + length,
                sampling=SamplingParams(),
                rev=None,
                identity="base",
                salt="",
                priority=0,
                order=0,
                blocks=[next(blocks) for _ in range(-(-(start + length) // 16))],
                slot=draw.choice([-1, *slots]),
            )
            chunks.append(Chunk(seq, start, length, draw.random() < 0.5))
            left -= length
        chunks.sort(key=lambda c: (c.seq.slot, c.length > 1))
        if all(chunk.length == 1 for chunk in chunks):
            continue
        work = StepWork(tuple(chunks))
        plans = []

        def plan(words, rung, work=work, plans=plans) -> int:
            plans.append(planner.meta(work, words, rung, graphs.kinds(rung)))
            return planner.words_of(plans[0])

        with torch.inference_mode():
            batch = batcher.pack(work, plan=plan)
            rows = sum(chunk.length for chunk in chunks)
            assert batch.rung is not None and not batch.rung.single
            graphs._hidden.fill_(torch.nan)
            planner._device.store.h.fill_(torch.nan)
            graphs.use_graphs = False
            eager_logits = graphs.run(batch, plans[0])
            eager_logits = None if eager_logits is None else eager_logits.clone()
            eager = graphs._hidden[:rows].clone()
            graphs._hidden.fill_(torch.nan)
            planner._device.store.h.fill_(torch.nan)
            graphs.use_graphs, before = True, graphs.num_replays
            logits = graphs.run(batch, plans[0])
            assert graphs.num_replays == before + 1, "a usual mix without a graph"
            assert eager.isfinite().all() and torch.equal(graphs._hidden[:rows], eager)
            assert (logits is None) == (eager_logits is None)
            assert logits is None or torch.equal(logits, eager_logits)


def kernels() -> list:
    """Every Triton function of the engine."""
    names = [info.name for info in pkgutil.iter_modules(engine.kernels.__path__)]
    modules = [importlib.import_module(f"engine.kernels.{name}") for name in names]
    found = {id(v): v for m in modules for v in vars(m).values() if hasattr(v, "device_caches")}
    return list(found.values())


def test_nothing_is_compiled_and_nothing_allocated_once_it_is_ready(
    start_core, make_adapter, adapters, prompt, monkeypatch
) -> None:
    """Prompts of adapters of low and high rank, in graphs and beyond them."""
    from triton import knobs

    for kernel in kernels():
        kernel.device_caches.clear()  # what other tests have compiled
    launch._launchers.clear()
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **told: compiled.append(told["repr"])
    )
    sizes = {"max_num_seqs": 24, "max_batch_tokens": 2048, "mixed_tokens": 2048, "max_rank": 48}
    driver = start_core(**{**CUDA, **sizes, "num_blocks": 1024})
    assert compiled, "the hook hears of kernels"
    compiled.clear()
    reserved = torch.cuda.memory_reserved()
    high = make_adapter("high", rank=48, seed=9)
    load(driver, *adapters, high)
    low, others = [None, adapters[0].rev], [None, adapters[1].rev, high.rev]
    for turn, revs in enumerate((low, others, [high.rev])):
        play_mixed(driver, prompt, revs, seed=turn)
        driver.stories.clear()
        for n in range(9):  # one step of more rows than any graph has, and tiled as prompts are
            driver.submit(f"long {n}", prompt(230, 1000 * turn + 500 + n), revs[n % len(revs)])
        driver.finish()
        driver.stories.clear()
    assert not compiled
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("count", [1, 5, 8])
def test_lookahead_changes_no_bit(start_core, prompt, count) -> None:
    answers = []
    for lookahead in (False, True):
        driver = start_core(lookahead=lookahead, **CUDA)
        answers.append(told(play(driver, prompt, count)))
    assert answers[0] == answers[1]


def test_ends_that_come_by_themselves_leave_nothing_behind(start_core, prompt) -> None:
    driver = start_core(**CUDA)
    assert driver.core.lookahead
    for turn in range(3):
        play(driver, prompt, 8, ignore_eos=False, stop_token_ids=tuple(range(3, 90)))
        driver.until(lambda: driver.core.idle)
        driver.core.scheduler.check()
        assert driver.core.pool.counts.kv_active == 0
        driver.stories.clear()
        driver.core.prefix.drop("base")
        assert driver.core.pool.num_free == driver.core.pool.num_blocks, turn


def test_decode_steps_allocate_nothing(start_core, prompt) -> None:
    driver = start_core(**CUDA)
    reserved = torch.cuda.memory_reserved()
    for count in (1, 3, 8):
        play(driver, prompt, count)
        driver.stories.clear()
    assert torch.cuda.memory_reserved() == reserved


def test_launching_and_drawing_never_wait_for_the_device(start_core, prompt) -> None:
    driver = start_core(**CUDA)
    runner = driver.core.runner
    launch, sample = runner.launch, runner.sample

    def watched(act):
        def call(argument):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
            try:
                return act(argument)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    stories = [
        driver.submit(f"r{n}", prompt(17, n), logprobs=2, max_tokens=24, **WISHES[n])
        for n in range(len(WISHES))
    ]
    driver.until(lambda: all(len(story.tokens) > 2 for story in stories))  # prefill may wait
    runner.launch, runner.sample = watched(launch), watched(sample)
    driver.finish()
    assert runner.graphs.num_replays > 10


def test_the_memory_plan_is_kept(start_core, adapters, prompt) -> None:
    """Runs with the card to itself: what other processes take meanwhile cannot be told apart."""
    free, total = torch.cuda.mem_get_info()
    if total - free - torch.cuda.memory_reserved() > 2 << 30:
        pytest.skip("other processes are on the card; run this test alone")
    share = 0.06
    roomy = {"slots": 4096, "max_rank": 512, "num_blocks": 0}  # an arena that takes all it may
    driver = start_core(**{**CUDA, **MANY, **roomy}, gpu_memory_utilization=share)
    plan = driver.core.machine.memory
    assert plan.graphs > 0 and plan.steps > 0 and plan.arena > plan.total * share / 2
    load(driver, *adapters)
    play_mixed(driver, prompt, [None, *(a.rev for a in adapters)])
    free, total = torch.cuda.mem_get_info()
    assert total - free <= share * total + (256 << 20), plan.table()
    assert f"up to {driver.core.runner.graphs.num_graphs + LATE_GRAPHS}" in plan.table()


def test_a_draw_on_a_card_is_the_hosts() -> None:
    """Rows of every kind, with more history than the pinned buffer has room for, and without."""
    limits = SamplerLimits(vocab_size=500, eos_token_ids=(2,))
    logits = torch.randn(10, 512, generator=torch.Generator().manual_seed(1)) * 3
    rows = [
        Sequence(
            request_id=str(i),
            tokens=[1, 7, 9, 9] * (2000 if i == 3 else 1),
            num_prompt=2,
            sampling=SamplingParams(**{"temperature": 0.0, "logprobs": i % 4, **WISHES[i % 5]}),
            rev=None,
            identity="base",
            salt="",
            priority=50,
            order=i,
        )
        for i in range(10)
    ]
    host = Sampler(limits).sample(logits.clone(), rows)
    for max_rows in (1, 64):
        card = Sampler(limits, device=torch.device("cuda"), max_rows=max_rows)
        drawn = [card.launch(logits.cuda(), rows) for _ in range(3)]  # three on their way at once
        for each in map(card.finish, drawn):
            assert [s.token for s in each] == [s.token for s in host]
            for one, other in zip(each, host, strict=True):
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
                assert [t for t, _ in one.logprobs.top] == [t for t, _ in other.logprobs.top]
