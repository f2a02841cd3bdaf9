"""Adapters side by side in one batch, and what must never leak from one row to another."""

import pytest
import torch

from engine.messages import Evict, Load, RemoveRevision


def alone(start_core, adapter, ids, **sampling):
    """What a fresh core says to one request with nobody beside it."""
    driver = start_core(**sampling.pop("settings", {}))
    if adapter is not None:
        driver.add(adapter)
    story = driver.submit("alone", ids, adapter.rev if adapter else None, **sampling)
    driver.finish()
    assert story.finish == "length", story
    return story


@pytest.fixture
def mixed(start_core, adapters, prompt):
    """Base and four adapters in one batch, with prompts of different lengths."""
    driver = start_core()
    driver.add(*adapters)
    for adapter in adapters:
        assert driver.call(lambda i, a=adapter: Load(command_id=i, rev=a.rev)).code == ""
    stories = [
        driver.submit(f"r{n}", prompt(5 + 11 * n, n), a.rev if a else None, logprobs=0)
        for n, a in enumerate([None, *adapters])
    ]
    return driver, stories


def test_a_mixed_batch_says_what_each_request_says_alone(
    mixed, start_core, adapters, prompt
) -> None:
    driver, stories = mixed
    driver.finish()
    for n, (adapter, story) in enumerate(zip([None, *adapters], stories, strict=True)):
        expected = alone(start_core, adapter, prompt(5 + 11 * n, n), logprobs=0)
        assert story.tokens == expected.tokens
        assert story.logprobs == expected.logprobs, "deterministic mode promises the same bits"
    assert len({tuple(story.tokens) for story in stories}) == 5


def test_adapters_equal_merged_weights(mixed, start_core, adapters, prompt, merge) -> None:
    driver, stories = mixed
    driver.finish()
    for n, (adapter, story) in enumerate(zip(adapters, stories[1:], strict=True), start=1):
        base = alone(start_core, None, prompt(5 + 11 * n, n), logprobs=0)
        merged = start_core(model=merge(adapter))
        expected = merged.submit("m", prompt(5 + 11 * n, n), logprobs=0)
        merged.finish()
        assert story.tokens == expected.tokens != base.tokens
        ours, theirs = ([one.logprob for one in s.logprobs] for s in (story, expected))
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_base_and_four_adapters_take_one_forward_a_step(mixed) -> None:
    driver, stories = mixed
    calls = []
    driver.core.machine.model.register_forward_hook(lambda *_: calls.append(1))
    before = driver.core.snapshot().forward_passes
    while not all(story.finish for story in stories):
        seen = len(calls)
        driver.step()
        assert len(calls) - seen == 1
    assert driver.core.snapshot().forward_passes - before == len(calls) == 12
    assert all(len(set(story.steps)) == 12 for story in stories), "a token each, every step"


@pytest.mark.parametrize("deterministic", [True, False])
def test_base_rows_keep_their_bits_when_adapters_become_base(
    start_core, adapters, prompt, deterministic
) -> None:
    told = []
    for revs in ([None, adapters[0].rev, adapters[2].rev], [None, None, None]):
        driver = start_core(deterministic=deterministic)
        driver.add(adapters[0], adapters[2])
        for rev in filter(None, revs):
            driver.call(lambda i, rev=rev: Load(command_id=i, rev=rev))
        stories = [
            driver.submit(f"r{n}", prompt(20, n), rev, logprobs=2) for n, rev in enumerate(revs)
        ]
        driver.finish()
        told.append(stories)
    (base, *adapted), (same, *plain) = told
    assert base.logprobs == same.logprobs and base.tokens == same.tokens
    assert [a.tokens for a in adapted] != [p.tokens for p in plain]


def test_a_slot_that_changes_hands_under_the_same_request_is_seen_at_once(
    start_core, adapters, prompt
) -> None:
    first, second = adapters[0], adapters[1]
    driver = start_core(slots=1)
    driver.add(first, second)
    told = []
    for adapter in (first, second, first):
        story = driver.submit("same", prompt(9), adapter.rev, logprobs=0)
        driver.finish()
        assert driver.status(adapter.rev).slot == 0
        told.append((story.tokens, story.logprobs))
        driver.stories.clear()
    for adapter, (tokens, logprobs) in zip((first, second, first), told, strict=True):
        expected = alone(start_core, adapter, prompt(9), logprobs=0)
        assert (tokens, logprobs) == (expected.tokens, expected.logprobs)


def test_new_weights_are_a_cold_run_with_nothing_cached(start_core, make_adapter, prompt) -> None:
    old, new = make_adapter("v1", seed=11), make_adapter("v2", seed=12)
    driver = start_core()
    driver.add(old, new)
    first = driver.submit("first", prompt(40), old.rev)
    driver.finish()
    warm = driver.submit("warm", prompt(40), old.rev)
    driver.finish()
    replaced = driver.submit("replaced", prompt(40), new.rev, logprobs=0)
    driver.finish()
    assert (first.cached, warm.cached, replaced.cached) == (0, 32, 0)
    assert warm.tokens == first.tokens
    expected = alone(start_core, new, prompt(40), logprobs=0)
    assert replaced.logprobs == expected.logprobs and replaced.tokens != first.tokens


def test_an_adapter_never_reads_what_the_base_has_cached(start_core, adapters, prompt) -> None:
    driver = start_core()
    driver.add(adapters[0])
    driver.submit("base", prompt(40))
    driver.finish()
    story = driver.submit("adapted", prompt(40), adapters[0].rev, logprobs=0)
    driver.finish()
    assert story.cached == 0
    assert story.logprobs == alone(start_core, adapters[0], prompt(40), logprobs=0).logprobs


def test_a_request_finishes_on_the_revision_it_started_with(
    start_core, make_adapter, prompt
) -> None:
    old, new = make_adapter("old", seed=21), make_adapter("new", seed=22)
    driver = start_core()
    driver.add(old)
    story = driver.submit("running", prompt(20), old.rev, max_tokens=30)
    driver.until(lambda: len(story.tokens) >= 3)
    driver.add(new)
    driver.core.take(RemoveRevision(900, old.rev))
    other = driver.submit("next", prompt(20), new.rev, max_tokens=30)
    driver.until(lambda: len(other.tokens) >= 3)
    assert 900 not in driver.answers, "answered while a request still ran on it"
    driver.finish()
    driver.until(lambda: 900 in driver.answers)
    assert story.tokens == alone(start_core, old, prompt(20), max_tokens=30).tokens
    assert other.tokens == alone(start_core, new, prompt(20), max_tokens=30).tokens
    late = driver.submit("late", prompt(20), old.rev)
    driver.finish()
    assert (late.finish, late.code, late.tokens) == ("error", "model_not_found", [])


def test_an_unknown_revision_is_never_answered_by_the_base(start_core, prompt) -> None:
    driver = start_core()
    story = driver.submit("lost", prompt(5), "f" * 64)
    driver.finish()
    assert (story.finish, story.code, story.tokens) == ("error", "model_not_found", [])


def test_a_failed_load_is_an_error_and_not_base_weights(start_core, make_adapter, prompt) -> None:
    broken = make_adapter("broken", seed=31)
    with open(broken.manifest.path, "r+b") as file:
        file.truncate(100)
    driver = start_core()
    driver.add(broken)
    beside = driver.submit("beside", prompt(5))
    story = driver.submit("broken", prompt(5), broken.rev)
    driver.finish()
    assert (story.finish, story.code, story.tokens) == ("error", "load_failed", [])
    assert "expected" in story.message and beside.finish == "length"
    assert driver.call(lambda i: Load(command_id=i, rev=broken.rev)).code == "load_failed"


def test_evict_and_load_answer_and_move_the_tiers(start_core, adapters, prompt) -> None:
    driver = start_core()
    driver.add(adapters[0])
    rev = adapters[0].rev
    assert driver.call(lambda i: Load(command_id=i, rev=rev)).code == ""
    assert driver.status(rev).state == "idle"
    assert driver.call(lambda i: Evict(command_id=i, rev=rev)).code == ""
    assert driver.status(rev).state == "ram"
    assert [(e.before, e.after) for e in driver.events][-1] == ("idle", "ram")
    story = driver.submit("again", prompt(9), rev)
    driver.finish()
    assert story.tokens == alone(start_core, adapters[0], prompt(9)).tokens


def test_rows_of_neighbours_are_untouched_bits_in_the_arena(mixed) -> None:
    """Adapter blocks are read only: after a whole run they hold what was copied."""
    driver, _ = mixed
    arena, table = driver.core.machine.arena, driver.core.slots
    before = {slot: arena.bytes[list(row.blocks)].clone() for slot, row in table.rows.items()}
    driver.finish()
    assert len(before) == 4
    for slot, row in table.rows.items():
        assert torch.equal(arena.bytes[list(row.blocks)], before[slot])
