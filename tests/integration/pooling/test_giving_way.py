"""The pooling core beside one that generates: its steps wait, and nothing else does."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.messages import AddRevision, PackedManifest
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from engine.pooling.pace import LEAST_ROWS
from engine.pooling.requests import AbortPool
from engine.pooling_messages import GiveWay

TAKES = 0.25  # seconds that a step computes


@pytest.fixture
def driver(drive: Callable[..., Any]) -> Any:
    """Each step takes TAKES by a clock that stands still otherwise."""
    made = drive()

    def computing(*_: object) -> None:
        made.now += TAKES

    made.core.machine.backbone.layers[0].register_forward_pre_hook(computing)
    return made


def ran(driver: Any) -> set[str]:
    driver.step()
    return set(driver.results)


def test_the_next_step_waits_until_the_share_is_kept(driver: Any) -> None:
    driver.core.take(GiveWay(0.2))
    driver.ask("first")
    assert ran(driver) == {"first"}
    driver.ask("second")
    assert ran(driver) == {"first"} and driver.core.idle and driver.core.num_waiting == 1
    driver.now += 3.9 * TAKES
    assert ran(driver) == {"first"}
    driver.now += 0.2 * TAKES
    assert ran(driver) == {"first", "second"}


def test_commands_are_carried_out_and_answered_while_it_waits(
    driver: Any, pack: Callable[[int], PackedManifest]
) -> None:
    driver.core.take(GiveWay(0.01))
    driver.ask("first")
    driver.step()
    driver.ask("second")
    driver.ask("third")
    driver.core.take(AddRevision(command_id=7, manifest=pack(1)))
    driver.core.take(AbortPool("second"))
    assert ran(driver) == {"first"}
    assert driver.answers == {7: ""} and driver.core.num_waiting == 1
    driver.ask("late", deadline_seconds=TAKES)
    driver.step()
    driver.now += 2 * TAKES
    assert ran(driver) == {"first", "late"}
    assert driver.results["late"].code == "deadline_exceeded"
    assert driver.core.abandon() == ["third"]
    driver.step()
    assert driver.core.idle


def test_with_the_device_to_itself_again_it_goes_on_at_once(driver: Any) -> None:
    driver.core.take(GiveWay(0.01))
    driver.ask("first")
    driver.step()
    driver.ask("second")
    assert ran(driver) == {"first"} and driver.core.share == 0.01
    driver.core.take(GiveWay(1.0))
    assert ran(driver) == {"first", "second"} and driver.core.share == 1.0


def test_it_sleeps_no_longer_than_until_the_next_step_is_due(driver: Any) -> None:
    slept: list[float] = []

    class Bell:
        def wait(self, seconds: float) -> None:
            slept.append(seconds)

        def clear(self) -> None:
            pass

    driver.core.bell = Bell()
    driver.core.take(GiveWay(0.5))
    driver.ask("first")
    driver.step()
    driver.ask("second")
    driver.step()
    driver.core.wait()
    driver.now += TAKES - 0.002
    driver.step()
    driver.core.wait()
    driver.now += 0.002
    driver.core.wait()
    assert pytest.approx([0.01, 0.002, 0.0]) == slept


def test_steps_are_small_while_it_gives_way(driver: Any) -> None:
    def asked(start: str) -> list[str]:
        names = [f"{start}{n}" for n in range(20)]
        for name in names:
            driver.ask(name, tokens=[5] * 32)
        return names

    whole = asked("whole")
    assert ran(driver) == set(whole)
    driver.core.take(GiveWay(0.5))
    driver.now += TAKES
    small = asked("small")
    assert ran(driver) == {*whole, *small[: LEAST_ROWS // 32]}, "fewer are not worth a launch"


def test_no_step_is_launched_beside_one_that_runs(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Landed:
        def synchronize(self) -> None:
            pass

    launch = driver.core._runner.launch

    def on_a_card(placed: Any) -> Any:
        return dataclasses.replace(launch(placed), there=Landed())

    monkeypatch.setattr(driver.core._runner, "launch", on_a_card)
    driver.ask("first")
    driver.step()
    driver.ask("second")
    assert ran(driver) == {"first"} and driver.core.running == [None]
    driver.core.take(GiveWay(0.5))
    driver.ask("third")
    driver.now += 10 * TAKES  # by the first it would be due; the second is not through yet
    assert ran(driver) == {"first", "second"} and driver.core.running == []
    driver.now += 10 * TAKES
    driver.step()
    assert driver.core.running == [None] and not driver.core.idle
    assert ran(driver) == {"first", "second", "third"}


def test_vectors_are_the_same_at_any_pace(model: Path) -> None:
    config = PoolingConfig(
        model=str(model), device="cpu", deterministic=True, adapter_pool=1 << 20, ram_cache=1 << 20
    )
    inputs = [[5 + n % 40] * (1 + n % 32) for n in range(40)]
    with PoolingEngine(config) as engine:
        alone = engine.embed(inputs)
        engine.give_way(0.5)
        beside = engine.embed(inputs)
    assert all(np.array_equal(a, b) for a, b in zip(alone, beside, strict=True))


def test_the_message_travels_as_it_is() -> None:
    from engine.messages import Command

    sent = msgspec.msgpack.encode(GiveWay(0.2))
    assert msgspec.msgpack.decode(sent, type=Command) == GiveWay(0.2)
