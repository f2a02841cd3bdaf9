"""The demo on a tiny model with random adapters: its claims hold, and it cleans up behind it."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lorad.demo_folder import clear

PATIENCE = 120


@pytest.fixture
def runtime():
    """A short path: sockets lie below it."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)


def demo(base, runtime, **options):
    command = [sys.executable, "-m", "lorad.cli.serve", "demo", "--model", str(base)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def alive(runtime):
    """Command lines of processes that speak of the demo's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(runtime) in words:
            found.append(words)
    return found


def test_all_of_the_demo_holds_on_any_base(base, runtime):
    with demo(base, runtime) as process:
        told, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, told
    assert "making four seeded random ones" in told
    assert "the batch was shared" in told
    assert "with no cached token of the old one (cached_tokens 0)" in told
    assert "All of it held" in told
    assert list(runtime.iterdir()) == []


@pytest.mark.slow
def test_a_demo_that_is_terminated_takes_its_daemon_along(base, runtime):
    with demo(base, runtime) as process:
        for line in process.stdout:
            if line.startswith("1. "):
                break
        assert alive(runtime)
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, told
    assert not alive(runtime)
    assert list(runtime.iterdir()) == []


@pytest.mark.late
def test_a_demo_that_is_killed_takes_its_daemon_along_and_its_folder_goes_at_the_next_start(
    base, runtime, poll
):
    with demo(base, runtime) as process:
        for line in process.stdout:
            if line.startswith("1. "):
                break
        assert alive(runtime)
        assert clear(str(runtime)) == []
        process.kill()
        process.communicate(timeout=PATIENCE)
    poll(lambda: not alive(runtime), "the daemon to end")
    poll(lambda: clear(str(runtime)), "its folder to be nobody's")
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("words", [("demo",), ("demo", "--rag")])
def test_adapters_that_are_not_there_are_told_before_anything_is_fetched(tmp_path, words):
    command = [sys.executable, "-m", "lorad.cli.serve", *words, "--adapters"]
    away = os.environ | {"LORAD_CACHE": str(tmp_path / "none"), "PIP_NO_INDEX": "1"}
    for folder, wrong in ((tmp_path / "nope", "there is no such folder"), (tmp_path, "0 adapter")):
        done = subprocess.run([*command, str(folder)], env=away, capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout == ""
        first, second = done.stderr.splitlines()
        assert first.startswith(f"error: --adapters {folder}: {wrong}")
        assert second.startswith("  try: a folder of PEFT folders")
