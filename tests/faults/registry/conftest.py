"""A process that forks registries for these tests to kill, and ways to fill a registry."""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lorad.registry.registry import Registry

HERE = Path(__file__).parent
SCRIPT = HERE / "registry_child.py"
#: Seconds until a child that should have died by itself is a failure.
PATIENCE = 30.0


@pytest.fixture(scope="session")
def child() -> ModuleType:
    """registry_child.py as a module: the model, and what the child writes."""
    spec = importlib.util.spec_from_file_location("registry_child", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["registry_child"] = module
    spec.loader.exec_module(module)
    return module


class Forker:
    """Forks one child at a time, and kills it."""

    def __init__(self) -> None:
        root = HERE.parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        # no Python buffer in between: it would hide lines from select
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._read = b""

    def run(
        self, order: dict[str, Any], kill_after: float | None = None, *, working: bool = False
    ) -> int:
        """Fork a child, kill it after so many seconds (None: it ends by itself); its status.

        `working`: the seconds count from when it has opened its registry, else from the fork.
        """
        defaults = {"failpoint": "", "nth": 1, "seed": 0, "ops": 1000}
        os.write(self._stdin, (json.dumps(defaults | order) + "\n").encode())
        pid, seconds = 0, PATIENCE
        while True:
            line = self._line(seconds)
            word, _, number = (line or "").partition(" ")
            if word == "dead":
                return int(number)
            if word == "pid":
                pid = int(number)
            if word == ("working" if working else "pid") and kill_after is not None:
                seconds = kill_after
            if line is None and pid:
                os.kill(pid, signal.SIGKILL)
                assert kill_after is not None, f"the child hung: {order}"
                seconds = PATIENCE

    def _line(self, seconds: float) -> str | None:
        """The next line from the process; None if there is none for so long."""
        while b"\n" not in self._read:
            if not select.select([self._stdout], [], [], seconds)[0]:
                return None
            more = os.read(self._stdout, 4096)
            assert more, "the forking process itself died"
            self._read += more
        line, self._read = self._read.split(b"\n", 1)
        return line.decode()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def fill(child: ModuleType) -> Callable[..., list[str]]:
    """fill(registry, 5): five names with content of their own, n0 to n4, n0 pinned."""

    def fill(registry: Registry, count: int) -> list[str]:
        names = []
        for number in range(count):
            data = child.content(number)
            rev = child.digest(data)
            staging = registry.store.stage()
            (staging.path / "adapter_model.safetensors").write_bytes(data)
            registry.store.commit(staging, rev)
            registry.register(
                f"n{number}",
                model="base",
                source="inbox",
                revision=child.revision(rev),
                pin=number == 0,
                priority=number,
            ).result()
            names.append(f"n{number}")
        return names

    return fill
