"""Random paged batches and random LoRA pairs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.kernels.attention import write_kv
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.lora_meta import LoraRows


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@dataclass
class Paged:
    """A step's rows over an arena that is NaN wherever nobody has written."""

    q: Tensor
    kv: Tensor
    meta: AttentionMeta


@pytest.fixture
def paged() -> Callable[..., Paged]:
    """`paged([(context, rows), ...])`: each sequence has `context` keys before its `rows` rows."""

    def make(
        sequences: Sequence[tuple[int, int]],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 24,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> Paged:
        lens = [context + rows for context, rows in sequences]
        counts = [-(-n // block_size) for n in lens]
        free = (torch.randperm(sum(counts) + 3) + 1).tolist()  # block 0 belongs to nobody here
        arena = torch.full(
            (len(free) + 1, 2, 2, block_size, kv_heads, head_dim), torch.nan, dtype=dtype
        )
        kv = arena[:, 1]  # as in the engine: a layer's frame of every block
        tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        for s, count in enumerate(counts):
            tables[s, :count] = torch.tensor([free.pop() for _ in range(count)])

        def step(spans: Sequence[tuple[int, int]], picked: Sequence[int]) -> AttentionMeta:
            slots = [
                int(tables[s, p // block_size]) * block_size + p % block_size
                for s, (begin, end) in zip(picked, spans, strict=True)
                for p in range(begin, end)
            ]
            starts = itertools.accumulate((end - begin for begin, end in spans), initial=0)
            return AttentionMeta(
                tuple(starts),
                tuple(end for _, end in spans),
                torch.tensor(slots),
                tables[list(picked)],
                block_size,
            )

        def write(meta: AttentionMeta) -> None:
            shape = (meta.query_starts[-1], kv_heads, head_dim)
            write_kv(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), kv, meta)

        earlier = [s for s, (context, _) in enumerate(sequences) if context]
        if earlier:
            write(step([(0, sequences[s][0]) for s in earlier], earlier))
        spans = [(context, context + rows) for context, rows in sequences]
        meta = step(spans, range(len(spans)))
        write(meta)
        q = torch.randn(meta.query_starts[-1], heads, head_dim).to(dtype)
        return Paged(q, kv, meta)

    return make


@pytest.fixture
def pair() -> Callable[..., LoraRows]:
    """A random pair whose rows lie strided among NaN, in pieces cut after `cuts` rows."""

    def make(
        rank: int,
        d_in: int,
        d_out: int,
        *,
        scaling: float = 0.7,
        cuts_a: Sequence[int] = (),
        cuts_b: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
    ) -> LoraRows:
        def lay(width: int, cuts: Sequence[int]) -> tuple[Tensor, ...]:
            edges = [0, *cuts, rank]
            pieces = []
            for first, last in itertools.pairwise(edges):
                around = torch.full((last - first + 2, width + 5), torch.nan, dtype=dtype)
                piece = around[1:-1, :width]
                piece.copy_(torch.randn(last - first, width))
                pieces.append(piece)
            return tuple(pieces)

        return LoraRows(scaling, rank, lay(d_in, cuts_a), lay(d_out, cuts_b))

    return make
