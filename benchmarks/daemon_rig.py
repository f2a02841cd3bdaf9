"""A real daemon in private folders, and real adapter folders dropped into its inbox.

Goes in: a model folder and settings.  Comes out: a ready `lorad` with its two sockets, and adapters
by number.  Adapters are noise: right for speed and never enough for correctness.  Torch-free.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import checkout
import numpy as np
import psutil  # type: ignore[import-untyped]
from streams import Failed

from engine.client import read_spec
from engine.layout import MODULES
from lorad import wire_status
from lorad.client import ApiError, LoradClient, Unreachable

RANK = 16
MODEL_NAME = "base"
POLL_SECONDS = 0.05
START_PATIENCE = 400.0
ADAPTER_PATIENCE = 300.0


class DaemonRig:
    """A daemon from start to `close`.  `parent` None: the system's folder for temporary files.

    `program` is what the interpreter runs, and `environment` what it runs in, if not this one's;
    `prepare` is called with the rig when its folders are there, before it starts.  `apart`: signals
    to this process's group do not reach the daemon; `close` has to be called for sure then.
    """

    def __init__(
        self,
        model: Path,
        settings: str,
        parent: Path | None = None,
        program: tuple[str, ...] = ("-m", "lorad.cli.serve"),
        environment: Mapping[str, str] | None = None,
        prepare: Callable[["DaemonRig"], None] = lambda rig: None,
        apart: bool = False,
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="lorad-bench-", dir=parent))
        self.model = model
        self.log = self.root / "log"
        self.inference = self.root / "inference.sock"
        self.admin = self.root / "admin.sock"
        self.inbox = self.root / "inbox"
        self.inbox.mkdir()
        config = self.root / "lorad.toml"
        config.write_text(_config(self, settings), encoding="utf-8")
        self.client = LoradClient(f"unix://{self.admin}")
        self._noise = Noise(model)
        self._registered = 0
        command = [sys.executable, *program, "--config", str(config)]
        prepare(self)
        self.started_at = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(os.environ if environment is None else environment),
                process_group=0 if apart else None,
            )

    def wait_ready(self) -> None:
        """Until it takes requests; Failed shows the end of its log."""

        def ready() -> bool:
            try:
                return not self.client.ready()
            except (Unreachable, ApiError):
                return False

        self._until(ready, "it is not ready", START_PATIENCE)

    def status(self) -> wire_status.Status:
        return self.client.status()

    # ------------------------------------------------------------- adapters
    @staticmethod
    def name(adapter: int) -> str:
        return f"adapter-{adapter:03d}"

    def register(self, count: int) -> None:
        """Write adapters until there are `count`, and wait until all are known."""
        fresh = range(self._registered, count)
        for adapter in fresh:
            folder = self.root / f".incoming-{adapter}"
            self._noise.write(folder, adapter)
            folder.rename(self.inbox / self.name(adapter))
        self._registered = max(count, self._registered)
        missing = {self.name(adapter) for adapter in fresh}

        def there() -> bool:
            for item in self.client.every_adapter():
                if item.state == "quarantined":
                    raise Failed(f"{item.name}: {item.reason} {item.reason_message}")
                if item.rev is not None:
                    missing.discard(item.name)
            return not missing

        if missing:
            self._until(there, "adapters are not registered", ADAPTER_PATIENCE)

    def write_adapter(self, folder: Path, content: int) -> None:
        """A new folder with an adapter; the same `content` is the same revision."""
        self._noise.write(folder, content)

    def wish(self, verb: str, adapters: Iterable[int], **options: object) -> None:
        """load, evict, pin or unpin; Failed with the first refusal."""
        names = [self.name(adapter) for adapter in adapters]
        if not names:
            return
        act = getattr(self.client, verb)
        results = act(*names, timeout_s=ADAPTER_PATIENCE, **options)
        for item in results.items:
            if not item.ok:
                raise Failed(f"{verb} {item.name}: {item.code} {item.message}")

    def last_event(self) -> int:
        items = self.client.recent_events(limit=1).items
        return items[-1].id if items else 0

    def movements(self, since: int) -> tuple[int, int]:
        """(adapters that came to the GPU, adapters that were read from disk) after an event."""
        loads = reads = 0
        while True:
            items = self.client.recent_events(since=since, limit=1000).items
            if not items:
                return loads, reads
            for item in items:
                moved = item.details.get("before"), item.details.get("after")
                loads += moved == ("loading", "idle")
                reads += moved == ("registered", "loading")
            since = items[-1].id

    # ------------------------------------------------------------- processor time
    def processes(self) -> Mapping[str, psutil.Process]:
        """The daemon and its engine."""
        found = {"daemon": psutil.Process(self.process.pid)}
        engine = self.status().engine_pid
        if engine is not None:
            found["engine"] = psutil.Process(engine)
        return found

    # ------------------------------------------------------------- the end
    def close(self) -> None:
        """End it in order, by force if it has to be, and remove everything."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def _until(self, condition: Callable[[], bool], what: str, patience: float) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            if self.process.poll() is not None:
                code = self.process.returncode
                raise Failed(f"the daemon ended with exit {code}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise Failed(f"{what} after {patience:.0f} s:\n{self.tail()}")
            time.sleep(POLL_SECONDS)

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-15:])


class Noise:
    """PEFT folders for a model, each of other content, written as fast as a disk takes them.

    One pool of noise is drawn once; adapter n is the pool from its n-th page on.
    """

    PAGE = 4096

    def __init__(self, model: Path) -> None:
        spec = read_spec(model)
        self._shapes: dict[str, tuple[int, int]] = {}
        for layer in range(spec.num_layers):
            for module, (d_in, d_out) in zip(MODULES, spec.shapes.dims, strict=False):
                part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                stem = f"base_model.model.model.layers.{layer}.{part}.{module}"
                self._shapes[f"{stem}.lora_A.weight"] = (RANK, d_in)
                self._shapes[f"{stem}.lora_B.weight"] = (d_out, RANK)
        self._bytes = sum(2 * a * b for a, b in self._shapes.values())
        self._pool = np.empty(0, np.uint16)

    def write(self, folder: Path, number: int) -> None:
        folder.mkdir()
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": RANK,
            "target_modules": list(MODULES),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        start = number * self.PAGE // 2
        end = start + self._bytes // 2
        if end > len(self._pool):
            self._pool = _bf16_noise(2 * end)
        header = self._header()
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.write(self._pool[start:end].tobytes())

    def _header(self) -> bytes:
        place, entries = 0, {}
        for name, shape in self._shapes.items():
            size = 2 * shape[0] * shape[1]
            offsets = [place, place + size]
            entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
            place += size
        text = json.dumps(entries).encode()
        return text + b" " * (-len(text) % 8)


def _bf16_noise(count: int) -> np.ndarray:
    """Normal numbers of deviation 0.01; bf16 is the upper half of fp32."""
    numbers = np.random.default_rng(1).standard_normal(count, dtype=np.float32)
    numbers *= np.float32(0.01)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Without settings of the daemon that somebody exported, and with the checkout first."""
    clean = {k: v for k, v in given.items() if not k.startswith("LORAD_")}
    rest = clean.get("PYTHONPATH", "")
    path = f"{checkout.ROOT}{os.pathsep}{rest}" if rest else str(checkout.ROOT)
    return {**clean, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _config(rig: DaemonRig, settings: str) -> str:
    def text(value: object) -> str:
        return json.dumps(str(value))

    return f"""{settings}
[watch]
dir = {text(rig.inbox)}
settle = "100ms"

[inference]
socket = {text(rig.inference)}

[admin]
socket = {text(rig.admin)}

[limits]
queue = 8192
queue_per_tenant = 8192
max_tokens = 131072

[store]
dir = {text(rig.root / "store")}

[registry]
dir = {text(rig.root / "state")}

[log]
level = "warning"

[shutdown]
drain_timeout = "1s"
"""
