"""The draw of filtered rows on a card: top-k, top-p and min-p without a sort, in one launch.

Goes in: logits (rows, width), a SampleMeta.  Comes out: a token for each filtered row, as
`sample_reference.draw` has it.  One program a row:

1. survey: the largest logit, their mean and spread.
2. narrow: a pivot over which lie at most KEEP logits that are sure to hold all that the filters
   leave.  The first guess is the spread's and usually good; then by halves, a few times.
3. those are listed in memory that stays near, by ascending id; the rest works on the list.  Where
   no pivot was found (a flat distribution, a large k) it works on the whole row, only slower.
4. search: the k-th largest, then where top-p is spent, by halving an interval of ordered bits: a
   dozen passes each as a rule, and at most 48, whatever the values.
5. race: noise for what is left, and for nothing else.
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
from engine.kernels.sample_meta import NOT_FINITE, NOTHING_LEFT, RECORD, Field, Kind, SampleMeta
from engine.kernels.sample_parts import first_best, gumbel, load_float, write_token
from engine.kernels.sample_search import bound_of_filters, load_part, weigh_above

_KIND, _HEAT, _KEY_LOW, _KEY_HIGH, _TOP_K, _TOP_P, _FLOOR = (
    tl.constexpr(int(f))
    for f in (
        Field.KIND,
        Field.HEAT,
        Field.KEY_LOW,
        Field.KEY_HIGH,
        Field.TOP_K,
        Field.TOP_P,
        Field.FLOOR,
    )
)
_FILTERED = tl.constexpr(int(Kind.FILTERED))
_NOTHING_LEFT, _NOT_FINITE = tl.constexpr(NOTHING_LEFT), tl.constexpr(NOT_FINITE)
#: How often a pivot is tried.
_TRIES = tl.constexpr(5)


@dataclass(frozen=True, slots=True)
class FilterTile:
    """`take` logits at a time of a row, `keep` at most in its list (a power of two each)."""

    take: int = 8192
    keep: int = 4096
    warps: int = 32


class FilterScratch:
    """The rows' lists.  Used by one draw at a time."""

    def __init__(self, rows: int, tile: FilterTile, device: torch.device) -> None:
        self.rows = rows
        self.values = torch.empty(rows, tile.keep, dtype=torch.float32, device=device)
        self.ids = torch.empty(rows, tile.keep, dtype=torch.int32, device=device)


@triton.jit
def _survey(values, count, TAKE: tl.constexpr):
    """The largest, mean and standard deviation, and whether any is NaN or +inf.

    What some models put for -inf does not count into the deviation.
    """
    largest = tl.full([TAKE], float("-inf"), tl.float32)
    number = tl.zeros([TAKE], tl.float32)
    total = tl.zeros([TAKE], tl.float32)
    squares = tl.zeros([TAKE], tl.float32)
    wrong = tl.zeros([TAKE], tl.int32)
    for start in range(0, count, TAKE):
        _, x = load_part(values, start, count, TAKE)
        fine = x < float("inf")  # not NaN either
        wrong |= fine.to(tl.int32) ^ 1
        largest = tl.where(fine & (x > largest), x, largest)
        there = fine & (tl.abs(x) < 1e15)
        x = tl.where(there, x, 0.0)
        number += there.to(tl.float32)
        total += x
        squares += x * x
    n = tl.maximum(tl.sum(number, 0), 1.0)
    mean = tl.sum(total, 0) / n
    spread = tl.sqrt(tl.maximum(tl.sum(squares, 0) / n - mean * mean, 0.0))
    return tl.max(largest, 0), mean, spread, tl.max(wrong, 0)


@triton.jit
def _race(
    values,
    ids,
    count,
    bound,
    place,
    floor,
    heat,
    low,
    high,
    LISTED: tl.constexpr,
    CARD: tl.constexpr,
    TAKE: tl.constexpr,
):
    """The winner among what is left; a list has its ids beside it, a row is in their order."""
    best = tl.full([TAKE], float("-inf"), tl.float32)
    winner = tl.zeros([TAKE], tl.int32)
    for start in range(0, count, TAKE):
        at, x = load_part(values, start, count, TAKE)
        left = (x > bound) | ((x == bound) & (at <= place))
        left = left & (x >= floor) & (x > float("-inf"))
        if tl.max(left.to(tl.int32), 0) > 0:
            token = at
            if LISTED:
                token = tl.load(ids + at, mask=left, other=0)
            score = tl.where(left, x * heat + gumbel(token, low, high, CARD), float("-inf"))
            better = score > best
            best = tl.where(better, score, best)
            winner = tl.where(better, token, winner)
    top, token = first_best(best, winner)
    return tl.where(top > float("-inf"), token, _NOTHING_LEFT)


@triton.jit
def _draw(
    record,
    values,
    ids,
    count,
    limited,
    peak,
    total,
    LISTED: tl.constexpr,
    CARD: tl.constexpr,
    TAKE: tl.constexpr,
):
    """What the filters of `record` leave of a list, and who wins among it."""
    heat = load_float(record + _HEAT)
    top_k, top_p = tl.load(record + _TOP_K), load_float(record + _TOP_P)
    bound, place = bound_of_filters(values, count, limited, top_k, top_p, peak, heat, total, TAKE)
    floor = peak + load_float(record + _FLOOR)
    low, high = tl.load(record + _KEY_LOW), tl.load(record + _KEY_HIGH)
    return _race(values, ids, count, bound, place, floor, heat, low, high, LISTED, CARD, TAKE)


@triton.jit
def _narrow(
    values,
    count,
    limited,
    top_k,
    weight,
    peak,
    mean,
    spread,
    heat,
    KEEP: tl.constexpr,
    TAKE: tl.constexpr,
):
    """A pivot over which lie at most KEEP values that hold all that is left, and whether it is.

    With a k, the k largest are enough: top-p is spent among them.  Else so much `weight` is.
    """
    low, high, found, tries = mean, peak, 0, 0
    pivot = mean + 2.5 * spread
    pivot = tl.where(pivot < peak, pivot, 0.5 * (mean + peak))
    while (tries < _TRIES) & (found == 0):
        number, over = weigh_above(values, count, pivot, peak, heat, True, TAKE)
        few = number <= KEEP
        enough = tl.where(limited, number >= top_k, over >= weight)
        found = (few & enough).to(tl.int32)
        low = tl.where(few, low, pivot)
        high = tl.where(few, pivot, high)
        pivot = tl.where(found > 0, pivot, 0.5 * (low + high))
        tries = tl.where(few | enough, tries + 1, _TRIES)  # too many are too little: there is none
    return pivot, found


@triton.jit
def _list(values, count, pivot, kept, ids, TAKE: tl.constexpr):
    """Write the values over `pivot` and their places, in order; returns how many they are."""
    number = 0
    for start in range(0, count, TAKE):
        at, x = load_part(values, start, count, TAKE)
        over = x > pivot
        one = over.to(tl.int32)
        to = number + tl.cumsum(one, 0) - one
        tl.store(kept + to, x, mask=over)
        tl.store(ids + to, at, mask=over)
        number += tl.sum(one, 0)
    tl.debug_barrier()  # every thread reads what all have written
    return number


@triton.jit(do_not_specialize_on_alignment=["tokens", "told"])
def _filtered(
    logits,
    words,
    tokens,
    told,
    kept,
    ids,
    stride,
    VOCAB: tl.constexpr,
    RECORD: tl.constexpr,
    KEEP: tl.constexpr,
    TAKE: tl.constexpr,
    CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, if it is filtered."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    record = words + row * RECORD
    if tl.load(record + _KIND) != _FILTERED:
        return
    line = logits + row * stride
    kept += row * KEEP
    ids += row * KEEP
    peak, mean, spread, wrong = _survey(line, VOCAB, TAKE)
    if (wrong > 0) | (peak == float("-inf")):
        write_token(tokens, told, row, tl.where(wrong > 0, _NOT_FINITE, _NOTHING_LEFT))
        return
    heat = load_float(record + _HEAT)
    top_k, top_p = tl.load(record + _TOP_K), load_float(record + _TOP_P)
    limited, spends = top_k < VOCAB, top_p < 1.0
    total = tl.full([], 0.0, tl.float32)
    if spends & (top_k >= VOCAB):
        _, total = weigh_above(line, VOCAB, float("-inf"), peak, heat, True, TAKE)
    pivot, found = peak, 0
    if (VOCAB > KEEP) & ((top_k <= KEEP) | (spends & (top_k >= VOCAB))):
        weight = top_p * total
        pivot, found = _narrow(
            line, VOCAB, limited, top_k, weight, peak, mean, spread, heat, KEEP, TAKE
        )
    if found > 0:
        number = _list(line, VOCAB, pivot, kept, ids, TAKE)
        token = _draw(record, kept, ids, number, limited, peak, total, True, CARD, KEEP)
    else:
        token = _draw(record, line, ids, VOCAB, limited, peak, total, False, CARD, TAKE)
    write_token(tokens, told, row, token)


def filtered(
    logits: Tensor,
    meta: SampleMeta,
    vocab: int,
    tokens: Tensor,
    told: Tensor,
    scratch: FilterScratch,
    tile: FilterTile,
) -> None:
    """Put a token into tokens (rows,) int64 and told (rows,) fp64 for each filtered row."""
    pdl = backend.dependent_launch(logits.device)
    launch(
        _filtered,
        (meta.num_rows,),
        logits,
        meta.words,
        tokens,
        told,
        scratch.values,
        scratch.ids,
        logits.stride(0),
        VOCAB=vocab,
        RECORD=RECORD,
        KEEP=tile.keep,
        TAKE=tile.take,
        CARD=logits.is_cuda,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
