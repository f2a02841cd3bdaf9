"""Random requests and commands: every request has one result, which is the one it has alone."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters.pack import pack_into
from engine.messages import AddRevision, Evict, Load, PackedManifest, RemoveRevision, SetRevision
from engine.pooling.requests import AbortPool
from tests.fakes.tiny_qwen3 import NO, YES, write_qwen3, write_qwen3_adapter

TASKS = ("embed", "tokens", "classify")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))]
)
def test_whatever_happens_each_answer_is_that_of_its_request_alone(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest], seed: int
) -> None:
    play_and_compare(drive, pack, seed)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_so_it_is_on_a_decoder_that_scores_by_words_and_by_heads(
    drive: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    base = write_qwen3(tmp_path / "qwen3")

    def pack(number: int) -> PackedManifest:
        """Every other one has a head of its own."""
        folder = tmp_path / f"adapter{number}"
        write_qwen3_adapter(folder, number, labels=2 * (number % 2))
        store = tmp_path / "store"
        return pack_into(folder, base, store, block_size=0, dtype="float32", max_rank=64)

    play_and_compare(partial(drive, base, score_tokens=(YES, NO)), pack, seed)


def play_and_compare(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest], seed: int
) -> None:
    """A random life of one core; then another answers what it answered, one request at a time."""
    rng = random.Random(seed)
    manifests = [pack(number) for number in range(1, 6)]
    slots = rng.choice((1, 2, 3))
    driver = drive(slots=slots, starve_after=0.3, max_batch_tokens=40)
    for i, manifest in enumerate(manifests):
        driver.core.take(AddRevision(command_id=i, manifest=manifest))
    asked: dict[str, dict[str, Any]] = {}
    aborted = set()
    for turn in range(120):
        driver.now += rng.choice((0.0, 0.01, 0.2))
        for n in range(rng.randrange(3)):
            rev = rng.choice([None, *(m.rev for m in manifests)])
            tokens = [rng.randrange(3, 50) for _ in range(rng.choice((1, 2, 9, 20, 32)))]
            name = f"{turn}-{n}"
            asked[name] = {"rev": rev, "task": rng.choice(TASKS), "tokens": tokens}
            driver.ask(name, priority=rng.choice((10, 50, 50, 90)), **asked[name])
        manifest, command = rng.choice(manifests), 100 + turn
        match rng.randrange(9):
            case 0:
                driver.core.take(Evict(command_id=command, rev=manifest.rev))
            case 1:
                driver.core.take(Load(command_id=command, rev=manifest.rev))
            case 2 if turn < 60:
                driver.core.take(RemoveRevision(command, manifest.rev))
            case 3:
                driver.core.take(AddRevision(command_id=command, manifest=manifest))
            case 4:
                pinned = rng.random() < 0.2
                driver.core.take(
                    SetRevision(command_id=command, rev=manifest.rev, pinned=pinned, priority=40)
                )
            case 5 if asked:
                name = rng.choice(sorted(asked))
                driver.core.take(AbortPool(name))
                aborted.add(name)
        driver.step()
        driver.core.residency.check()
    for i, manifest in enumerate(manifests):  # nobody is pinned, so that all get their turn
        driver.core.take(
            SetRevision(command_id=900 + i, rev=manifest.rev, pinned=False, priority=50)
        )

    def done() -> bool:
        driver.now += 0.05
        return set(asked) <= driver.results.keys() | aborted

    driver.until(done)
    assert driver.core.num_waiting == 0
    alone = drive()
    for i, manifest in enumerate(manifests):
        alone.core.take(AddRevision(command_id=i, manifest=manifest))
    answered = 0
    for name, result in driver.results.items():
        if result.code:
            # Removed meanwhile; or a pin holds the only slot.
            why = ("model_not_found", "no_room") if slots == 1 else ("model_not_found",)
            assert result.code in why and asked[name]["rev"] is not None, (name, result)
            continue
        alone.results.clear()
        alone.ask(name, **asked[name])
        alone.until(lambda name=name: name in alone.results)  # type: ignore[misc]
        assert np.array_equal(result.values, alone.results[name].values)
        answered += 1
    assert answered > 20
    assert all(revision.leases == 0 for revision in driver.core.residency.revisions())
