"""Compiles kernels ahead, in other processes: they are then in triton's cache on disk."""

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import lru_cache

import torch
from lora_cases import LAYERS, LAYOUT, MAX_RANK, MAX_ROWS

from engine.adapters.device_slots import most_blocks
from engine.kernels.lora_meta import LoraClass, LoraDevicePlan, LoraStore, group_shapes
from engine.kernels.tiles import Tiles
from engine.layout import GROUPS, MODULES


@lru_cache
def empty_store() -> LoraStore:
    """The numbers of the real one, over next to nothing: kernels are compiled for numbers."""
    blocks_at = LAYERS * len(MODULES) * 8
    words = -(-(blocks_at + most_blocks(LAYOUT, MAX_RANK)) // 8) * 8
    nothing = torch.zeros(64, device="cuda")
    return LoraStore(
        arena=nothing.bfloat16(),
        table=torch.zeros(1, words, dtype=torch.int32, device="cuda"),
        h=nothing,
        groups=group_shapes(LAYOUT),
        block=LAYOUT.block_bytes // 2,
        blocks_at=blocks_at,
        max_rank=MAX_RANK,
        max_rows=MAX_ROWS,
        pdl=True,
    )


def compile_one(kernel: str, tiles: Tiles, group: str) -> None:
    """Launch the kernel on one item of padding: it is then in triton's cache on disk."""
    from engine.kernels.lora_expand import expand
    from engine.kernels.lora_joint import begin, joined
    from engine.kernels.lora_shrink import shrink

    store = empty_store()
    items = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    plan = LoraDevicePlan(store, LoraClass(tiles, 1, 1), items, items)
    shape = store.groups[group]
    x = torch.zeros(1, shape.d_in, device="cuda").bfloat16()
    y = torch.zeros(1, sum(shape.widths), device="cuda").bfloat16()
    if kernel == "shrink":
        shrink(x, 0, group, plan)
    elif kernel == "expand":
        expand(y, 0, group, plan)
    else:
        begin(store)
        joined(y, x, 0, group, plan)
    torch.cuda.synchronize()


class Compiler:
    """Compiles ahead; a kernel that does not compile fails again, and loudly, where it is timed."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context) if workers else None
        self._known: set[tuple[object, ...]] = set()
        self._running: list[Future[None]] = []

    def ask(self, wanted: Iterable[tuple[str, Tiles]]) -> None:
        for kernel, tiles in wanted:
            for group in GROUPS:
                d_in = group_shapes(LAYOUT)[group].d_in
                key: tuple[object, ...] = {
                    "shrink": (tiles.shrink,),
                    "expand": (tiles.expand, tiles.shrink.splits(d_in)),
                    "joined": (tiles.shrink, tiles.expand),
                }[kernel]
                key = (kernel, group, tiles.most_rows, *key)
                if self._pool is not None and key not in self._known:
                    self._known.add(key)
                    self._running.append(self._pool.submit(compile_one, kernel, tiles, group))

    def call(self, jobs: Iterable[tuple[Callable[..., None], *tuple[object, ...]]]) -> None:
        """Functions with their arguments, which compile something else."""
        for job in jobs:
            if self._pool is not None and job not in self._known:
                self._known.add(job)
                self._running.append(self._pool.submit(*job))

    def wait(self) -> None:
        for future in self._running:
            future.exception()
        self._running.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
