"""A pool of adapters at scattered blocks among NaN, and steps that run on it with both backends."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.kernels.lora import lora_apply
from engine.kernels.lora_meta import LoraMeta, LoraRows, Segment, group_shapes
from engine.kernels.tiles import ALL, Tiles, pick
from engine.ladder import Rung
from engine.layout import GROUPS, MODULE_ID, MODULES, BlockLayout, Shapes, place
from engine.memory.arena import Arena
from engine.messages import PackedManifest, PackedModule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
NUM_LAYERS = 2


def dims(hidden: int, q: int, kv: int, ffn: int) -> tuple[tuple[int, int], ...]:
    return (
        *((hidden, q), (hidden, kv), (hidden, kv), (q, hidden)),
        *((hidden, ffn), (hidden, ffn), (ffn, hidden)),
    )


#: Odd widths on purpose: 576 with 9/3 heads is SmolLM2's, 1536 its FFN; 192 and 100 are nobody's.
SHAPES = {
    "smollm2": dims(576, 576, 192, 1536),
    "odd": dims(192, 160, 40, 100),
    "even": dims(256, 256, 128, 512),
    # An encoder's MLP without a gate: its first half is 0 wide.
    "ungated": (*dims(192, 192, 192, 320)[:4], (192, 0), (192, 320), (320, 192)),
}


@dataclass
class Pool:
    """Adapters of one layout, in one arena.  `reads_past` NaN: whatever no adapter owns is NaN."""

    layout: BlockLayout
    dtype: torch.dtype
    num_slots: int
    max_rank: int
    max_rows: int
    generator: torch.Generator
    num_blocks: int = 256
    first_block: int = 0
    pairs: dict[int, dict[tuple[int, str], LoraRows]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arena = Arena(
            None,  # type: ignore[arg-type]  # asked for cached keys and values alone
            self.layout,
            block_size=16,
            num_blocks=self.num_blocks,
            device=DEVICE,
        )
        self.flat = self.arena.bytes.view(-1).view(self.dtype)
        self.flat[self.first_block * self.layout.block_bytes // self.layout.itemsize :] = torch.nan
        self.slots = DeviceSlots(
            self.layout, num_slots=self.num_slots, max_rank=self.max_rank, device=DEVICE
        )
        order = torch.randperm(self.num_blocks - self.first_block, generator=self.generator)
        self.free = (order + self.first_block).tolist()
        self.planners: dict[object, DevicePlanner] = {}

    def add(
        self,
        slot: int,
        ranks: Mapping[tuple[int, str], int],
        *,
        scale: float = 0.05,
        bias: bool = False,
        gain: bool = False,
    ) -> None:
        """Put a random adapter into `slot`; what was in it becomes NaN."""
        modules = tuple(
            PackedModule(layer, module, rank, 0.3 + 0.01 * rank * (-1) ** layer, bias, gain)
            for (layer, module), rank in sorted(
                ranks.items(), key=lambda item: (item[0][0], MODULE_ID[item[0][1]])
            )
        )
        placed = place(modules, self.layout)
        blocks = [self.free.pop() for _ in range(placed.num_blocks)]
        pairs = {}
        for m in placed.modules:
            a, b = self.arena.pieces(m.a, blocks), self.arena.pieces(m.b, blocks)
            for piece in (*a, *b):
                noise = torch.randn(piece.shape, generator=self.generator) * scale
                piece.copy_(noise)
            if gain:
                self.set_gain(b, m.b.rows)
            pairs[m.layer, m.module] = LoraRows(m.scaling, m.rank, a, b, bias, gain)
        self.pairs[slot] = pairs
        self.slots.put(slot, self.manifest(modules, placed.num_blocks), blocks)

    def set_gain(self, b: tuple[Tensor, ...], rows: int) -> None:
        """Around 1, in two halves: the last two of B's rows."""
        gain = 1 + torch.randn(b[0].shape[1], generator=self.generator) * 0.2
        for row, part in ((rows - 2, gain), (rows - 1, gain - gain.to(self.dtype).float())):
            for piece in b:
                if row < len(piece):
                    piece[row] = part
                    break
                row -= len(piece)

    def manifest(self, modules: tuple[PackedModule, ...], num_blocks: int) -> PackedManifest:
        return PackedManifest(
            rev="r",
            path="",
            layout=self.layout.id,
            num_blocks=num_blocks,
            true_bytes=0,
            max_rank=max((m.rank for m in modules), default=0),
            changes_kv=True,
            modules=modules,
        )

    def planner(
        self, tiles: Tiles | None = None, *, deterministic: bool = False, room: int = 0
    ) -> DevicePlanner:
        key = tiles, deterministic, room
        if key not in self.planners:
            self.planners[key] = DevicePlanner(
                self.arena,
                self.slots,
                max_rows=self.max_rows,
                max_seqs=self.max_rows,
                max_rank=self.max_rank,
                deterministic=deterministic,
                choose=pick if tiles is None else lambda shape: tiles,
                choices=ALL if tiles is None else (tiles,),
                room=room,
            )
        return self.planners[key]

    def plan(
        self,
        segments: Sequence[Segment],
        total: int,
        tiles: Tiles | None = None,
        *,
        deterministic: bool = False,
        rung: Rung | None = None,
        room: int = 0,
    ) -> LoraMeta:
        runs = np.array([(s.start, s.end - s.start, s.slot) for s in segments], dtype=np.int64).T
        planner = self.planner(tiles, deterministic=deterministic, room=room)
        return planner.send(runs, total, rung)

    def operands(self, group: str, total: int) -> tuple[Tensor, Tensor]:
        """y (total, widths) and x (total, d_in) on the device."""
        shape = group_shapes(self.layout)[group]
        y, x = (
            torch.randn(total, width, generator=self.generator).to(self.dtype).to(DEVICE)
            for width in (sum(shape.widths), shape.d_in)
        )
        return y, x

    def apply(
        self,
        y: Tensor,
        x: Tensor,
        layer: int,
        group: str,
        meta: LoraMeta,
        base_bias: Tensor | None = None,
    ) -> Tensor:
        """The corrected y; h is poisoned before."""
        out = y.clone()
        if meta.device is not None:
            meta.device.store.h.fill_(torch.nan)
        lora_apply(
            out,
            x,
            layer=layer,
            modules=GROUPS[group],
            splits=group_shapes(self.layout)[group].widths,
            meta=meta,
            base_bias=base_bias,
        )
        return out

    def exact(
        self,
        y: Tensor,
        x: Tensor,
        layer: int,
        group: str,
        segments: Sequence[Segment],
        base_bias: Tensor | None = None,
    ) -> Tensor:
        """What `apply` should give, in fp64, on the CPU."""
        widths = group_shapes(self.layout)[group].widths
        columns = [0, *itertools.accumulate(widths)]
        out = y.double().cpu()
        for s in segments:
            rows = x[s.start : s.end].double().cpu()
            for i, module in enumerate(GROUPS[group]):
                pair = self.pairs[s.slot].get((layer, module))
                if pair is not None:
                    a, b = (torch.cat(p).double().cpu() for p in (pair.a, pair.b))
                    part = out[s.start : s.end, columns[i] : columns[i + 1]]
                    own = 0.0
                    if base_bias is not None:
                        own = base_bias[columns[i] : columns[i + 1]].double().cpu()
                    part += pair.scaling * (rows @ a.T) @ b[: pair.rank]
                    if pair.bias:
                        part += pair.scaling * b[pair.rank]
                    if pair.gain:
                        part.sub_(own).mul_(b[-2:].sum(0)).add_(own)
        return out

    def check(
        self,
        segments: Sequence[Segment],
        total: int,
        *,
        layer: int = 0,
        groups: Sequence[str] = tuple(GROUPS),
        tiles: Tiles | None = None,
        deterministic: bool = False,
        biased: bool = False,
        rung: Rung | None = None,
    ) -> None:
        """Kernels against fp64: values where an adapter is, bits where none is."""
        meta = self.plan(segments, total, tiles, deterministic=deterministic, rung=rung)
        for group in groups:
            y, x = self.operands(group, total)
            own = self.operands(group, 1)[0][0] if biased else None
            got = self.apply(y, x, layer, group, meta, own).cpu()
            exact = self.exact(y, x, layer, group, segments, own)
            touched = torch.zeros(exact.shape, dtype=torch.bool)
            widths = group_shapes(self.layout)[group].widths
            columns = [0, *itertools.accumulate(widths)]
            for s in segments:
                for i, module in enumerate(GROUPS[group]):
                    if (layer, module) in self.pairs[s.slot]:
                        touched[s.start : s.end, columns[i] : columns[i + 1]] = True
            assert torch.equal(got[~touched], y.cpu()[~touched]), f"{group}: base bits changed"
            off = (got.double() - exact).abs()
            # One rounding of y, and h as the tensor cores take it.
            unit = torch.finfo(self.dtype).eps
            delta = (exact - y.double().cpu()).abs()
            scale = torch.where(touched, delta, 0).pow(2).mean().sqrt()
            grain = {torch.bfloat16: unit / 16, torch.float16: unit / 2, torch.float32: 2e-6}
            room = unit * (0.51 * exact.abs() + 1e-3) + grain[self.dtype] * (delta + 4 * scale)
            worst = (off - room)[touched]
            assert not touched.any() or worst.max() <= 0, f"{group}: off by {off[touched].max()}"
            assert got.isfinite().all()


def cut(population: Sequence[tuple[int, int]]) -> tuple[list[Segment], int]:
    """[(slot, rows), ...] in row order -> segments, total rows; slot -1 = base."""
    segments, row = [], 0
    for slot, rows in population:
        if slot >= 0:
            segments.append(Segment(row, row + rows, slot))
        row += rows
    return segments, row


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_pool() -> Callable[..., Pool]:
    """`make_pool("smollm2", torch.float16)`: an empty pool; blocks are small, so that runs of rows
    cross their borders."""

    def make(
        shape: str,
        dtype: torch.dtype,
        *,
        num_slots: int = 8,
        max_rank: int = 128,
        max_rows: int = 512,
        block_rows: int = 12,
        seed: int = 0,
        num_blocks: int = 256,
        first_block: int = 0,
    ) -> Pool:
        itemsize = dtype.itemsize
        widest = max(d for pair in SHAPES[shape] for d in pair)
        block_bytes = block_rows * (-(-widest * itemsize // 256)) * 256
        layout = BlockLayout(Shapes(NUM_LAYERS, SHAPES[shape]), NAMES[dtype], block_bytes)
        return Pool(
            layout,
            dtype,
            num_slots,
            max_rank,
            max_rows,
            torch.Generator().manual_seed(seed),
            num_blocks,
            first_block,
        )

    return make


def everywhere(rank: int) -> dict[tuple[int, str], int]:
    return {(layer, module): rank for layer in range(NUM_LAYERS) for module in MODULES}


@pytest.fixture(scope="session")
def whole() -> Callable[[int], dict[tuple[int, str], int]]:
    """`whole(rank)`: that rank in every module of every layer."""
    return everywhere


@pytest.fixture(scope="session")
def rows_of() -> Callable[[Sequence[tuple[int, int]]], tuple[list[Segment], int]]:
    """`rows_of([(slot, rows), ...])` -> segments and the number of rows; slot -1 = base rows."""
    return cut
