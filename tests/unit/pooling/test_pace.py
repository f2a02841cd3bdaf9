"""When a step of an engine that gives way may be launched, and how many rows it has."""

import random

import pytest

from engine.pooling.pace import LEAST_ROWS, SLICE_SECONDS, Pace

MOST = 16384


class Device:
    """Time, and what steps take of it: a launch, and so much a row."""

    def __init__(self, pace: Pace, *, rows_per_second: float = 700e3, launch: float = 0.0) -> None:
        self.pace, self.now, self.busy = pace, 50.0, 0.0
        self.speed, self.launch = rows_per_second, launch

    def step(self, rows: int | None = None) -> float:
        """One as soon as it is due; the seconds that it took."""
        self.now += self.pace.seconds_left(self.now)
        assert self.pace.seconds_left(self.now) == 0.0
        rows = self.pace.rows if rows is None else rows
        took = self.launch + rows / self.speed
        self.now, self.busy = self.now + took, self.busy + took
        self.pace.note(rows, took, self.now)
        return took


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
def test_the_share_is_kept_whatever_steps_take(share: float) -> None:
    pace, drawn = Pace(MOST), random.Random(3)
    device = Device(pace)
    pace.keep_to(share)
    began = device.now
    for _ in range(500):
        device.launch = drawn.uniform(0.0, 0.02)
        device.step(drawn.randrange(1, MOST))
    device.now += pace.seconds_left(device.now)
    assert device.busy / (device.now - began) == pytest.approx(share)


def test_who_was_idle_has_saved_nothing_for_later() -> None:
    pace = Pace(MOST)
    device = Device(pace)
    pace.keep_to(0.5)
    device.step(7000)
    device.now += 60.0
    assert pace.seconds_left(device.now) == 0.0
    took = device.step(7000)
    assert pace.seconds_left(device.now) == pytest.approx(took)


def test_steps_become_as_long_as_a_slice_on_a_device_of_any_speed() -> None:
    for speed in (400e3, 700e3, 3e6):
        pace = Pace(MOST, least_rows=256)
        device = Device(pace, rows_per_second=speed)
        pace.keep_to(0.2)
        for _ in range(3):
            took = device.step()
        assert took == pytest.approx(SLICE_SECONDS, rel=0.01)


def test_whole_steps_teach_how_small_those_are_that_give_way() -> None:
    pace = Pace(MOST)
    device = Device(pace, launch=0.001)
    for _ in range(3):
        device.step()
    pace.keep_to(0.2)
    assert device.step() - device.launch == pytest.approx(SLICE_SECONDS, rel=0.05)


def test_what_a_launch_takes_does_not_shrink_steps_more_and_more() -> None:
    pace = Pace(MOST)
    device = Device(pace)
    for _ in range(20):
        device.step()
    pace.keep_to(0.2)
    device.launch = 10 * SLICE_SECONDS  # nor does another that takes half of the device
    for _ in range(200):
        device.step()
    assert pace.rows == pytest.approx(device.speed * SLICE_SECONDS, rel=0.01)


def test_a_slow_device_has_the_smallest_steps_and_a_small_budget_is_kept() -> None:
    for most, rows in ((MOST, LEAST_ROWS), (100, 100)):
        pace = Pace(most)
        device = Device(pace, rows_per_second=4e3)
        pace.keep_to(0.2)
        assert pace.rows == rows
        device.step()
        assert pace.rows == rows


def test_with_the_whole_device_nobody_waits_and_steps_are_of_any_size() -> None:
    pace = Pace(MOST)
    device = Device(pace)
    for _ in range(10):
        device.step()
        assert not pace.gives_way and pace.rows == MOST
        assert pace.seconds_left(device.now) == 0.0


def test_a_change_holds_for_what_the_last_step_has_left_to_wait() -> None:
    pace = Pace(MOST)
    device = Device(pace)
    took = device.step(7000)
    pace.keep_to(0.2)
    assert pace.seconds_left(device.now) == pytest.approx(4 * took)
    pace.keep_to(0.5)
    assert pace.seconds_left(device.now) == pytest.approx(took)
    pace.keep_to(1.0)
    assert pace.seconds_left(device.now) == 0.0
