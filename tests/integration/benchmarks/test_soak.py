"""`soak.py` runs to its end on a tiny model, and its verdict sees what grows."""

import json
import tempfile
from pathlib import Path

import pytest

MEASURES = {
    "daemon_rss": 100 << 20,
    "engine_rss": 300 << 20,
    "daemon_fds": 30,
    "engine_fds": 5,
    "daemon_threads": 14,
    "engine_threads": 12,
    "daemon_tasks": 30,
    "daemon_objects": 10_000,
    "engine_objects": 200_000,
    "engine_cache_entries": 50,
    "kv_blocks": 60,
    "lost_blocks": 0,
    "restarts": 0,
}


def samples_with(**grow):
    """Sixty of them, two seconds apart; `grow` is what a measure gains from one to the next."""
    return [
        {"t": 2.0 * n, **{name: value + n * grow.get(name, 0) for name, value in MEASURES.items()}}
        for n in range(60)
    ]


def judged(samples, *, after=None, wrong=()):
    from soak import verdict

    return verdict(samples, MEASURES | {"t": 0.0}, MEASURES | {"t": 130.0} | (after or {}), wrong)


def test_what_stays_as_it_is_is_flat():
    told = judged(samples_with())
    assert (told["flat"], told["failed"]) == (True, [])
    assert told["measures"]["daemon_rss"]["growth"] == 0
    assert told["samples"] == 39, "the first third is the warm-up"


def test_what_grew_in_the_warm_up_alone_is_flat():
    samples = samples_with(daemon_rss=1 << 20)
    for sample in samples[20:]:
        sample["daemon_rss"] = samples[20]["daemon_rss"]
    assert judged(samples)["flat"]


def test_one_outlier_grows_nothing():
    samples = samples_with()
    samples[-1]["daemon_rss"] *= 3
    assert judged(samples)["flat"]


@pytest.mark.parametrize(
    "grow", [{"daemon_rss": 1 << 18}, {"engine_rss": 1 << 19}, {"engine_fds": 1}]
)
def test_what_grows_is_named(grow):
    told = judged(samples_with(**grow))
    [name] = grow
    assert not told["flat"]
    assert [said.split()[0] for said in told["failed"]] == [name]
    assert told["measures"][name]["growth"] == pytest.approx(grow[name] * 38)


def test_what_is_not_given_back_or_should_not_have_been_said_fails():
    told = judged(
        samples_with(), after={"daemon_tasks": 60, "restarts": 1}, wrong=["500 x: y", "500 x: y"]
    )
    assert told["failed"] == [
        "500 x: y",
        "daemon_tasks: 30 more than before the traffic",
        "the engine ended 1 times",
    ]
    told = judged(samples_with(), after={"engine_cache_entries": 125})
    assert told["failed"] == ["the prefix cache has 125 entries for 60 blocks"]
    samples = samples_with()
    samples[0]["lost_blocks"] = 1
    assert judged(samples)["failed"] == ["blocks belong to nobody"]


@pytest.mark.slow
def test_a_daemon_is_soaked_and_judged(tiny, capsys, monkeypatch):
    import soak

    place = Path(tempfile.mkdtemp())  # not pytest's: a socket's path is short

    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.2)
    few = ["--adapters", "4", "--clients", "3", "--minutes", "0.05", "--every", "0.7"]
    soak.main(["--model", str(tiny), "--device", "cpu", "--scratch", str(place), *few])
    before, *samples, after, verdict = (
        json.loads(line) for line in capsys.readouterr().out.splitlines()
    )
    assert [before["kind"], after["kind"], verdict["kind"]] == ["idle", "idle", "verdict"]
    assert len(samples) >= 4
    for sample in (before, *samples, after):
        assert sample["lost_blocks"] == 0 and sample["restarts"] == 0
        assert sample["daemon_objects"] > 0 and sample["engine_objects"] > 0
        assert sample["daemon_tasks"] > 0 and sample["daemon_rss"] > 1 << 20
    assert after["kv_active"] == after["running"] == after["waiting"] == 0
    assert 0 < after["engine_cache_entries"] <= after["kv_blocks"] + 64
    assert verdict["done"]["served"] > 0
    assert not [said for said in verdict["failed"] if said.split()[0] not in MEASURES]
    place.rmdir()  # its folders are gone
