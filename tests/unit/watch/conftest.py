"""An inbox with a watcher whose clock the test turns; no thread, so every test is exact."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
        for _ in range(round(seconds * 20)):
            self.now += SETTLE / 20
            self.watcher.tick()

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
