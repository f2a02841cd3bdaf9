"""The slot table on the device: where the kernels find a slot's adapter.

Goes in: a manifest and the blocks that hold it.  Comes out: the slot's row of the table, copied on
the stream of the step that uses it first.  A row is written by `put` alone, so the host's numbers
and the device's change together.  Knows nothing of tiers and of who is evicted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec.msgpack import Encoder

from engine.errors import AdapterInvalid
from engine.layout import MODULE_ID, MODULES, ROW_ALIGN, BlockLayout
from engine.messages import PackedManifest, PackedModule

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

#: As in engine/kernels/lora_place.py, which cannot be imported without triton; a test compares.
ENTRY_WORDS = 8
HAS_BIAS, HAS_GAIN, FLAGS_AT = 1, 2, 24
#: Rows on their way to the device; each is written again only after its own copy.
STAGED = 64


class DeviceSlots:
    """`num_slots` rows of `words` int32.  Used from the step loop's thread only."""

    def __init__(
        self, layout: BlockLayout, *, num_slots: int, max_rank: int, device: torch.device
    ) -> None:
        self._layout = layout
        self.blocks_at = layout.shapes.num_layers * len(MODULES) * ENTRY_WORDS
        self.max_blocks = most_blocks(layout, max_rank)
        words = -(-(self.blocks_at + self.max_blocks) // ENTRY_WORDS) * ENTRY_WORDS
        #: (num_slots, words) int32 on the device; a slot that was never given is all zeros.
        self.table = torch.zeros(num_slots, words, dtype=torch.int32, device=device)
        #: The highest rank of any module in the slot; 0 = nothing in it yet.
        self.max_rank: Ints = np.zeros(num_slots, dtype=np.int32)
        #: Whether any module in the slot has a bias or a gain.
        self.extras: npt.NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self._limit = max_rank
        self._cuda = device.type == "cuda"
        staged = min(STAGED, num_slots)
        self._staging = torch.zeros(staged, words, dtype=torch.int32, pin_memory=self._cuda)
        self._rows: Ints = self._staging.numpy()
        self._staged = self._staging.unbind()
        self._outlines = Outlines(layout)
        self._events: list[torch.cuda.Event | None] = [None] * staged
        self._turn = 0

    def put(self, slot: int, manifest: PackedManifest, blocks: Sequence[int]) -> None:
        """Fill the slot's row; the copy runs on the current stream, ahead of the step's kernels.

        Raises AdapterInvalid if a rank exceeds the limit that the workspace was made for.
        """
        outline = self._outlines.of(manifest.modules)
        blocks = blocks[: self.max_blocks]  # those of modules that no kernel knows are the last
        if outline.max_rank > self._limit:
            raise AdapterInvalid(
                "E_RANK_TOO_LARGE",
                f"rank {outline.max_rank} exceeds max_rank = {self._limit}",
                hint="raise max_rank",
            )
        index = self._next()
        outline.fill(self._rows[index], self.blocks_at, blocks)
        # All of it: what lies behind these blocks is never read, and parts would be two more views.
        self.table[slot].copy_(self._staged[index], non_blocking=self._cuda)
        self.max_rank[slot] = outline.max_rank
        self.extras[slot] = outline.extras
        if self._cuda:
            event = self._events[index]
            if event is None:
                event = self._events[index] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.table.device))

    def _next(self) -> int:
        self._turn = (self._turn + 1) % len(self._events)
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._turn


@dataclass(frozen=True, slots=True)
class Outline:
    """All of a slot's row that does not depend on where its blocks lie."""

    max_rank: int
    extras: bool  # any bias or gain
    units: int  # of a block
    entries: Ints  # (all entries, ENTRY_WORDS), as if every block were block 0; zeros if none
    #: (all entries, 2): A's and B's first block, in the adapter's own list; -1 if there is none.
    starts: Longs

    def fill(self, row: Ints, blocks_at: int, blocks: Sequence[int]) -> None:
        """Write it into `row`, which becomes that of an adapter in `blocks`: entries (see
        engine/kernels/lora_place.py), then the block ids."""
        count = len(blocks)
        held = np.array((*blocks, 0), dtype=np.int32)  # -1 finds the 0
        entries = row[:blocks_at].reshape(-1, ENTRY_WORDS)
        entries[:] = self.entries
        entries[:, 1:3] += (held * self.units)[self.starts]
        entries[:, 6:8] = held[self.starts + 1]
        row[blocks_at : blocks_at + count] = held[:count]


def outline_of(modules: Sequence[PackedModule], layout: BlockLayout) -> Outline:
    """Of those `modules` that the kernels know."""
    num_layers = layout.shapes.num_layers
    modules = [m for m in modules if m.layer < num_layers]
    where = starts(tuple((m.layer, MODULE_ID[m.module], m.rank, m.b_rows) for m in modules), layout)
    places, shape = where[:, 0], (num_layers * len(MODULES), ENTRY_WORDS)
    entries = np.zeros(shape, dtype=np.int32)
    entries[places, 0] = where[:, 1]
    entries[places, 1:3] = where[:, [3, 5]]
    entries[places, 3] = np.array([m.scaling for m in modules], dtype=np.float32).view(np.int32)
    entries[places, 4:6] = where[:, [2, 4]]
    flags = [(m.bias * HAS_BIAS + m.gain * HAS_GAIN) << FLAGS_AT for m in modules]
    entries[places, 5] += np.array(flags, dtype=np.int32)
    firsts = np.full((len(entries), 2), -1, dtype=np.int64)
    firsts[places] = where[:, [2, 4]]
    return Outline(
        max_rank=max((m.rank for m in modules), default=1),
        extras=any(m.bias or m.gain for m in modules),
        units=layout.block_bytes // ROW_ALIGN,
        entries=entries,
        starts=firsts,
    )


class Outlines:
    """The outlines that were used last.

    Adapters of a fleet share few, and those of one engine share the modules themselves
    (`adapters/orders.py`): these are found by which object they are.  Others take a look-up by what
    is in them, one pass in C.
    """

    def __init__(self, layout: BlockLayout, most: int = 256) -> None:
        self._layout = layout
        self._most = most
        self._encode = Encoder().encode
        self._known: OrderedDict[bytes, Outline] = OrderedDict()
        self._same: OrderedDict[int, tuple[Sequence[PackedModule], Outline]] = OrderedDict()

    def of(self, modules: Sequence[PackedModule]) -> Outline:
        """Of a manifest's modules."""
        same = self._same.get(id(modules))
        if same is not None:  # which keeps them, so that no others are at their place
            return same[1]
        key = self._encode(modules)
        outline = self._known.get(key)
        if outline is None:
            outline = self._known[key] = outline_of(modules, self._layout)
            _trim(self._known, self._most)
        else:
            self._known.move_to_end(key)
        self._same[id(modules)] = modules, outline
        _trim(self._same, self._most)
        return outline


def _trim(known: OrderedDict[Any, Any], most: int) -> None:
    if len(known) > most:
        known.popitem(last=False)


@lru_cache(maxsize=256)
def starts(
    modules: tuple[tuple[int, int, int, int], ...], layout: BlockLayout
) -> npt.NDArray[np.int64]:
    """Where `layout.place` puts (layer, module id, rank, B rows) in stream order, as numbers.

    A row of the result: entry, rank, A block, A offset, B block, B offset; blocks count in the
    adapter's own list, offsets in units of 256 bytes.  Fleets share few shapes: kept.
    """
    units = layout.block_bytes // ROW_ALIGN
    widths = [tuple(_units(d, layout) for d in dims) for dims in layout.shapes.dims]
    block = offset = 0
    found = []
    for layer, module, rank, b_rows in modules:
        line = [layer * len(MODULES) + module, rank]
        for rows, width in zip((rank, b_rows), widths[module], strict=True):
            if units - offset < width:
                block, offset = block + 1, 0
            line += (block, offset)
            fitting = (units - offset) // width
            if rows <= fitting:
                offset += rows * width
            else:
                per_block = units // width
                full, last = divmod(rows - fitting - 1, per_block)
                block, offset = block + 1 + full, (last + 1) * width
        found.append(line)
    return np.array(found, dtype=np.int64).reshape(-1, 6)


def most_blocks(layout: BlockLayout, max_rank: int) -> int:
    """Blocks that no adapter of `max_rank` exceeds: as if each run began a block of its own."""
    units = layout.block_bytes // ROW_ALIGN
    total = 0
    most = PackedModule(0, "", max_rank, 0.0, bias=True, gain=True)
    for dims in layout.shapes.dims:
        if not all(dims):  # a module that this base lacks
            continue
        for rows, d in zip((max_rank, most.b_rows), dims, strict=True):
            per_block = units // _units(d, layout)
            total += -(-rows // per_block) if per_block else 0
    return total * layout.shapes.num_layers


def _units(width: int, layout: BlockLayout) -> int:
    return -(-width * layout.itemsize // ROW_ALIGN)
