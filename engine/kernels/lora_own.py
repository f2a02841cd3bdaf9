"""Rows of adapters' own at the model's ends, for all rows of a step in one launch: embeddings, and
the logits of the few tokens that an adapter has of its own, or has trained.

Goes in: a step's rows, and for each where its adapter's ids and rows lie (`OwnRows`).  Comes out:
embeddings, or logits in fp32, in which these rows replace the base's.  What they are is said by
`lora_ends.replace_embedding` and `replace_head`, which take them adapter by adapter: ten launches
for each, and 64 adapters in a step are usual.  A row's bits do not depend on the rows beside it.
Where adapters may bring ids of their own, embeddings are looked up so to begin with: steps with
such adapters replay the graphs of all others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import follow
from engine.kernels.hyperbolic import tanh
from engine.kernels.launch import launch
from engine.kernels.lora_meta import OWN_WORDS, OwnRows

#: Columns at a time; of the head so many tokens a program.
TAKE, TOKENS = 512, 8


@triton.jit
def _place(entry, token):
    """Where a row's adapter has the row of a token; -1 = it has none."""
    count = tl.load(entry + 2)
    place = count * 0 - 1
    if count > 0:
        address = tl.load(entry)
        low = tl.minimum(token, count - 1)
        mine = low == token
        if address != 0:  # else it has all tokens up to the count
            ids = address.to(tl.pointer_type(tl.int64))
            low, high = count * 0, count - 1  # the first id that is not below, or the last
            while low < high:
                middle = (low + high) // 2
                below = tl.load(ids + middle) < token
                low = tl.where(below, middle + 1, low)
                high = tl.where(below, high, middle)
            mine = tl.load(ids + low) == token
        if mine:
            place = tl.load(tl.load(entry + 1).to(tl.pointer_type(tl.int64)) + low)
    return place


@triton.jit(do_not_specialize=["rows", "last"])
def _look_up(
    x,
    tokens,
    base,
    table,
    arena,
    rows,
    stride,
    stride_base,
    last,
    scale,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: its adapter's for its token, or the base's."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    place = tl.full([], -1, tl.int64)
    if row < rows:
        place = _place(table + row * WORDS, token)
    source = base + tl.minimum(token, last) * stride_base
    if place >= 0:
        source = arena + place
    for start in range(0, WIDTH, TAKE):
        column = start + tl.arange(0, TAKE)
        live = column < WIDTH
        own = tl.load(source + column, mask=live).to(tl.float32) * scale
        tl.store(x + row * stride + column, own.to(x.dtype.element_ty), mask=live)


@triton.jit
def _embed(
    x,
    tokens,
    table,
    arena,
    stride,
    scale,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, if its adapter has one for its token."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = _place(table + row * WORDS, tl.load(tokens + row))
    if place < 0:
        return
    for start in range(0, WIDTH, TAKE):
        column = start + tl.arange(0, TAKE)
        live = column < WIDTH
        own = tl.load(arena + place + column, mask=live).to(tl.float32) * scale
        tl.store(x + row * stride + column, own.to(x.dtype.element_ty), mask=live)


@triton.jit
def _head(
    y,
    x,
    table,
    arena,
    stride_y,
    stride_x,
    cap,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOKENS logits (axis 1) of one row (axis 0), of those that its adapter has rows for."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry = table + row * WORDS
    count = tl.load(entry + 2)
    first = tl.program_id(1) * TOKENS
    if first >= count:
        return
    at = first + tl.arange(0, TOKENS)
    there = at < count
    token = tl.load(tl.load(entry).to(tl.pointer_type(tl.int64)) + at, mask=there, other=0)
    places = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
    place = tl.load(places + at, mask=there, other=0)
    sums = tl.zeros([TOKENS, TAKE], tl.float32)
    for start in range(0, WIDTH, TAKE):
        column = start + tl.arange(0, TAKE)
        live = column < WIDTH
        hidden = tl.load(x + row * stride_x + column, mask=live, other=0.0).to(tl.float32)
        mask = there[:, None] & live[None, :]
        own = tl.load(arena + place[:, None] + column[None, :], mask=mask, other=0.0)
        sums += own.to(tl.float32) * hidden[None, :]
    logit = tl.sum(sums, 1)
    if CAPPED:
        logit = cap * tanh(logit / cap)
    tl.store(y + row * stride_y + token, logit, mask=there)


def look_up(tokens: Tensor, base: Tensor, own: OwnRows, scale: float) -> Tensor:
    """(T, hidden): scale * what adapters have for tokens (T,), or else the base's row of base
    (vocab, hidden), as behind the rows that the table speaks of.  May be captured in a graph, which
    reads the table as it is when replayed."""
    assert tokens.stride(0) == base.stride(1) == 1
    x = torch.empty(len(tokens), base.shape[1], dtype=base.dtype, device=base.device)
    pdl = backend.dependent_launch(x.device)
    launch(
        _look_up,
        (len(tokens),),
        x,
        tokens,
        base,
        own.table,
        own.arena,
        len(own.table),
        x.stride(0),
        base.stride(0),
        len(base) - 1,
        scale,
        WIDTH=x.shape[1],
        WORDS=OWN_WORDS,
        TAKE=TAKE,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return x


def replace_embeddings(x: Tensor, tokens: Tensor, own: OwnRows, scale: float) -> None:
    """x (T, hidden) = scale * the adapter's own row, in those of the first rows that have one for
    their token of tokens (T,)."""
    assert x.stride(1) == tokens.stride(0) == 1
    pdl = backend.dependent_launch(x.device)
    launch(
        _embed,
        (len(own.table),),
        x,
        tokens,
        own.table,
        own.arena,
        x.stride(0),
        scale,
        WIDTH=x.shape[1],
        WORDS=OWN_WORDS,
        TAKE=TAKE,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def replace_logits(y: Tensor, x: Tensor, own: OwnRows, cap: float = 0.0) -> None:
    """y (N, num_ids) fp32 = x Wᵀ, capped unless `cap` is 0, in the columns that a row's adapter has
    rows of W for; x is (N, hidden)."""
    assert y.stride(1) == x.stride(1) == 1
    pdl = backend.dependent_launch(x.device)
    launch(
        _head,
        (len(own.table), triton.cdiv(own.most, TOKENS)),
        y,
        x,
        own.table,
        own.arena,
        y.stride(0),
        x.stride(0),
        cap,
        WIDTH=x.shape[1],
        CAPPED=cap > 0.0,
        WORDS=OWN_WORDS,
        TOKENS=TOKENS,
        TAKE=TAKE,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
