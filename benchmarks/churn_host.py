"""The cases `host-time` and `resident` of `churn.py`: what a load costs the step loop, and how many
adapters the pool holds.

Goes in: a Fleet.  Comes out: lines.  Both step the core themselves, for what they ask is of single
steps and not of requests.  Host time is the loop thread's wall time in `Residency.advance` (reads
taken in, room found, blocks claimed, copies started, ends seen) while a load is under way, less
what the same calls take while none is; and the time to write the slot's row for its first step.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from churn_fleet import Fleet
from load_parts import Parts
from rig import random_prompt
from streams import Failed, Line, at_least, bars_of

from engine.adapters.copier import CudaCopier
from engine.adapters.copy_calls import each_piece, one_batch
from engine.layout import MODULES, place, stream_order
from engine.messages import Abort, Load, PackedManifest, PackedModule, StepFrame

RANKS = (4, 8, 16, 32, 64)
#: Steps before a load that tell what is usual, and after its end that belong to it still.
BEFORE, AFTER = 24, 2
#: Loads that go out together where only their number counts.
TOGETHER = 32
HOST_MS, LONGEST, STORED, FIT = 0.5, 1.1, 1.05, 1000


@dataclass(slots=True)
class Step:
    """Seconds of one step: in `advance`, of the thread's processor time in it, and from the end of
    the step before to the end of it."""

    advance: float
    cpu: float
    pause: float


class Watch:
    """Steps the core, and times what is asked of residency within each step."""

    def __init__(self, fleet: Fleet) -> None:
        self.core = fleet.core
        self._advance = self._cpu = 0.0
        self._ended = time.perf_counter()
        self._plain = self.core.residency.advance
        self.core.residency.advance = self._timed  # type: ignore[method-assign]

    def close(self) -> None:
        del self.core.residency.advance  # the class's own again

    def step(self) -> tuple[StepFrame, Step]:
        self._advance = self._cpu = 0.0
        frame = self.core.step()
        ended = time.perf_counter()
        step = Step(self._advance, self._cpu, ended - self._ended)
        self._ended = ended
        return frame, step

    def _timed(self) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        self._plain()
        self._advance += time.perf_counter() - started
        self._cpu += time.thread_time() - cpu


class HostCases:
    """`streams` requests decode meanwhile; `prompt` tokens each."""

    def __init__(self, fleet: Fleet, streams: int, prompt: int, seconds: float) -> None:
        self.fleet, self.streams, self.prompt, self.seconds = fleet, streams, prompt, seconds
        self.core = fleet.core
        self.rng = np.random.default_rng(0)

    # ------------------------------------------------------------- host time of a load
    def host_time(
        self, residents: Sequence[int], fleet: int, turns: Sequence[tuple[str, bool]]
    ) -> Iterator[Line]:
        """Loads from host memory by command, one after the other, each into room that another has
        to leave; with so many `residents` on the GPU, and `fleet` loads in each of the `turns`: who
        copies, and whether it is told where the time goes."""
        for room in residents:
            with self.fleet.room_for(room):
                self.fleet.settle(range(room), "gpu")
                for turn, (way, parts) in enumerate(turns):
                    newcomers = range(room + turn * fleet, room + (turn + 1) * fleet)
                    self.fleet.settle(newcomers, "ram")  # last: the others passed through it
                    line: Line = {"case": "host-time", "resident": room, "copies": way}
                    with self._copying(way):
                        yield line | self._timed(newcomers, parts=parts)

    def _timed(self, newcomers: Sequence[int], *, parts: bool) -> Line:
        if not parts:
            return self._loads(newcomers)
        timed = Parts(self.core)
        with timed.timing():
            line = self._loads(newcomers, timed)
        return line | {"parts_us": timed.median()}

    @contextmanager
    def _copying(self, way: str) -> Iterator[None]:
        """`way`: a rival of what the engine chooses, or "usual"; only a card has any."""
        copier = self.core.machine.copier
        if way == "usual" or not isinstance(copier, CudaCopier):
            yield
            return
        usual = copier.calls
        copier.calls = {"torch": lambda: None, "each": each_piece, "batch": one_batch}[way]()
        if copier.calls is None and way != "torch":
            raise Failed(f"no driver here copies by {way}")
        try:
            yield
            if copier.calls is None and way != "torch":
                raise Failed(f"the driver refused to copy by {way}")
        finally:
            copier.calls = usual

    def _loads(self, newcomers: Sequence[int], parts: Parts | None = None) -> Line:
        names = self._start()
        puts: list[float] = []
        watch = Watch(self.fleet)
        costs, cpu, quiet, ratios, usual = [], [], [], [], []
        try:
            with self._timing_rows(puts):
                until = time.monotonic() + self.seconds
                for adapter in newcomers:  # each but once: the second time it is there
                    calm = [watch.step()[1] for _ in range(BEFORE)]
                    if parts:
                        parts.begin_load()
                    loud = self._one_load(watch, adapter)
                    if parts:
                        parts.end_load()
                    idle = statistics.median(s.advance for s in calm)
                    idle_cpu = statistics.median(s.cpu for s in calm)
                    pause = statistics.median(s.pause for s in calm)
                    costs.append(sum(s.advance - idle for s in loud))
                    cpu.append(sum(s.cpu - idle_cpu for s in loud))
                    quiet.append(idle)
                    ratios.append(max(s.pause for s in loud) / pause)
                    usual.append(max(s.pause for s in calm) / pause)
                    # One load alone has no spread, however slow the machine is.
                    if len(costs) > 1 and time.monotonic() > until:
                        break
                self._use(newcomers[: len(costs)])
        finally:
            watch.close()
            self._stop(names)
        put = statistics.median(puts) if puts else 0.0
        cost = 1e3 * (statistics.median(costs) + put)
        longest = statistics.median(ratios)
        return {
            "streams": self.streams,
            "loads": len(costs),
            "advance_ms": round(1e3 * statistics.median(costs), 4),
            "advance_max_ms": round(1e3 * max(costs), 4),
            "advance_cpu_ms": round(1e3 * statistics.median(cpu), 4),
            "without_load_ms": round(1e3 * statistics.median(quiet), 4),
            "slot_row_ms": round(1e3 * put, 4),
            "longest_over_median": round(longest, 3),
            "longest_over_median_max": round(max(ratios), 3),
            "without_load_over_median": round(statistics.median(usual), 3),
            "bars": bars_of(host_ms=(cost, HOST_MS), longest_over_median=(longest, LONGEST)),
        }

    def _one_load(self, watch: Watch, adapter: int) -> list[Step]:
        """The steps from its command to the one after its answer."""
        rev = self.fleet.driver.rig.rev(adapter)
        number = -1 - adapter
        self.core.take(Load(command_id=number, rev=rev))
        steps, left = [], AFTER
        while left:
            frame, step = watch.step()
            steps.append(step)
            done = left < AFTER or any(a.command_id == number for a in frame.answers)
            left -= done
        return steps

    @contextmanager
    def _timing_rows(self, seconds: list[float]) -> Iterator[None]:
        """Note how long each row of the device's slot table takes to write; a CPU has none."""
        device = self.core.runner._planner._device
        if device is None:
            yield
            return
        plain = device.slots.put

        def timed(slot: int, manifest: PackedManifest, blocks: Sequence[int]) -> None:
            started = time.perf_counter()
            plain(slot, manifest, blocks)
            seconds.append(time.perf_counter() - started)

        device.slots.put = timed
        try:
            yield
        finally:
            del device.slots.put

    def _use(self, adapters: Sequence[int]) -> None:
        """A request on each that is resident: the first step on a slot writes its row."""
        rig = self.fleet.driver.rig
        ready = [n for n in adapters if rig.tier(rig.rev(n)) == "gpu"]
        names = {f"use-{n}" for n in ready}
        for n in ready:
            self.core.take(rig.submit(self._prompt(16), 1, n, f"use-{n}"))
        self._until_ended(names)

    # ------------------------------------------------------------- how many fit
    def resident(self) -> Iterator[Line]:
        """Adapters come up until they push each other out; then the requests begin, and take what
        they need from the idle ones; then some more come up, which may not make it more."""
        rig, wanted = self.fleet.driver.rig, self.fleet.most + TOGETHER
        started = time.monotonic()
        self.fleet.clear()
        loaded = 0
        while loaded < wanted and self.fleet.resident == loaded:
            rig.load(range(loaded, min(loaded + TOGETHER, wanted)))
            loaded = min(loaded + TOGETHER, wanted)
        took = time.monotonic() - started
        self.fleet.known = max(self.fleet.known, loaded)
        names = self._start(adapters=self.streams)
        rig.load(range(loaded - TOGETHER, loaded))
        steps = [self.core.step() for _ in range(BEFORE)]
        running = self.core.scheduler.num_running
        resident, counts = self.fleet.resident, self.core.pool.counts
        self._stop(names)
        self.fleet.clear()
        layout = self.core.machine.layout
        yield {
            "case": "resident",
            "resident": resident,
            "running": running,
            "told_tokens": sum(len(d.tokens) for f in steps for d in f.deltas),
            "context": self.prompt,
            "blocks": self.core.pool.num_blocks,
            "adapter_blocks": counts.adapter,
            "kv_blocks": counts.kv_active,
            "block_bytes": layout.block_bytes,
            "loads": loaded,
            "load_s": round(took, 2),
            "load_gb_s": round(loaded * self.fleet.blocks * layout.block_bytes / took / 1e9, 3),
            "stored_over_true": {rank: round(sum(self._stored(rank)), 4) for rank in RANKS},
            "bars": bars_of(stored_over_true=(max(self._stored(rank)[0] for rank in RANKS), STORED))
            | at_least(resident=(resident, FIT)),
        }

    def _stored(self, rank: int) -> tuple[float, float]:
        """Over bytes of the matrices, for all projections of all layers: bytes of all blocks but
        one, which the bar leaves out, and of that one."""
        layout = self.core.machine.layout
        modules = stream_order(
            PackedModule(layer, module, rank, 1.0)
            for layer in range(layout.shapes.num_layers)
            for module in MODULES
        )
        placement = place(modules, layout)
        block = layout.block_bytes / placement.true_bytes
        return (placement.num_blocks - 1) * block, block

    # ------------------------------------------------------------- requests
    def _prompt(self, length: int) -> list[int]:
        return random_prompt(self.rng, length, self.fleet.driver.vocab)

    def _start(self, adapters: int = 0) -> set[str]:
        """Streams that decode on and on, on the base or each on an adapter; all have a token."""
        rig, longest = self.fleet.driver.rig, self.core.config.max_model_len - self.prompt
        names = [f"stream-{n}" for n in range(self.streams)]
        for n, name in enumerate(names):
            adapter = n % adapters if adapters else None
            self.core.take(rig.submit(self._prompt(self.prompt), longest, adapter, name))
        silent = set(names)
        while silent:
            frame = self.core.step()
            for delta in frame.deltas:
                if delta.code:
                    raise Failed(f"{delta.code}: {delta.message}")
                silent.discard(delta.request_id)
            if self.core.idle and silent:
                self.core.wait()
        return set(names)

    def _stop(self, names: set[str]) -> None:
        for name in names:
            self.core.take(Abort(name))
        self._until_ended(names)

    def _until_ended(self, names: set[str]) -> None:
        while names:
            frame = self.core.step()
            names -= {d.request_id for d in frame.deltas if d.finish_reason is not None}
            if self.core.idle and names:
                self.core.wait()
