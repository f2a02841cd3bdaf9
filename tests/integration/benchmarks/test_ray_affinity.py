"""`ray_affinity.py`: how it tells hits from events, and the whole of it on a real Ray."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lorad import wire

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ray_affinity import Slots

ROOT = Path(__file__).parents[3]


def event(id, second, type, rev="r"):
    return wire.EventItem(id=id, time=f"2026-01-01T00:00:{second:06.3f}Z", type=type, rev=rev)


def test_a_hit_is_what_was_resident_by_the_events_at_that_moment() -> None:
    slots = Slots()
    begin = 1767225600.0
    for number, (second, what) in enumerate(
        [(1, "slot.loading"), (1.25, "slot.load"), (3, "slot.evict"), (5, "slot.load")]
    ):
        slots.take(event(number, second, what))
    moments = (0.5, 1.1, 1.3, 2.9, 3.1, 4.9, 5.1)
    assert [slots.had("r", begin + t) for t in moments] == [0, 0, 1, 1, 0, 0, 1]
    assert not slots.had("other", begin + 2)
    assert slots.loads[0][1] == pytest.approx(0.25)
    assert slots.last == 3


@pytest.mark.slow
def test_a_real_ray_and_the_simulation_agree() -> None:
    """Of some 200 requests, by which 5 in 100 more or less are chance."""
    asked = ["--replicas", "2", "--adapters", "24", "--slots", "6", "--rate", "6"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "benchmarks/ray_affinity.py", *asked, "--seconds", "40"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    real, affinity, chance = (json.loads(line) for line in done.stdout.splitlines())
    assert (affinity["policy"], chance["policy"]) == ("affinity", "random")
    assert real["hits"] == pytest.approx(affinity["hits"], abs=0.12)
    assert real["hits"] > chance["hits"]
