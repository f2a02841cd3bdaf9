"""How fast queued sequences begin, measured only while more are ready than fit."""

import pytest

from engine.backlog import SURE_SECONDS, Backlog


def test_nothing_is_said_while_everybody_fits():
    backlog = Backlog(0.0)
    for i in range(1000):
        backlog.note(i * 0.1, 3, left_over=False)
    assert backlog.per_second == 0.0


def test_a_backlog_is_measured_once_it_has_lasted_and_forgotten_when_it_is_over():
    backlog, now = Backlog(0.0), 0.0
    while now < SURE_SECONDS - 0.5:
        backlog.note(now, 1, left_over=True)
        assert backlog.per_second == 0.0
        now += 0.1
    for _ in range(100):
        backlog.note(now, 1, left_over=True)
        now += 0.1
    assert backlog.per_second == pytest.approx(10.0, rel=0.05)
    backlog.note(now, 1, left_over=False)
    assert backlog.per_second == 0.0
    backlog.note(now + 100.0, 1, left_over=True)
    backlog.note(now + 100.1, 50, left_over=True)
    assert backlog.per_second == 0.0, "of another time"


def test_it_follows_an_engine_that_becomes_slower():
    backlog, now = Backlog(0.0), 0.0
    for gap in [0.1] * 300 + [1.0] * 100:
        backlog.note(now, 1, left_over=True)
        now += gap
    assert 0.9 <= backlog.per_second <= 1.2


def test_a_full_house_tells_its_speed_and_a_cold_adapter_is_no_backlog(make):
    h = make(max_num_seqs=2, slots=2, num_blocks=400)
    h.add("slow")
    h.host.delay["slow"] = 10_000
    h.submit("cold", [1], "slow")
    h.step(600)
    assert h.scheduler.backlog.per_second == 0.0
    for i in range(400):
        h.submit(f"r{i}", [i % 7], max_tokens=10)
    h.step(600)
    rate = h.scheduler.backlog.per_second
    assert rate == pytest.approx(2 / (11 * h.step_seconds), rel=0.3), rate
    h.scheduler.abort_all()
    h.step(2)
    assert h.scheduler.backlog.per_second == 0.0


@pytest.mark.parametrize("steps, said", [(0, "queued"), (3, "after 3 tokens")])
def test_who_runs_out_of_time_is_told_how_far_it_came(make, steps, said):
    h = make(max_num_seqs=1)
    if not steps:
        h.submit("other", [1], max_tokens=50)
        h.step()
    h.submit("r", [1], max_tokens=50, deadline=0.01 * steps + 0.005)
    h.run(until=lambda: h.end("r") is not None)
    end = h.end("r")
    assert end.code == "deadline_exceeded" and said in end.message
