"""Adapters in an arena, as the engine has them; the rows of a case, and what is right for them."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from lora_cases import CHOICES, LAYERS, LAYOUT, MAX_RANK, MAX_ROWS, ROOM, SLOTS, Case
from torch import Tensor

from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.kernels import tiles as choices
from engine.kernels.lora import lora_apply_cuda
from engine.kernels.lora_meta import LoraDevicePlan, group_shapes
from engine.kernels.tiles import Tiles
from engine.layout import GROUPS, MODULES, Placement, place
from engine.memory.arena import Arena
from engine.messages import PackedManifest, PackedModule

CHECKED_LAYER = 5


@lru_cache
def placed(rank: int) -> Placement:
    """An adapter of one rank in every module of every layer."""
    modules = (PackedModule(i, m, rank, 0.5) for i in range(LAYERS) for m in MODULES)
    return place(tuple(modules), LAYOUT)


class Fleet:
    """64 adapters of the given ranks in `arena`, one planner, and x and y of every group."""

    def __init__(
        self, arena: Arena, ranks: tuple[int, ...], tiles: tuple[Tiles, ...] = CHOICES
    ) -> None:
        self.arena = arena
        self.ranks = ranks
        device = arena.device
        self.slots = DeviceSlots(LAYOUT, num_slots=SLOTS, max_rank=MAX_RANK, device=device)
        free = torch.randperm(arena.num_blocks).tolist()
        self.placed = []
        for slot, rank in enumerate(ranks):
            placement = placed(rank)
            modules = tuple(
                PackedModule(m.layer, m.module, m.rank, m.scaling) for m in placement.modules
            )
            blocks = [free.pop() for _ in range(placement.num_blocks)]
            manifest = PackedManifest(
                rev=str(slot),
                path="",
                layout=LAYOUT.id,
                num_blocks=len(blocks),
                true_bytes=placement.true_bytes,
                max_rank=rank,
                changes_kv=True,
                modules=modules,
            )
            self.slots.put(slot, manifest, blocks)
            pairs = {(m.layer, m.module): m for m in placement.modules}
            self.placed.append((pairs, blocks))
        self.tiles: Tiles = choices.ALONE
        self.planner = DevicePlanner(
            arena,
            self.slots,
            max_rows=MAX_ROWS,
            max_seqs=SLOTS,
            max_rank=MAX_RANK,
            choose=lambda shape: self.tiles,
            choices=tiles,
            room=ROOM,
        )

    def plan(
        self, case: Case, tiles: Tiles, *, pdl: bool = True, guests: bool = False
    ) -> LoraDevicePlan:
        """`guests`: of a prompt, for the products of a chain that has ROOM."""
        self.tiles, choices.AUGMENTED = tiles, guests
        meta = self.planner.send(case.runs, len(case.slots))
        assert meta.device is not None
        if pdl or not meta.device.store.pdl:
            return meta.device
        return replace(meta.device, store=replace(meta.device.store, pdl=False))

    def pairs(self, slot: int, layer: int, group: str) -> list[tuple[Tensor, Tensor, float]]:
        """lora_A (rank, d_in), lora_B (rank, d_out) and the scaling of the group's modules."""
        runs, blocks = self.placed[slot]
        found = []
        for m in (runs[layer, module] for module in GROUPS[group]):
            a, b = (torch.cat(self.arena.pieces(run, blocks)) for run in (m.a, m.b))
            found.append((a, b, m.scaling))
        return found

    def exact(self, case: Case, x: Tensor, group: str) -> Tensor:
        """The correction of one layer in fp32."""
        shape = group_shapes(LAYOUT)[group]
        out = torch.zeros(len(case.slots), sum(shape.widths), device=x.device)
        for start, rows, slot in case.runs.T.tolist():
            column = 0
            for a, b, scaling in self.pairs(slot, CHECKED_LAYER, group):
                h = x[start : start + rows].float() @ a.float().T * scaling
                out[start : start + rows, column : column + b.shape[1]] = h @ b.float()
                column += b.shape[1]
        return out


class Operands:
    """x and y of a case, and what y should become in the checked layer."""

    def __init__(self, fleet: Fleet, case: Case) -> None:
        rows, shapes = len(case.slots), group_shapes(LAYOUT)
        device = fleet.arena.device
        self.x = {g: torch.randn(rows, s.d_in, device=device).bfloat16() for g, s in shapes.items()}
        self.y = {
            g: torch.randn(rows, sum(s.widths), device=device).bfloat16() for g, s in shapes.items()
        }
        self.exact = {g: fleet.exact(case, self.x[g], g) for g in shapes}

    def error(self, plan: LoraDevicePlan) -> float:
        """Relative to the correction, the rounding of y included."""

        def ours(y: Tensor, x: Tensor, layer: int, group: str) -> None:
            plan.store.h.fill_(torch.nan)
            lora_apply_cuda(y, x, layer, group, plan)

        return self.error_of(ours)

    def error_of(self, apply: Callable[[Tensor, Tensor, int, str], None]) -> float:
        """The same of anything that adds one layer's correction of x to y; the worst group's."""
        errors = []
        for group, exact in self.exact.items():
            y = torch.zeros_like(self.y[group])
            apply(y, self.x[group], CHECKED_LAYER, group)
            errors.append(float((y.float() - exact).norm() / exact.norm()))
        return max(error if error == error else float("inf") for error in errors)

    def moved(self, start: dict[str, Tensor]) -> float:
        """How far every y is from what it was."""
        return (
            sum(float((self.y[g].float() - y.float()).norm() ** 2) for g, y in start.items()) ** 0.5
        )
