"""LoRA alone, of steps that decode: the parts `alone` and `few` of `lora_rivals.py`."""

import statistics
from collections.abc import Callable

import checkout  # noqa: F401
import torch
from lora_cases import LAYERS, MIX, R16, Case, picked_by_engine, shared
from lora_compile import Compiler
from lora_fleet import Fleet, Operands
from lora_turns import Turns, both_launches, checked, own_plan, say, sweep

from engine.kernels import tiles as choices
from engine.kernels.lora_meta import LoraDevicePlan
from engine.kernels.lora_shrink import shrink
from engine.kernels.tiles import Tiles
from engine.layout import GROUPS

MIXED = Case("T=64 k=64 ranks 8-64", shared(64, 64), MIX, (), ())
SAME = Case("T=64 k=64 rank 16", shared(64, 64), R16, (), ())


def wide(chunk: int = 2048, warps: int = 4, columns: int = 1024, *, streamed: bool = True) -> Tiles:
    """`ALONE_WIDE` with some other sizes."""
    tiles = choices.ALONE_WIDE
    return Tiles(
        "rival",
        tiles.shrink._replace(chunk=chunk, wide_chunk=chunk, warps=warps, streamed=streamed),
        tiles.expand._replace(warps=warps, columns=columns, streamed=streamed),
    )


def streams(tiles: Tiles, streamed: bool) -> Tiles:
    """The tiles, whose weights leave L2 first or do not."""
    return tiles._replace(
        name="rival",
        shrink=tiles.shrink._replace(streamed=streamed),
        expand=tiles.expand._replace(streamed=streamed),
    )


RIVALS = {
    "two bodies": wide(streamed=False),
    "two bodies, chunks of 4096": wide(4096, streamed=False),
    "chunks of 4096": wide(4096),
    "2 warps": wide(1024, 2, 512),
    "chunks of 512 by 1 warp": wide()._replace(
        shrink=choices.ALONE_WIDE.shrink._replace(chunk=512, wide_chunk=512, warps=1)
    ),
}
NARROW = choices.ALONE
RIVALS_16 = {
    "two bodies": streams(NARROW, False),
    "chunks of 512 by 1 warp": NARROW._replace(
        name="rival", shrink=NARROW.shrink._replace(chunk=512, wide_chunk=512, warps=1)
    ),
}
#: Steps whose adapters have several rows, or whose items take either form.
FEW = (
    Case("T=64 k=32", shared(64, 32), R16, (), ()),
    Case("T=64 k=32 ranks 8-64", shared(64, 32), MIX, (), ()),
    Case("T=64 k=8", shared(64, 8), R16, (), ()),
)


def few_rivals(case: Case) -> dict[str, Tiles]:
    """Of the tiles that are picked: weights that leave L2 first or not, and other sizes."""
    tiles = picked_by_engine(case)
    streamed = streams(tiles, True)
    rivals = {"streamed": streamed, "not streamed": streams(tiles, False)}
    if tiles.shrink.form == "vec":
        rivals |= {
            f"chunks of {chunk}, columns of {columns}": streamed._replace(
                shrink=streamed.shrink._replace(chunk=chunk, wide_chunk=chunk),
                expand=streamed.expand._replace(columns=columns),
            )
            for chunk, columns in ((1024, 1024), (1024, 512), (2048, 512))
        }
    return rivals


#: All that is tried here.
TILES = (
    *RIVALS.values(),
    *RIVALS_16.values(),
    *(tiles for case in FEW for tiles in few_rivals(case).values()),
)


def described(tiles: Tiles) -> dict[str, str]:
    def words(tile: object) -> str:
        return " ".join(f"{k}={v}" for k, v in tile._asdict().items())  # type: ignore[attr-defined]

    return {"shrink": words(tiles.shrink), "expand": words(tiles.expand)}


def first_launches(operands: Operands, plan: LoraDevicePlan) -> Callable[[], None]:
    def run() -> None:
        for layer in range(LAYERS):
            for group in GROUPS:
                shrink(operands.x[group], layer, group, plan)

    return run


def few(fleets: dict[tuple[int, ...], Fleet]) -> bool:
    failed = False
    for case in FEW:
        failed |= _alone(fleets[case.ranks], case, few_rivals(case), None)
    return failed


def alone(fleets: dict[tuple[int, ...], Fleet]) -> bool:
    failed = _alone(fleets[MIXED.ranks], MIXED, RIVALS, 1.2)
    return _alone(fleets[SAME.ranks], SAME, RIVALS_16, 1.25) or failed


def _alone(fleet: Fleet, case: Case, rivals: dict[str, Tiles], bar: float | None) -> bool:
    turns, operands = Turns(), Operands(fleet, case)

    def make(tiles: Tiles, launches: Callable[..., Callable[[], None]]) -> torch.cuda.CUDAGraph:
        return sweep(launches(operands, checked(operands, own_plan(fleet, case, tiles))))

    picked = {"engine": picked_by_engine(case)} | rivals
    for name, tiles in picked.items():
        turns.add(name, lambda t=tiles: make(t, both_launches), case=case.name)
    only = {f"{name}: shrink alone": tiles for name, tiles in picked.items()}
    for name, tiles in only.items():
        turns.add(name, lambda t=tiles: make(t, first_launches), case=case.name)
    for name, times in turns.times().items():
        ms, both = statistics.median(times), picked.get(name)
        say(
            **{"kind": "alone", "case": case.name, "rival": name, "ms": round(ms, 4)},
            **{"floor_ms": round(case.floor_ms, 4), "bar": bar},
            **{"ratio": round(ms / case.floor_ms, 3) if both else None},
            **(described(both) if both else {}),
        )
    return turns.failed


def compile_ahead(compiler: Compiler, parts: list[str]) -> None:
    mine: list[Tiles] = []
    if "alone" in parts:
        mine += [picked_by_engine(MIXED), picked_by_engine(SAME)]
        mine += [*RIVALS.values(), *RIVALS_16.values()]
    if "few" in parts:
        mine += [picked_by_engine(case) for case in FEW]
        mine += [tiles for case in FEW for tiles in few_rivals(case).values()]
    compiler.ask((kernel, tiles) for tiles in mine for kernel in ("expand", "shrink"))
