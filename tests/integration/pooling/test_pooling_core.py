"""The pooling core: adapters come and go beside requests, and every request has one result."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.messages import AddRevision, Load, PackedManifest, RemoveRevision
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from engine.pooling.requests import AbortPool

HIDDEN = 32


def test_a_request_waits_for_its_adapter_and_others_do_not_wait_for_it(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest]
) -> None:
    driver, manifest = drive(), pack(1)
    driver.core.take(AddRevision(command_id=1, manifest=manifest))
    driver.ask("cold", manifest.rev)
    driver.ask("base")
    driver.step()
    assert set(driver.results) == {"base"} and driver.core.num_waiting == 1
    driver.until(lambda: "cold" in driver.results)
    assert not np.array_equal(driver.results["cold"].values, driver.results["base"].values)
    states = [state for rev, state in driver.events if rev == manifest.rev]
    assert states == ["loading", "ram", "loading", "idle", "active", "idle"]


def test_more_adapters_than_slots_take_turns_and_each_has_its_own_answer(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest]
) -> None:
    manifests = [pack(seed) for seed in range(1, 6)]
    driver, roomy = drive(slots=2, starve_after=0.5), drive()
    for one in (driver, roomy):
        for i, manifest in enumerate(manifests):
            one.core.take(AddRevision(command_id=i, manifest=manifest))
            for turn in range(3):
                one.ask(f"{i}-{turn}", manifest.rev)
        one.until(lambda one=one: len(one.results) == 15)  # type: ignore[misc]
    for name, result in driver.results.items():
        assert not result.code
        assert np.array_equal(result.values, roomy.results[name].values)
    firsts = [driver.results[f"{i}-0"].values for i in range(5)]
    assert len({one.tobytes() for one in firsts if one is not None}) == 5
    assert driver.core.residency.slots.num_slots == 2


def test_an_adapter_whose_slots_are_always_awaited_gets_its_turn(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest]
) -> None:
    """One slot; before each step another request for the adapter in it arrives."""
    busy, rare = pack(1), pack(2)
    driver = drive(slots=1, starve_after=2.0)
    for i, manifest in enumerate((busy, rare)):
        driver.core.take(AddRevision(command_id=i, manifest=manifest))
    driver.ask("first", busy.rev)
    driver.until(lambda: "first" in driver.results)
    driver.ask("rare", rare.rev)
    for turn in range(2000):
        driver.ask(f"busy{turn}", busy.rev)
        driver.ask(f"more{turn}", busy.rev, tokens=[3] * 20)
        driver.now += 0.05
        driver.step()
        if "rare" in driver.results:
            break
        driver.core.bell.wait(0.001)
    assert not driver.results["rare"].code


def test_an_aborted_request_has_no_result_and_leaves_no_lease(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest]
) -> None:
    driver, manifest = drive(), pack(1)
    driver.core.take(AddRevision(command_id=1, manifest=manifest))
    driver.ask("gone", manifest.rev)
    driver.core.take(AbortPool("gone"))
    driver.core.take(AbortPool("unheard of"))
    driver.core.take(RemoveRevision(2, manifest.rev))
    driver.until(lambda: 2 in driver.answers)
    assert driver.results == {} and driver.answers == {1: "", 2: ""}


def test_a_request_that_waits_beyond_its_deadline_is_told_so(
    drive: Callable[..., Any],
    pack: Callable[[int], PackedManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, manifest = drive(), pack(1)
    monkeypatch.setattr(driver.core.residency, "can_acquire", lambda rev: False)
    driver.core.take(AddRevision(command_id=1, manifest=manifest))
    driver.ask("late", manifest.rev, deadline_seconds=3.0)
    driver.step()
    driver.now += 2.9
    driver.step()
    assert driver.results == {}
    driver.now += 0.2
    driver.step()
    assert driver.results["late"].code == "deadline_exceeded" and driver.core.num_waiting == 0


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest], tmp_path: Path
) -> None:
    driver, manifest = drive(), pack(1)
    broken = msgspec.structs.replace(manifest, path=str(tmp_path / "nothing.bin"))
    driver.core.take(AddRevision(command_id=1, manifest=broken))
    driver.ask("one", manifest.rev)
    driver.ask("two", manifest.rev)
    driver.ask("base")
    driver.until(lambda: len(driver.results) == 3)
    assert [driver.results[name].code for name in ("one", "two", "base")] == [
        "load_failed",
        "load_failed",
        "",
    ]


def test_a_file_of_another_layout_is_refused(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest]
) -> None:
    driver = drive()
    other = msgspec.structs.replace(pack(1), layout="0" * 12)
    driver.core.take(AddRevision(command_id=1, manifest=other))
    driver.core.take(Load(command_id=2, rev=other.rev))
    driver.step()
    assert driver.answers == {1: "load_failed", 2: "model_not_found"}


def test_two_requests_of_one_id_are_told_apart_from_each_other(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest]
) -> None:
    driver, manifest = drive(), pack(1)
    driver.core.take(AddRevision(command_id=1, manifest=manifest))
    driver.ask("same", manifest.rev)
    driver.step()
    driver.ask("same")
    driver.step()
    assert driver.results["same"].code == "invalid_value" and driver.core.num_waiting == 1


def test_tasks_and_revisions_are_mixed_in_one_step(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest]
) -> None:
    driver, manifests = drive(), [pack(1), pack(2)]
    for i, manifest in enumerate(manifests):
        driver.core.take(AddRevision(command_id=i, manifest=manifest))
        driver.core.take(Load(command_id=10 + i, rev=manifest.rev))
    driver.until(lambda: {10, 11} <= driver.answers.keys())
    wanted = [
        (task, rev)
        for task in ("embed", "tokens", "classify")
        for rev in (None, *(m.rev for m in manifests))
    ]
    for n, (task, rev) in enumerate(wanted):
        driver.ask(f"{n}", rev, task=task, tokens=[4 + n] * (n + 1))
    steps = driver.core.num_steps
    driver.step()
    assert driver.core.num_steps == steps + 1 and len(driver.results) == len(wanted)
    together = dict(driver.results)
    for n, (task, rev) in enumerate(wanted):
        driver.results.clear()
        driver.ask("alone", rev, task=task, tokens=[4 + n] * (n + 1))
        driver.step()
        assert np.array_equal(driver.results["alone"].values, together[f"{n}"].values)
    assert together["4"].values.shape == (5, HIDDEN)  # type: ignore[union-attr]
    assert together["7"].logits.shape == (2,)  # type: ignore[union-attr]


class Card:
    """Stands in for an event: a step that has not landed when it is launched."""

    def __init__(self, waited: list[str], name: str) -> None:
        self._waited, self._name = waited, name

    def synchronize(self) -> None:
        self._waited.append(self._name)


def flying(driver: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have steps land as a card's do; what was launched and waited for, by a step's first input."""
    runner, told = driver.core._runner, list[str]()
    launch = runner.launch

    def launched(placed: Any) -> Any:
        landing = launch(placed)
        name = min(p.item.request.request_id for p in landing.batch)
        told.append(f"launch {name}")
        return dataclasses.replace(landing, there=Card(told, f"wait {name}"))

    monkeypatch.setattr(runner, "launch", launched)
    return told


def test_a_card_is_given_the_next_step_before_the_last_is_waited_for(
    drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, plain = drive(max_num_seqs=1), drive()
    order = flying(driver, monkeypatch)
    for name in "abc":
        driver.ask(name, tokens=[5, ord(name) % 40])
        plain.ask(name, tokens=[5, ord(name) % 40])
    driver.until(lambda: len(driver.results) == 3)
    plain.step()
    assert order == ["launch a", "launch b", "wait a", "launch c", "wait b", "wait c"]
    for name in "abc":
        assert np.array_equal(driver.results[name].values, plain.results[name].values)
    driver.step()
    assert driver.core.idle and driver.core.running == []


def test_an_adapter_is_held_until_its_step_has_landed(
    drive: Callable[..., Any],
    pack: Callable[[int], PackedManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, manifest = drive(), pack(1)
    driver.core.take(AddRevision(command_id=1, manifest=manifest))
    driver.core.take(Load(command_id=2, rev=manifest.rev))
    driver.until(lambda: 2 in driver.answers)
    flying(driver, monkeypatch)
    driver.ask("one", manifest.rev)
    driver.step()
    assert driver.core.running == [manifest.rev] and not driver.results
    driver.core.take(AbortPool("one"))  # too late: it is told of
    driver.core.take(RemoveRevision(3, manifest.rev))
    revision = driver.core.residency.find(manifest.rev)
    assert revision is not None and revision.running
    driver.step()
    assert not revision.running
    driver.until(lambda: 3 in driver.answers)


def test_what_flies_is_told_of_after_everybody_who_waits_is_forgotten(
    drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = drive(max_num_seqs=1)
    flying(driver, monkeypatch)
    driver.ask("flies")
    driver.ask("waits")
    driver.step()
    assert driver.core.abandon() == ["waits"]
    driver.step()
    assert set(driver.results) == {"flies"} and not driver.results["flies"].code


def test_inputs_are_read_while_earlier_ones_are_computed(model: Path) -> None:
    config = PoolingConfig(model=str(model), device="cpu", max_batch_tokens=32, max_num_seqs=2)
    with PoolingEngine(config) as engine:
        texts = [[5 + n, 6] for n in range(9)]
        steps = []

        def read() -> Iterator[list[int]]:
            for tokens in texts:
                steps.append(engine.core.num_steps)
                yield tokens

        got = engine.embed(read())
        assert steps == [0, 0, 1, 1, 2, 2, 3, 3, 4]
        assert np.allclose(got, engine.embed(texts), atol=1e-6)
        names = iter([None] * 8)
        with pytest.raises(ValueError, match="shorter"):
            engine.embed(texts, revs=names)


def test_an_iterator_that_breaks_leaves_nothing_behind(model: Path) -> None:
    def broken() -> Iterator[list[int]]:
        yield from ([5, 6], [7], [8])
        raise OSError("the file ends here")

    config = PoolingConfig(model=str(model), device="cpu", max_batch_tokens=32, max_num_seqs=2)
    with PoolingEngine(config) as engine:
        with pytest.raises(OSError, match="ends here"):
            engine.embed(broken())
        assert engine.core.num_waiting == 0 and engine.core.running == []
        assert len(engine.embed([[5, 6]])) == 1


@pytest.mark.parametrize("token", [-1, 50, 1 << 63, 1 << 80])
def test_a_token_that_the_model_lacks_is_refused(drive: Callable[..., Any], token: int) -> None:
    driver = drive()
    driver.ask("token", tokens=[5, token])
    driver.ask("type", tokens=[5, 6], types=[0, token])
    driver.step()
    for name, told in (("token", "token id outside 0..49"), ("type", "token type outside 0..1")):
        result = driver.results[name]
        assert result.code == "invalid_value" and told in result.message
