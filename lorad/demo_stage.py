"""The demo's stage: a private folder, a real daemon in it, adapters dropped into its inbox.

Goes in: model folders and adapter folders.  Comes out: a running `lorad` with its two sockets, and
the means to drop, replace and wait.  Knows nothing of prompts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.client import read_spec
from engine.layout import MODULES
from lorad import wire
from lorad.client import ApiError, LoradClient, Unreachable
from lorad.demo_folder import Folder, clear

POLL_SECONDS = 0.2
START_PATIENCE = 300.0
LOAD_PATIENCE = 120.0


class DemoFailed(Exception):
    """What the demo promised did not come true, or it could not be set up; one line, and perhaps
    the next step."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Base:
    """One `[[models]]`: its folder, its name, and further lines of its configuration."""

    folder: Path
    name: str
    settings: str = 'cpu_pool = "1GiB"\nmax_model_len = 2048'


class Stage:
    """A daemon of its own in `folder`, serving `bases`; `stop` ends it."""

    def __init__(self, folder: Folder, bases: Sequence[Base]) -> None:
        self.root = root = folder.path
        self._lock = folder.lock
        self.inbox = root / "inbox"
        self.log = root / "lorad.log"
        self.inference_socket = str(root / "inference.sock")
        self.admin_socket = str(root / "admin.sock")
        self.config = root / "lorad.toml"
        self.inbox.mkdir()
        self.config.write_text(_config(self, bases), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, report: Callable[[str], None], *, stays: bool = False) -> None:
        """Start the daemon and wait until it is ready; DemoFailed shows the end of its log.  Unless
        it `stays`, it ends with this process, however that ends."""
        command = [sys.executable, "-m", "lorad.cli.serve", "serve", "--config", str(self.config)]
        if not stays:
            leash = [sys.executable, "-m", "lorad.demo_leash", str(os.getpid())]
            command = [*leash, *command]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._lock,),  # a killed demo's folder is the daemon's until it has ended
                start_new_session=True,  # Ctrl+C is for the demo, which then ends the daemon itself
            )
        deadline, last = time.monotonic() + START_PATIENCE, ""
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise DemoFailed(f"the daemon ended with exit {code}:\n{self.log_tail()}")
            ready, reason = self._ready()
            if ready:
                return
            if reason != last:
                report(reason)
                last = reason
            time.sleep(POLL_SECONDS)
        raise DemoFailed(
            f"the daemon is not ready after {START_PATIENCE:.0f} s:\n{self.log_tail()}"
        )

    def _ready(self) -> tuple[bool, str]:
        try:
            with self.client() as client:
                reason = client.ready()
        except (Unreachable, ApiError):
            return False, "starting"
        return not reason, reason

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def client(self) -> LoradClient:
        return LoradClient(f"unix://{self.admin_socket}")

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the daemon's log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join("  " + line for line in text.splitlines()[-lines:])

    def drop(self, name: str, folder: Path) -> None:
        """Put a copy of `folder` into the inbox in one move, replacing what is there."""
        fresh = self.root / f".incoming-{name}"
        shutil.copytree(folder, fresh)
        target = self.inbox / name
        if target.exists():
            target.rename(self.root / f".outgoing-{name}-{time.monotonic_ns()}")
        fresh.rename(target)

    def wait_resident(self, names: set[str], report: Callable[[str], None]) -> None:
        """Until all are on the GPU; DemoFailed naming the reason if one is refused."""
        deadline, seen = time.monotonic() + LOAD_PATIENCE, set[str]()
        with self.client() as client:
            while time.monotonic() < deadline:
                items = client.adapters(limit=100).items
                for adapter in items:
                    if adapter.state == "quarantined":
                        raise DemoFailed(
                            f"{adapter.name} was refused: {adapter.reason} {adapter.reason_message}"
                        )
                    if adapter.name in names - seen and adapter.state in ("idle", "active"):
                        seen.add(adapter.name)
                        report(f"{adapter.name}: rank {adapter.rank}, slot {adapter.slot}")
                if seen >= names:
                    return
                time.sleep(POLL_SECONDS)
        raise DemoFailed(
            f"not resident after {LOAD_PATIENCE:.0f} s: {', '.join(sorted(names - seen))}"
        )

    def adapter(self, name: str) -> wire.Adapter:
        with self.client() as client:
            return client.adapter(name).adapter

    def wait_revision(self, name: str, other_than: str) -> str:
        """Until `name` serves another revision; returns it."""
        deadline = time.monotonic() + LOAD_PATIENCE
        while time.monotonic() < deadline:
            adapter = self.adapter(name)
            if adapter.rev and adapter.rev != other_than:
                return adapter.rev
            if adapter.reason:
                raise DemoFailed(
                    f"the new {name} was refused: {adapter.reason} {adapter.reason_message}"
                )
            time.sleep(POLL_SECONDS)
        raise DemoFailed(f"{name} still serves {other_than[:8]} after {LOAD_PATIENCE:.0f} s")

    def replaced_at(self, name: str, rev: str) -> float:
        """When `name` moved to `rev`, in seconds since the epoch, by the daemon's own record."""
        with self.client() as client:
            items = client.recent_events(limit=1000).items
        times = [
            e.time for e in items if (e.type, e.name, e.rev) == ("adapter.replaced", name, rev)
        ]
        if not times:
            raise DemoFailed(f"no event tells of {name} moving to {rev[:8]}")
        return datetime.fromisoformat(times[-1].replace("Z", "+00:00")).timestamp()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after the drain."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def stage(bases: Sequence[Base], keep: bool) -> Iterator[Stage]:
    """A stage in a fresh private folder; ended and removed unless `keep`.  What a demo that was
    killed has left beside it is removed first."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    parent = base if base and os.access(base, os.W_OK) and len(base) < 60 else None
    clear(parent)
    folder = Folder(parent)
    made = Stage(folder, bases)
    finished = False
    try:
        yield made
        finished = True
    finally:
        if keep and finished:
            folder.keep()
        else:
            made.stop()
            folder.remove()


def _config(s: Stage, bases: Sequence[Base]) -> str:
    def text(value: object) -> str:
        return json.dumps(str(value))

    models = "\n".join(
        f"[[models]]\nbase = {text(b.folder)}\nname = {text(b.name)}\n{b.settings}\n" for b in bases
    )
    return f"""{models}
[lora]
slots = 64
ram_cache = "256MiB"

[watch]
dir = {text(s.inbox)}
settle = "300ms"

[inference]
socket = {text(s.inference_socket)}
auth = "peer+key"

[admin]
socket = {text(s.admin_socket)}

[store]
dir = {text(s.root / "store")}

[registry]
dir = {text(s.root / "state")}
"""


# ----------------------------------------------------------------- adapters for any base
def demo_data() -> Path | None:
    """`demo/adapters` of the checkout, if this is one."""
    folder = Path(__file__).resolve().parent.parent / "demo" / "adapters"
    return folder if folder.is_dir() else None


def random_adapters(model: Path, out: Path, count: int = 4, rank: int = 8) -> list[Path]:
    """Seeded random PEFT folders that fit `model`, strong enough to change its words."""
    spec = read_spec(model)
    folders = []
    for number in range(1, count + 1):
        rng = np.random.default_rng(number)
        tensors = {}
        for layer in range(spec.num_layers):
            for module, (d_in, d_out) in zip(MODULES, spec.shapes.dims, strict=True):
                part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                stem = f"base_model.model.model.layers.{layer}.{part}.{module}"
                tensors[f"{stem}.lora_A.weight"] = _noise(rng, (rank, d_in), d_in**-0.5)
                tensors[f"{stem}.lora_B.weight"] = _noise(rng, (d_out, rank), 0.02)
        folder = out / f"random-{number}"
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": list(MODULES),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "lorad.toml").write_text("pin = true\n", encoding="utf-8")
        folders.append(folder)
    return folders


def _noise(rng: np.random.Generator, shape: tuple[int, int], scale: float) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def altered(old: Path, other: Path, out: Path) -> Path:
    """A new revision for `old`'s folder: `other`'s weights, three quarters as strong.

    Not a mere copy of `other`: equal content is one revision, and would share its warm cache.
    """
    shutil.copytree(other, out)
    if (old / "lorad.toml").exists():
        shutil.copy(old / "lorad.toml", out / "lorad.toml")
    config = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    config["lora_alpha"] = config["lora_alpha"] * 0.75
    config["alpha_pattern"] = {k: v * 0.75 for k, v in (config.get("alpha_pattern") or {}).items()}
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return out
