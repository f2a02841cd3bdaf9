"""The lifecycle on a card: real copy streams, freed blocks poisoned, answers to the bit (rule 11).

Loads, evictions, drains, removals, lost files, slow reads and aborts meet in a pool that is too
small for them, on a tiny model in deterministic mode; a second core on the same card says what each
request answers alone.  tests/fakes/poisoned_core.py says what is played; on the CPU the same is in
tests/integration/engine/test_poisoned_blocks.py.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from engine.adapters import copy_calls
from engine.memory.pool import Owner
from engine.messages import Evict, Load

pytestmark = pytest.mark.gpu

_TESTS = Path(__file__).parents[1]
CARD = {"device": "cuda", "dtype": "float32", "deterministic": True, "max_rank": 16}
SIZES = {"max_num_seqs": 4, "max_batch_tokens": 64, "mixed_tokens": 20, "starve_after": 0.05}
#: What has to have happened, or it proves little.
HAPPENINGS = ("length", "abort", "draining", "load_failed", "blocks", "ram: cost", "ram: manual")


def _load(path):
    """A module of another folder of tests."""
    spec = importlib.util.spec_from_file_location(f"card_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lives = _load(_TESTS / "fakes" / "poisoned_core.py")
engine_parts = _load(_TESTS / "integration" / "engine" / "conftest.py")
model_dir, make_adapter = engine_parts.model_dir, engine_parts.make_adapter
adapters, prompt, start_core = engine_parts.adapters, engine_parts.prompt, engine_parts.start_core


def tight(adapters) -> int:
    """Blocks for the largest adapter, one long sequence and a little more."""
    return 16 + max(adapter.manifest.num_blocks for adapter in adapters)


@pytest.mark.parametrize("lookahead", [False, True])
def test_nobody_on_a_card_reads_a_block_that_is_not_theirs(
    start_core, adapters, prompt, lookahead
) -> None:
    control = lives.control_on(start_core(**CARD, max_num_seqs=4, max_batch_tokens=64), adapters)
    driver = start_core(lookahead=lookahead, num_blocks=tight(adapters), **SIZES, **CARD)
    census = lives.live(driver, control, adapters, prompt, seeds=range(40), acts=80)
    assert not [what for what in HAPPENINGS if census[what] < 3], census


#: Who makes a load's copies.
COPIES = {"torch": lambda: None, "each": copy_calls.each_piece, "batch": copy_calls.one_batch}


def calls_of(copies: str):
    calls = COPIES[copies]()
    if calls is None and copies != "torch":
        pytest.skip(f"this driver cannot copy by {copies}")
    return calls


@pytest.mark.parametrize("copies", COPIES)
def test_every_block_is_where_it_belongs_however_they_are_scattered(
    start_core, adapters, copies
) -> None:
    driver = start_core(num_blocks=128, **CARD)
    driver.add(*adapters)
    core = driver.core
    core.machine.copier.calls = calls = calls_of(copies)
    holes = [core.pool.allocate(n % 3 + 1, Owner.KV) for n in range(40)]
    for hole in holes[::2]:
        core.pool.release(hole)
    for turn in range(12):
        adapter = adapters[turn % 4]
        assert driver.call(lambda i, rev=adapter.rev: Load(command_id=i, rev=rev)).code == ""
        row, there = core.slots.find(adapter.rev), core.machine.arena.bytes.cpu()
        packed = Path(adapter.manifest.path).read_bytes()
        assert b"".join(there[block].numpy().tobytes() for block in row.blocks) == packed
        gone = driver.call(lambda i, rev=adapter.rev: Evict(command_id=i, rev=rev, force=True))
        assert gone.code == ""
    assert core.machine.copier.calls is calls, "the driver refused"
    for hole in holes[1::2]:
        core.pool.release(hole)


@pytest.mark.parametrize("copies", COPIES)
def test_a_copy_waits_for_a_step_that_still_reads_its_blocks(
    start_core, adapters, prompt, copies
) -> None:
    """The copy stream is kept free and the compute stream busy: only the fence orders the two."""
    control = lives.control_on(start_core(**CARD), adapters)
    largest = max(adapter.manifest.num_blocks for adapter in adapters)
    driver = start_core(lookahead=True, num_blocks=largest + 14, max_num_seqs=2, **CARD)
    driver.core.machine.copier.calls = calls_of(copies)
    lives.poison(driver.core)
    driver.add(*adapters)
    busy = torch.randn(2048, 2048, device="cuda")
    for n in range(40):
        adapter, other = adapters[n % 4], adapters[(n + 1) % 4]
        ids = prompt(40, n % 3)
        story = driver.submit(f"reads {n}", ids, adapter.rev, max_tokens=8, ignore_eos=True)
        driver.until(lambda story=story: len(story.tokens) >= 4)
        for _ in range(20):
            busy = (busy @ busy).clamp_(-1, 1)  # the steps behind it end late
        gone = driver.call(
            lambda i, rev=adapter.rev: Evict(command_id=i, rev=rev, abort_running=True, force=True)
        )
        assert gone.code == ""
        assert driver.call(lambda i, rev=other.rev: Load(command_id=i, rev=rev)).code == ""
        after = driver.submit(f"after {n}", ids, other.rev, max_tokens=8, ignore_eos=True)
        driver.finish()
        assert after.tokens == control(ids, other.rev, 8)[:8]
        assert story.tokens == control(ids, adapter.rev, 8)[: len(story.tokens)]


def test_a_copy_without_memory_on_the_card_fails_alone(
    start_core, adapters, prompt, monkeypatch
) -> None:
    """Injected where the copies are queued: the others' steps go on, and later it loads."""
    driver = start_core(num_blocks=128, **CARD)
    driver.add(*adapters[:2])
    copier = driver.core.machine.copier
    queue = copier._queue

    def no_memory(rev, source, blocks, fences):
        queue(rev, source, blocks[:1], fences)  # some of it is under way already
        raise torch.OutOfMemoryError("CUDA out of memory")

    other = driver.submit("other", prompt(30), max_tokens=20, ignore_eos=True)
    monkeypatch.setattr(copier, "_queue", no_memory)
    answer = driver.call(lambda i: Load(command_id=i, rev=adapters[0].rev))
    assert answer.code == "load_failed" and "no memory left" in answer.message
    driver.core.scheduler.check()
    monkeypatch.undo()
    assert driver.call(lambda i: Load(command_id=i, rev=adapters[0].rev)).code == ""
    driver.finish()
    assert other.finish == "length"
