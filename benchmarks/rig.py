"""An engine core in this process with adapters of noise: what the offline benchmarks stand on.

Goes in: an EngineConfig.  Comes out: a `Rig` that carries out commands and knows its adapters by
number.  Noise is right for speed and never enough for correctness.  Knows no workload.
"""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
import torch

from engine import assembly, measuring
from engine.adapters import checksums
from engine.config import EngineConfig
from engine.engine import Engine
from engine.layout import MODULES, PAIRED_ENDS, place, stream_id, stream_order
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
from engine.runner import Runner
from engine.verifier import Verifier

RANK = 16


def random_prompt(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    """Ids that no other prompt shares, so that nothing comes from the prefix cache."""
    return [int(i) for i in rng.integers(0, vocab, length)]


def start_quickly() -> None:
    """From now on engines of this process compile, capture and rehearse nothing ahead: for single
    steps, which meet what is theirs.  Their pauses count for nothing."""
    measuring.compile_ahead = lambda *_: None
    measuring.rehearse = assembly.rehearse = lambda *_, **__: None
    measuring._measure_graphs = lambda *_: (0, 0)
    Runner.capture = lambda *_: None  # type: ignore[method-assign,assignment]
    Verifier.rehearse = lambda *_: None  # type: ignore[method-assign,assignment]


class _Told:
    """Says on stderr which phase of a start begins, and when: an end by a time limit explains
    itself."""

    def __init__(self) -> None:
        self._begun, self._phase = time.monotonic(), ""

    def __call__(self, phase: str, fraction: float) -> None:
        if phase != self._phase:
            self._phase = phase
            print(f"start: {phase} at {time.monotonic() - self._begun:.1f} s", file=sys.stderr)


class Rig:
    """A core, and adapters of rank RANK on all projections.

    `scratch` holds their packed files: `files` of them, which the adapters share in turn.  What is
    read is one and the same, then, but each is read, copied and computed with by itself.  With one
    file of 80 MiB the processor's own cache is read, and not the memory that a fleet would lie in.
    """

    def __init__(
        self,
        config: EngineConfig,
        scratch: Path,
        *,
        lookahead: bool | None = None,
        files: int = 1,
        own: int = 0,
    ) -> None:
        """With `own` each adapter has so many token ids behind the base's."""
        self.core = Engine(config, lookahead=lookahead, progress=_Told()).core
        self._scratch = scratch
        self._files, self._own = files, own
        self._ids = count(1)
        self._manifests: list[PackedManifest] = []
        self._drawn = b""

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
        self.call_all(partial(Load, rev=rev) for rev in map(self.rev, adapters))

    def load_ram(self, adapters: Iterable[int]) -> None:
        """To host memory, and off the GPU."""
        revs = [self.rev(adapter) for adapter in adapters]
        self.call_all(partial(Evict, rev=rev) for rev in revs)
        self.call_all(partial(Load, rev=rev, tier="ram") for rev in revs)

    def evict(self, adapters: Iterable[int]) -> None:
        """To disk, which is the page cache."""
        self.call_all(partial(Evict, rev=rev, to="disk") for rev in map(self.rev, adapters))

    def pin(self, adapters: Iterable[int], on: bool) -> None:
        revs = map(self.rev, adapters)
        self.call_all(partial(SetRevision, rev=rev, pinned=on, priority=50) for rev in revs)

    def tier(self, rev: str | None) -> str:
        """Where a revision is now: gpu, loading, ram or disk; "" for the base."""
        if rev is None:
            return ""
        state = self.core.residency.state(rev)
        return {"registered": "disk", "ram": "ram", "loading": "loading"}.get(state, "gpu")

    def call(self, make: Callable[..., Command]) -> Answer:
        """Carry out one command and wait for its answer; RuntimeError if it is refused."""
        return self.call_all([make])[0]

    def call_all(self, makes: Iterable[Callable[..., Command]]) -> list[Answer]:
        """The same for several that go out together."""
        numbers = []
        for make in list(makes):  # registers what is not known yet, which is a call of its own
            numbers.append(next(self._ids))
            self.core.take(make(command_id=numbers[-1]))
        answers: dict[int, Answer] = {}
        while any(number not in answers for number in numbers):
            for answer in self.core.step().answers:
                if answer.code:
                    raise RuntimeError(f"{answer.code}: {answer.message}")
                answers[answer.command_id] = answer
            if self.core.idle and len(answers) < len(numbers):
                self.core.wait()
        return [answers[number] for number in numbers]

    def close(self) -> None:
        self.core.close()

    # ------------------------------------------------------------- noise
    def _manifest(self, number: int) -> PackedManifest:
        rev = f"{number:064x}"
        if number >= self._files:
            twin = self._manifests[number % self._files]
            fields = {f: getattr(twin, f) for f in twin.__struct_fields__}
            return PackedManifest(**fields | {"rev": rev})
        layout, size = self.core.machine.layout, self.core.info.vocab_size
        last, ids = layout.shapes.num_layers, tuple(range(size, size + self._own))
        ends = [
            PackedModule(last, f"{end}.rows", len(ids), 1.0, tokens=ids)
            for end in PAIRED_ENDS
            if ids
        ]
        pairs = [
            PackedModule(layer, module, RANK, 1.0) for layer in range(last) for module in MODULES
        ]
        modules = stream_order([*pairs, *ends])
        placement = place(modules, layout)
        path = self._scratch / f"adapter-{number}.bin"
        path.write_bytes(self._noise(placement.num_blocks * layout.block_bytes * layout.shards))
        checksums.write(checksums.path_of(path), _sums(path, layout.block_bytes))
        return PackedManifest(
            rev=rev,
            path=str(path),
            layout=stream_id(layout.id, self.core.info.base, modules),
            num_blocks=placement.num_blocks,
            true_bytes=placement.true_bytes,
            max_rank=RANK,
            changes_kv=True,
            modules=modules,
            num_tokens=size + len(ids) if ids else 0,
        )

    def _noise(self, size: int) -> bytes:
        """The same for all adapters: they differ in nothing that takes time."""
        if len(self._drawn) < size:
            layout = self.core.machine.layout
            generator = torch.Generator().manual_seed(1)
            noise = torch.randn(size // layout.itemsize, generator=generator) * 0.01
            self._drawn = noise.to(DTYPES[layout.dtype]).view(torch.uint8).numpy().tobytes()
        return self._drawn[:size]


def _sums(path: Path, block_bytes: int) -> list[int]:
    with path.open("rb") as file:
        return checksums.sums_of(file.fileno(), block_bytes)


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
