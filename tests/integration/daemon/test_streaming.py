"""Streams of a whole daemon in a process of its own, on an engine without a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: A benchmark in small.
pytestmark = pytest.mark.late

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "stream.py"


def test_what_clients_count_is_what_their_usage_says_while_nobody_waits_for_anybody():
    """The load generator ends with an error where they differ, or where a stream breaks off."""
    command = [sys.executable, str(BENCHMARK), "--streams", "24", "--rate", "0"]
    done = subprocess.run(
        [*command, "--seconds", "1", "--tokens", "300"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["tokens_per_s"] > 0
    assert told["first_ms"] is not None  # requests ended and were asked again
    assert "Traceback" not in done.stderr and "ERROR" not in done.stderr, done.stderr
