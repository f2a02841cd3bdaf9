"""Changes to logits before a draw on a card: limits, entries and masks, in a launch each.

Goes in: logits (rows, width), a SampleMeta.  Comes out: the logits, changed in place as
`sample_reference.close` and `change` do.  Only what changes is touched.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import follow
from engine.kernels.launch import launch
from engine.kernels.sample_meta import RECORD, Field, SampleMeta
from engine.kernels.sample_parts import load_float

#: Entries of a program; words of a mask of one; columns behind the least limit of one.
ENTRIES, WORDS, COLUMNS = 1024, 128, 1024

_FIRST, _COUNT, _MASK, _LIMIT = (
    tl.constexpr(int(f)) for f in (Field.FIRST, Field.COUNT, Field.MASK, Field.LIMIT)
)
_REPETITION, _FREQUENCY, _PRESENCE = (
    tl.constexpr(int(f)) for f in (Field.REPETITION, Field.FREQUENCY, Field.PRESENCE)
)


@triton.jit(do_not_specialize=["entries_at", "num_entries"])
def _entries(
    logits,
    words,
    stride,
    entries_at,
    num_entries,
    RECORD: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE entries (axis 1) of one row (axis 0)."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    record = words + row * RECORD
    at = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    live = at < tl.load(record + _COUNT)
    entry = words + entries_at + tl.load(record + _FIRST) + at
    place = logits + row * stride + tl.load(entry, mask=live, other=0)
    count = tl.load(entry + num_entries, mask=live, other=0)
    bias = tl.load(entry + 2 * num_entries, mask=live, other=0).to(tl.float32, bitcast=True)
    repetition = load_float(record + _REPETITION)
    x = tl.load(place, mask=live, other=0.0).to(tl.float32)
    seen = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = tl.where(count >= 0, seen, x)
    x -= tl.maximum(count, 0).to(tl.float32) * load_float(record + _FREQUENCY)
    x -= tl.where(count > 0, load_float(record + _PRESENCE), 0.0)
    tl.store(place, (x + bias).to(logits.dtype.element_ty), mask=live)


@triton.jit
def _mask(
    logits,
    words,
    stride,
    VOCAB: tl.constexpr,
    RECORD: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE words (axis 1) of the mask of one row (axis 0), if it has one."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(words + row * RECORD + _MASK)
    if start == 0:
        return
    word = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    bits = tl.load(words + start + word, mask=word < (VOCAB + 31) // 32, other=0)
    bit = tl.arange(0, 32)
    column = word[:, None] * 32 + bit[None, :]
    allowed = ((bits[:, None] >> bit[None, :]) & 1) != 0
    nothing = tl.full([TAKE, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * stride + column, nothing, mask=(column < VOCAB) & (allowed == 0))


@triton.jit(do_not_specialize=["least"])
def _close(
    logits,
    words,
    stride,
    least,
    WIDTH: tl.constexpr,
    RECORD: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE columns (axis 1) of one row (axis 0), from the least limit on."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(words + row * RECORD + _LIMIT)
    column = least + tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    nothing = tl.full([TAKE], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * stride + column, nothing, mask=(column >= limit) & (column < WIDTH))


def close(logits: Tensor, meta: SampleMeta, width: int) -> None:
    """-inf in every column of logits (rows, width or more) from a row's limit up to `width`."""
    if meta.least >= width:
        return
    pdl = backend.dependent_launch(logits.device)
    launch(
        _close,
        (meta.num_rows, triton.cdiv(width - meta.least, COLUMNS)),
        logits,
        meta.words,
        logits.stride(0),
        meta.least,
        WIDTH=width,
        RECORD=RECORD,
        TAKE=COLUMNS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def change(logits: Tensor, meta: SampleMeta, vocab: int) -> None:
    """Apply entries and masks in place; a launch for each, if there are any."""
    pdl = backend.dependent_launch(logits.device)
    if meta.num_entries:
        launch(
            _entries,
            (meta.num_rows, triton.cdiv(meta.most_entries, ENTRIES)),
            logits,
            meta.words,
            logits.stride(0),
            meta.entries_at,
            meta.num_entries,
            RECORD=RECORD,
            TAKE=ENTRIES,
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=False,  # the reference rounds every product
            launch_pdl=pdl,
        )
    if meta.num_masked:
        launch(
            _mask,
            (meta.num_rows, triton.cdiv(vocab, 32 * WORDS)),
            logits,
            meta.words,
            logits.stride(0),
            VOCAB=vocab,
            RECORD=RECORD,
            TAKE=WORDS,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
