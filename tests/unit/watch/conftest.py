"""An inbox with a watcher whose clock the test turns.  The watcher has no thread of its own here,
and watchdog's are waited for before the clock is turned, so every test is exact."""

import itertools
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers.inotify_move_event_grouper import InotifyMoveEventGrouper

from lorad.watch.hints import EVENTS, Observation
from lorad.watch.inbox import InboxFolder
from lorad.watch.watcher import InboxWatcher

SETTLE = 1.0


def weights(num_values: int = 64) -> bytes:
    """A safetensors file of one float32 tensor."""
    tensor = {"dtype": "F32", "shape": [num_values], "data_offsets": [0, 4 * num_values]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "t": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * num_values)


def fill(folder: Path, num_values: int = 64) -> Path:
    """A whole adapter folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").write_bytes(weights(num_values))
    return folder


class _Awaited(FileSystemEventHandler):
    """Notices when one path has come by."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.came = threading.Event()

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.src_path == self._path:
            self.came.set()


_numbers = itertools.count()


def settle_hints(observation: Observation, inbox: Path) -> None:
    """Returns when all that happened in the inbox has been marked: events keep their order, so a
    file that is made now comes last."""
    root = os.path.realpath(inbox)
    awaited = _Awaited(f"{root}/.awaited-{next(_numbers)}")
    observer = observation._observer
    watch = observer.schedule(awaited, root, recursive=True, event_filter=EVENTS)
    Path(awaited._path).touch()
    deadline = time.monotonic() + 60
    while observation.alive and not awaited.came.wait(0.02):
        assert time.monotonic() < deadline, "watchdog did not tell of a new file"
    observer.remove_handler_for_watch(awaited, watch)


@pytest.fixture(autouse=True)
def short_wait_for_the_other_half_of_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InotifyMoveEventGrouper, "delay", 0.02)


class Rig:
    """Turns the clock in steps of a twentieth of the settle time."""

    def __init__(self, inbox: Path, mode: str, rescan: float = 1000.0, **options: object) -> None:
        self.now = 0.0
        self.inbox = inbox
        self.found: list[InboxFolder] = []
        self.gone: list[InboxFolder] = []
        self.warnings: list[str] = []
        self.watcher = InboxWatcher(
            inbox,
            settle=SETTLE,
            rescan=rescan,
            mode=mode,  # type: ignore[arg-type]
            on_folder=self.found.append,
            on_gone=self.gone.append,
            on_warning=self.warnings.append,
            clock=lambda: self.now,
            **options,  # type: ignore[arg-type]
        )
        self.watcher.tick()

    def run(self, seconds: float) -> None:
        self.wait_for_hints()
        for _ in range(round(seconds * 20)):
            self.now += SETTLE / 20
            self.watcher.tick()

    def wait_for_hints(self) -> None:
        observation = self.watcher._observation
        if observation is not None and self._is_observed():
            settle_hints(observation, self.inbox)

    def _is_observed(self) -> bool:
        """Not when the inbox was removed or replaced since."""
        try:
            status = os.stat(self.inbox)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.watcher._root

    @property
    def names(self) -> list[str]:
        return [folder.name for folder in self.found]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(mode: str = "inotify", **options: object) -> Rig:
        inbox = tmp_path / "inbox"
        inbox.mkdir(exist_ok=True)
        rigs.append(Rig(inbox, mode, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.watcher.stop()


@pytest.fixture(params=["inotify", "polling"])
def rig(request: pytest.FixtureRequest, make_rig: Callable[..., Rig]) -> Rig:
    """What is true with inotify is true without it."""
    return make_rig(request.param)


@pytest.fixture
def fill_folder() -> Callable[..., Path]:
    return fill


@pytest.fixture
def weight_bytes() -> Callable[..., bytes]:
    return weights
