"""An engine core in this process with adapters of noise: what the offline benchmarks stand on.

Goes in: an EngineConfig.  Comes out: a `Rig` that carries out commands and knows its adapters by
number.  Noise is right for speed and never enough for correctness.  Knows no workload.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.layout import MODULES, place, stream_order
from engine.memory.arena import DTYPES
from engine.messages import (
    AddRevision,
    Answer,
    Command,
    Evict,
    Load,
    PackedManifest,
    PackedModule,
    SamplingParams,
    SetRevision,
    Submit,
)

RANK = 16


def random_prompt(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    """Ids that no other prompt shares, so that nothing comes from the prefix cache."""
    return [int(i) for i in rng.integers(0, vocab, length)]


class Rig:
    """A core, and adapters of rank RANK on all projections; `scratch` holds their packed file."""

    def __init__(
        self, config: EngineConfig, scratch: Path, *, lookahead: bool | None = None
    ) -> None:
        self.core = EngineCore(config, lookahead=lookahead)
        self._scratch = scratch
        self._ids = count(1)
        self._manifests: list[PackedManifest] = []
        self._pinned: set[int] = set()

    # ------------------------------------------------------------- requests
    def submit(self, prompt: list[int], max_tokens: int, adapter: int | None, name: str) -> Submit:
        """A greedy request that makes exactly `max_tokens`; `core.take` it."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        rev = None if adapter is None else self.rev(adapter)
        return Submit(request_id=name, prompt=prompt, sampling=sampling, rev=rev)

    # ------------------------------------------------------------- adapters
    def rev(self, adapter: int) -> str:
        """The revision of adapter number `adapter`, which is registered when first asked for."""
        while len(self._manifests) <= adapter:
            manifest = self._manifest(len(self._manifests))
            self._manifests.append(manifest)
            self.call(partial(AddRevision, manifest=manifest))
        return self._manifests[adapter].rev

    def load(self, adapters: Iterable[int]) -> None:
        """To the GPU."""
        for rev in map(self.rev, adapters):
            self.call(partial(Load, rev=rev))

    def load_ram(self, adapters: Iterable[int]) -> None:
        """To host memory, and off the GPU."""
        for rev in map(self.rev, adapters):
            self.call(partial(Evict, rev=rev))
            self.call(partial(Load, rev=rev, tier="ram"))

    def evict(self, adapters: Iterable[int]) -> None:
        """To disk, which is the page cache."""
        for rev in map(self.rev, adapters):
            self.call(partial(Evict, rev=rev, to="disk"))

    def pin(self, adapters: Iterable[int], on: bool) -> None:
        for rev in map(self.rev, adapters):
            self.call(partial(SetRevision, rev=rev, pinned=on, priority=50))

    def call(self, make: Callable[..., Command]) -> Answer:
        """Carry out one command and wait for its answer; RuntimeError if it is refused."""
        number = next(self._ids)
        self.core.take(make(command_id=number))
        while True:
            for answer in self.core.step().answers:
                if answer.command_id == number:
                    if answer.code:
                        raise RuntimeError(f"{answer.code}: {answer.message}")
                    return answer
            if self.core.idle:
                self.core.wait()

    def close(self) -> None:
        self.core.close()

    # ------------------------------------------------------------- noise
    def _manifest(self, number: int) -> PackedManifest:
        """All adapters are one file: each is read, copied and computed with by itself."""
        if self._manifests:
            first = self._manifests[0]
            fields = {f: getattr(first, f) for f in first.__struct_fields__}
            return PackedManifest(**fields | {"rev": f"{number:064x}"})
        layout = self.core.machine.layout
        modules = stream_order(
            PackedModule(layer, module, RANK, 1.0)
            for layer in range(layout.shapes.num_layers)
            for module in MODULES
        )
        placement = place(modules, layout)
        path = self._scratch / "adapter.bin"
        numbers = placement.num_blocks * layout.block_bytes // layout.itemsize
        noise = torch.randn(numbers, generator=torch.Generator().manual_seed(1)) * 0.01
        path.write_bytes(noise.to(DTYPES[layout.dtype]).view(torch.uint8).numpy().tobytes())
        return PackedManifest(
            rev=f"{number:064x}",
            path=str(path),
            layout=layout.id,
            num_blocks=placement.num_blocks,
            true_bytes=placement.true_bytes,
            max_rank=RANK,
            changes_kv=True,
            modules=modules,
        )


class DeviceClock:
    """Starts when what was launched before has ended; the device's own time where it is a card."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._mark()
        self._started = time.perf_counter()

    def seconds(self) -> float:
        if not self._events:
            return time.perf_counter() - self._started
        self._mark()
        start, end = self._events
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
