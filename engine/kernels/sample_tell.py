"""Log-probabilities on a card: of the drawn tokens and of the best ones, in one launch.

Goes in: raw logits (rows, width), the tokens.  Comes out: what `sample_reference.tell` tells.  A
row is split over several programs: each finds its own best and the sum of its exponentials, and the
last one to end puts them together.  The sums of a row do not depend on the rows beside it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import follow
from engine.kernels.launch import launch
from engine.kernels.sample_meta import RECORD, Field, SampleMeta
from engine.kernels.sample_parts import first_best, from_ordered, is_last, ordered

#: The most alternatives that the kernel finds.
MOST = 20

_ASKED = tl.constexpr(int(Field.ASKED))
#: Below every ordered value: what has been taken.
_TAKEN = tl.constexpr(-0x80000000)


@dataclass(frozen=True, slots=True)
class TellTile:
    """Tokens and warps of a program."""

    take: int = 4096
    warps: int = 8


class TellScratch:
    """What a row's programs leave for the last one.  Used by one draw at a time."""

    def __init__(self, rows: int, splits: int, device: torch.device) -> None:
        self.rows = rows
        self.peaks = torch.empty(rows, splits, dtype=torch.float32, device=device)
        self.sums = torch.empty(rows, splits, dtype=torch.float32, device=device)
        self.keys = torch.empty(rows, splits * MOST, dtype=torch.int32, device=device)
        self.ids = torch.empty(rows, splits * MOST, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)


@triton.jit
def _norm(peaks, sums, SPLITS: tl.constexpr, WIDE: tl.constexpr):
    """ln of the sum of exponentials of a whole row."""
    at = tl.arange(0, WIDE)
    there = at < SPLITS
    peak = tl.load(peaks + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    each = tl.load(sums + at, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(peak, 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    return top + tl.log(tl.sum(each * tl.exp(peak - top), 0))


@triton.jit
def _put_best(keys, ids, SPLITS: tl.constexpr, width, norm, to_values, to_ids, WIDE: tl.constexpr):
    """The `width` best of what a row's programs found, best first."""
    at = tl.arange(0, WIDE)
    there = at < SPLITS * width
    key = tl.load(keys + at, mask=there, other=_TAKEN, cache_modifier=".cg")
    place = tl.load(ids + at, mask=there, other=-1, cache_modifier=".cg")
    for i in range(width):
        best, token = first_best(key, place)
        tl.store(to_values + i, (from_ordered(best) - norm).to(tl.float64))
        tl.store(to_ids + i, token.to(tl.float64))
        key = tl.where(place == token, _TAKEN, key)


@triton.jit(do_not_specialize=["rows", "width"], do_not_specialize_on_alignment=["tokens", "told"])
def _tell(
    raw,
    words,
    tokens,
    told,
    peaks,
    sums,
    keys,
    ids,
    arrived,
    stride,
    rows,
    width,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_WIDE: tl.constexpr,
    MOST: tl.constexpr,
    BEST_WIDE: tl.constexpr,
    TAKE: tl.constexpr,
    RECORD: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE tokens (axis 0) of one row (axis 1), if it asked."""
    follow(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(words + row * RECORD + _ASKED) == 0:
        return
    line = raw + row * stride
    token = split * TAKE + tl.arange(0, TAKE)
    live = token < VOCAB
    x = tl.load(line + token, mask=live, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    shift = tl.where(peak > float("-inf"), peak, 0.0)
    tl.store(peaks + row * SPLITS + split, peak)
    tl.store(sums + row * SPLITS + split, tl.sum(tl.exp(x - shift), 0))
    key = ordered(x)
    keys += row * SPLITS * MOST
    ids += row * SPLITS * MOST
    for i in range(width):
        best, place = first_best(key, token)
        tl.store(keys + split * width + i, best)
        tl.store(ids + split * width + i, place)
        key = tl.where(token == place, _TAKEN, key)

    if is_last(arrived, row, SPLITS):
        norm = _norm(peaks + row * SPLITS, sums + row * SPLITS, SPLITS, SPLITS_WIDE)
        chosen = tl.load(line + tl.load(tokens + row)).to(tl.float32)
        tl.store(told + row, (chosen - norm).to(tl.float64))
        values = told + rows + row * width
        _put_best(keys, ids, SPLITS, width, norm, values, values + rows * width, BEST_WIDE)


def tell(
    raw: Tensor,
    tokens: Tensor,
    meta: SampleMeta,
    vocab: int,
    width: int,
    told: Tensor,
    scratch: TellScratch,
    tile: TellTile,
) -> None:
    """As `sample_reference.tell`; at most MOST alternatives."""
    splits = triton.cdiv(vocab, tile.take)
    wide = scratch.peaks.shape[1]  # of the widest rows: sums are added in one order whoever draws
    pdl = backend.dependent_launch(raw.device)
    launch(
        _tell,
        (splits, meta.num_rows),
        raw,
        meta.words,
        tokens,
        told,
        scratch.peaks,
        scratch.sums,
        scratch.keys,
        scratch.ids,
        scratch.arrived,
        raw.stride(0),
        meta.num_rows,
        width,
        VOCAB=vocab,
        SPLITS=splits,
        SPLITS_WIDE=triton.next_power_of_2(wide),
        MOST=MOST,
        BEST_WIDE=triton.next_power_of_2(splits * MOST),
        TAKE=tile.take,
        RECORD=RECORD,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
