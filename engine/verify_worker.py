"""The verifier's thread: files, comparisons and sums, which the step loop must not wait for.

Goes in: a resident revision and the probe file that was made for it.  Comes out, one at a time: a
slice for the step loop to do on the device, with the buffers filled; once it is done, and what came
of it is in the buffers, the next; in the end a VerifyReport, or why there is none.  Knows nothing
of steps, slots or the device.
"""

import os
import queue
import threading
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters import checksums
from engine.adapters.placed import Owners
from engine.adapters.probe import FLOOR, ROWS, TOLERANCE, Floats, ProbeFile, ProbeItem
from engine.layout import GROUPS, MODULE_ID, BlockLayout, place
from engine.memory.arena import DTYPES
from engine.messages import PackedManifest
from engine.verify_messages import MAX_FINDINGS, Finding, VerifyReport

#: What stands for infinity and NaN, which JSON has no words for.
BEYOND = 1e9


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified."""

    manifest: PackedManifest
    probe: str  # path


@dataclass(frozen=True, slots=True)
class Probe:
    """Correct the first `rows` of y for x with one group of one layer."""

    layer: int
    group: str
    d_in: int
    width: int


@dataclass(frozen=True, slots=True)
class Block:
    """Bring the adapter's `index`-th block back."""

    index: int


Slice = Probe | Block


class Buffers:
    """Host memory that slices are told and answered through; pinned for a card."""

    def __init__(self, layout: BlockLayout, rows: int, *, pinned: bool) -> None:
        dims = layout.shapes.dims
        widest = max(sum(dims[MODULE_ID[m]][1] for m in names) for names in GROUPS.values())
        dtype = DTYPES[layout.dtype]
        self.rows = min(rows, ROWS)
        self.x = torch.zeros(self.rows * max(d for d, _ in dims), dtype=dtype, pin_memory=pinned)
        self.y = torch.zeros(self.rows * widest, dtype=dtype, pin_memory=pinned)
        self.block = torch.zeros(layout.block_bytes, dtype=torch.uint8, pin_memory=pinned)


@dataclass(slots=True)
class _Tally:
    """What was found so far."""

    tolerance: float
    modules: int = 0
    worst: tuple[float, int, str] = (0.0, -1, "")
    bytes_checked: int = 0
    bytes_different: int = 0
    findings: list[Finding] = field(default_factory=list)

    def note(self, finding: Finding) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def report(self) -> VerifyReport:
        error, layer, module = self.worst
        return VerifyReport(
            modules=self.modules,
            worst_error=error,
            worst_layer=layer,
            worst_module=module,
            tolerance=self.tolerance,
            bytes_checked=self.bytes_checked,
            bytes_different=self.bytes_different,
            findings=tuple(self.findings),
        )


class VerifyWorker:
    """One subject at a time: `begin`, then `take` and `go_on` in turn until it is a report.

    `wake` is called from the thread when there is something to take.
    """

    def __init__(
        self, layout: BlockLayout, buffers: Buffers, *, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._layout = layout
        self._buffers = buffers
        self._wake = wake
        self._orders: queue.SimpleQueue[Subject | str] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Slice | VerifyReport | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lorad-verifier", daemon=True)
        self._thread.start()

    def begin(self, subject: Subject) -> None:
        self._orders.put(subject)

    def go_on(self) -> None:
        """The slice that was taken last is done."""
        self._orders.put("go on")

    def take(self) -> Slice | VerifyReport | str | None:
        """What comes next, if it is there: a slice, the report, or why there is none."""
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the thread; a subject is left where it is."""
        self._orders.put("end")
        self._thread.join()

    # ------------------------------------------------------------- the thread
    def _work(self) -> None:
        under_way: Generator[Slice, None, VerifyReport] | None = None
        while (order := self._orders.get()) != "end":
            if isinstance(order, Subject):
                under_way = self._examine(order)
            assert under_way is not None, "go on with what?"
            self._ready.put(_next(under_way))
            self._wake()

    def _examine(self, subject: Subject) -> Generator[Slice, None, VerifyReport]:
        tally = _Tally(TOLERANCE[self._layout.dtype])
        probe = ProbeFile(subject.probe)
        if (probe.header.rev, probe.header.dtype) != (subject.manifest.rev, self._layout.dtype):
            message = f"the stored file is {probe.header.rev[:12]} now: it was changed"
            tally.note(Finding(what="stored", message=message))
        for item in probe.header.items:
            start = self._fill(probe, item)
            yield Probe(item.layer, item.group, item.d_in, start.shape[1])
            self._compare(probe, item, start, tally)
        yield from self._examine_blocks(subject.manifest, tally)
        return tally.report()

    # ------------------------------------------------------------- the effect
    def _fill(self, probe: ProbeFile, item: ProbeItem) -> Floats:
        """Put x and the y to start from into the buffers; the latter again, for comparison."""
        rows, names = self._buffers.rows, GROUPS[item.group]
        width = sum(self._layout.shapes.dims[MODULE_ID[name]][1] for name in names)
        x = np.array(probe.rows(item.x, item.d_in)[:rows])
        y = np.array(probe.rows(item.y, width)[:rows])
        for buffer, values in ((self._buffers.x, x), (self._buffers.y, y)):
            buffer[: values.size].copy_(torch.from_numpy(values).view(-1))
        return y

    def _compare(self, probe: ProbeFile, item: ProbeItem, start: Floats, tally: _Tally) -> None:
        rows, width = start.shape
        got = _numpy(self._buffers.y[: rows * width]).reshape(rows, width)
        probed = {module.module: module for module in item.modules}
        column = 0
        for name in GROUPS[item.group]:
            d_out = self._layout.shapes.dims[MODULE_ID[name]][1]
            columns = slice(column, column + d_out)
            column += d_out
            module = probed.get(name)
            wanted = start[:, columns]
            if module is not None:
                wanted = probe.rows(module.at, d_out)[:rows]
                tally.modules += 1
            self._judge(item.layer, name, got[:, columns], wanted, module is not None, tally)

    def _judge(
        self, layer: int, name: str, got: Floats, wanted: Floats, present: bool, tally: _Tally
    ) -> None:
        error = relative_error(got, wanted, FLOOR[self._layout.dtype])
        if error > tally.worst[0]:
            tally.worst = (error, layer, name)
        if error > (tally.tolerance if present else 0.0):
            what = f"off by {error:.3g} of its largest output" if present else "has an effect"
            more = f" (at most {tally.tolerance:g} is rounding)" if present else ", and should not"
            tally.note(Finding(what="effect", layer=layer, module=name, message=what + more))

    # ------------------------------------------------------------- the bytes
    def _examine_blocks(
        self, manifest: PackedManifest, tally: _Tally
    ) -> Generator[Slice, None, None]:
        owners = Owners(place(manifest.modules, self._layout))
        size = self._layout.block_bytes
        try:
            sums = checksums.read(manifest.path, manifest.num_blocks)
        except (OSError, ValueError) as error:
            sums = []
            tally.note(Finding(what="packed", message=f"its checksums cannot be read: {error}"))
        fd = os.open(manifest.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for index in range(manifest.num_blocks):
                raw = os.pread(fd, size, index * size)
                yield Block(index)
                tally.bytes_checked += size
                if sums and zlib.crc32(raw) != sums[index]:
                    message = f"block {index} of {len(sums)} is not what was packed"
                    tally.note(Finding(what="packed", message=message))
                if len(raw) == size:
                    self._compare_block(owners, index, np.frombuffer(raw, np.uint8), tally)
        finally:
            os.close(fd)

    def _compare_block(
        self, owners: Owners, index: int, packed: NDArray[np.uint8], tally: _Tally
    ) -> None:
        for stretch, count in owners.differing(index, self._buffers.block.numpy(), packed):
            tally.bytes_different += count
            tally.note(
                Finding(
                    what="resident",
                    layer=stretch.layer,
                    module=stretch.module,
                    message=f"{count} bytes of {stretch.factor} are not those of the packed file",
                )
            )


def relative_error(got: Floats, wanted: Floats, floor: float) -> float:
    """Largest difference over the largest wanted value; below `floor` values are all alike."""
    largest = max(float(np.abs(wanted).max(initial=0.0)), floor)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = float(np.abs(got - wanted).max(initial=0.0))
    return min(difference / largest, BEYOND) if difference == difference else BEYOND


def _numpy(tensor: Tensor) -> Floats:
    array: Floats = tensor.float().numpy()
    return array


def _next(under_way: Generator[Slice, None, VerifyReport]) -> Slice | VerifyReport | str:
    try:
        return next(under_way)
    except StopIteration as end:
        report: VerifyReport = end.value
        return report
    except (OSError, ValueError) as error:  # msgspec's own errors are ValueErrors
        return f"the files cannot be read: {error}"
