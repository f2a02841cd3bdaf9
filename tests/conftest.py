"""How all tests run: torch on one thread, and workers that share the reading of the test files."""

import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path

# Before torch is imported, and for all processes that tests start: each of the workers is busy on a
# core, and threads that wait for one another at every tiny product cost more than they win.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And where a test has two, none of them turns on the spot while it waits for another.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a shell starts in the background ignores Ctrl-C, and so does all that it starts: tests that
# interrupt a process would wait for ever.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from tests.fakes import card_tests, quick_clients, quick_interpreter


class Backwards(pytest.Dir):
    """A folder that is read from its end."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        return reversed(list(super().collect()))


def _is_odd(config: pytest.Config) -> bool:
    """Whether this is every second one of several workers."""
    worker: str = getattr(config, "workerinput", {}).get("workerid", "gw0")
    return int(worker.removeprefix("gw")) % 2 == 1


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Every worker needs all test files with their assertions rewritten, which takes 15 s and is
    kept on the disk.  So one begins at one end, the other at the other, and they meet half-way."""
    return Backwards.from_parent(parent, path=path) if _is_odd(parent.config) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that collecting makes is garbage: to look through all of it time and again takes a
    third of collecting, and a part of every test that comes after."""
    gc.disable()
    try:
        found = yield
        quick_interpreter.check()
        return found
    finally:
        quick_interpreter.quicken()
        quick_clients.quicken()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # ahead of fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    card_tests.leave_out(item)


#: Files whose cases say one thing of many numbers, and take a minute: `make test` takes every n-th
#: case of each of their tests, `make test-slow` the others, or `make test-late`.
THINNED = {
    "kernels/lora/test_lora_kernels.py": 4,
    "kernels/test_sample_kernels.py": 3,
    "kernels/test_paged_kernels.py": 3,
    "kernels/test_fused_kernels.py": 2,
    "kernels/test_gemm.py": 2,
    "parity/families/test_families.py": 2,
    "parity/test_varieties.py": 2,
    "tui/test_hostile_daemon.py": 3,
}
#: Those of them whose cases are all met before a change lands: a pairwise choice wants all pairs.
THINNED_TO_LATE = {"kernels/lora/test_lora_kernels.py"}


@pytest.hookimpl(tryfirst=True)  # before cases are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The workers have to agree on an order."""
    items.sort(key=lambda item: item.path.parts)
    seen: Counter[tuple[str, str]] = Counter()
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        every = THINNED.get(file, 1)
        if every > 1 and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if seen[file, item.originalname] % every:
                item.add_marker("late" if file in THINNED_TO_LATE else "slow")
            seen[file, item.originalname] += 1
