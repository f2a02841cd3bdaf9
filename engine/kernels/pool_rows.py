"""Many sequences' rows to one vector each, in one launch on a card.

Goes in: hidden states of a step, and where each sequence lies.  Comes out: a vector for each, in
fp32.  The rows of a sequence are added in an order that hangs on its own length alone, so that its
bits do not depend on where it lies or on others.  Knows no requests.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import follow
from engine.kernels.launch import launch

#: Rows and columns that a program reads at once.
ROWS, COLUMNS = 16, 128
#: Kinds of pooling by the kernel's numbers.
KINDS = {"cls": 0, "last": 1, "mean": 2, "mean_sqrt_length": 3, "weighted_mean": 4, "max": 5}


@triton.jit
def _pool(
    x,
    spans,
    out,
    stride_x,
    stride_out,
    WIDTH: tl.constexpr,
    TAKE: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE columns (axis 1) of one sequence (axis 0)."""
    follow(PDL)
    which = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    live = column < WIDTH
    begin = tl.load(spans + 3 * which)
    first = tl.load(spans + 3 * which + 1)
    end = tl.load(spans + 3 * which + 2)
    if KIND == 0:
        end = first + 1
    elif KIND == 1:
        first = end - 1
    nothing = float("-inf") if KIND == 5 else 0.0
    kept = tl.full((ROWS, TAKE), nothing, tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at = x + row.to(tl.int64)[:, None] * stride_x + column[None, :]
        mask = (row < end)[:, None] & live[None, :]
        value = tl.load(at, mask=mask, other=nothing).to(tl.float32)
        if KIND == 5:
            kept = tl.maximum(kept, value)
        elif KIND == 4:
            kept += value * (row - begin + 1).to(tl.float32)[:, None]
        else:
            kept += value
    count = (end - first).to(tl.float32)
    if KIND == 5:
        told = tl.max(kept, 0)
    elif KIND == 4:
        told = tl.sum(kept, 0) / (count * (first - begin + 1 + end - begin).to(tl.float32) / 2.0)
    elif KIND == 3:
        told = tl.sum(kept, 0) / tl.sqrt(count)
    else:
        told = tl.sum(kept, 0) / count
    tl.store(out + which * stride_out + column, told, mask=live)


def pool_rows(x: Tensor, spans: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """x (T, width) -> (sequences, width) fp32, in `out` if given.

    `spans` (sequences, 3) int32, contiguous: where a sequence begins, its first row that is looked
    at, and its end; a row at least is looked at.  `kind` is one of KINDS.
    """
    count, width = len(spans), x.shape[1]
    if out is None:
        out = torch.empty(count, width, dtype=torch.float32, device=x.device)
    assert x.stride(1) == out.stride(1) == 1 and spans.is_contiguous()
    pdl = backend.dependent_launch(x.device)
    launch(
        _pool,
        (count, triton.cdiv(width, COLUMNS)),
        x,
        spans,
        out,
        x.stride(0),
        out.stride(0),
        WIDTH=width,
        TAKE=COLUMNS,
        ROWS=ROWS,
        KIND=KINDS[kind],
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
