"""The draw of rows without a filter on a card: greedy and plain ones, in one launch.

Goes in: logits (rows, width), a SampleMeta.  Comes out: a token for each row that is not filtered,
as `sample_reference.draw` has it.  A row is split over several programs; the last one to end
compares what they found, so that a row's token depends on no order.
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
from engine.kernels.sample_parts import first_best, gumbel, is_last, load_float, write_token

_KIND, _HEAT, _KEY_LOW, _KEY_HIGH = (
    tl.constexpr(int(f)) for f in (Field.KIND, Field.HEAT, Field.KEY_LOW, Field.KEY_HIGH)
)
_PLAIN, _FILTERED = tl.constexpr(int(Kind.PLAIN)), tl.constexpr(int(Kind.FILTERED))
_NOTHING_LEFT, _NOT_FINITE = tl.constexpr(NOTHING_LEFT), tl.constexpr(NOT_FINITE)


@dataclass(frozen=True, slots=True)
class RaceTile:
    """Tokens and warps of a program."""

    take: int = 4096
    warps: int = 8


class RaceScratch:
    """What a row's programs leave for the last one.  Used by one draw at a time."""

    def __init__(self, rows: int, splits: int, device: torch.device) -> None:
        self.rows = rows
        self.scores = torch.empty(rows, splits, dtype=torch.float32, device=device)
        self.places = torch.empty(rows, splits, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)


@triton.jit
def _winner(scores, places, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """The best of what a row's programs found, or what was wrong with it."""
    at = tl.arange(0, WIDTH)
    there = at < SPLITS
    score = tl.load(scores + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    place = tl.load(places + at, mask=there, other=_NOTHING_LEFT, cache_modifier=".cg")
    best, winner = first_best(tl.where(place >= 0, score, float("-inf")), place)
    winner = tl.where(best > float("-inf"), winner, _NOTHING_LEFT)
    return tl.where(tl.min(place, 0) == _NOT_FINITE, _NOT_FINITE, winner)


@triton.jit(do_not_specialize_on_alignment=["tokens", "told"])
def _race(
    logits,
    words,
    tokens,
    told,
    scores,
    places,
    arrived,
    stride,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAKE: tl.constexpr,
    RECORD: tl.constexpr,
    HOT: tl.constexpr,
    CARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE tokens (axis 0) of one row (axis 1)."""
    follow(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    record = words + row * RECORD
    if HOT:  # noqa: SIM102  # one is known when compiled, the other when run
        if tl.load(record + _KIND) == _FILTERED:
            return
    token = split * TAKE + tl.arange(0, TAKE)
    x = tl.load(logits + row * stride + token, mask=token < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    score = x
    if HOT:  # noqa: SIM102
        if tl.load(record + _KIND) == _PLAIN:
            low, high = tl.load(record + _KEY_LOW), tl.load(record + _KEY_HIGH)
            score = x * load_float(record + _HEAT) + gumbel(token, low, high, CARD)
    best, place = first_best(score, token)
    place = tl.where(best > float("-inf"), place, _NOTHING_LEFT)
    wrong = tl.max((x < float("inf")).to(tl.int32) ^ 1, 0)
    tl.store(scores + row * SPLITS + split, best)
    tl.store(places + row * SPLITS + split, tl.where(wrong > 0, _NOT_FINITE, place))
    if is_last(arrived, row, SPLITS):
        winner = _winner(scores + row * SPLITS, places + row * SPLITS, SPLITS, WIDTH)
        write_token(tokens, told, row, winner)


def race(
    logits: Tensor,
    meta: SampleMeta,
    vocab: int,
    tokens: Tensor,
    told: Tensor,
    scratch: RaceScratch,
    tile: RaceTile,
) -> None:
    """Put a token into tokens (rows,) int64 and told (rows,) fp64 for each row without a filter."""
    splits = triton.cdiv(vocab, tile.take)
    hot, pdl = meta.num_hot > 0, backend.dependent_launch(logits.device)
    launch(
        _race,
        (splits, meta.num_rows),
        logits,
        meta.words if hot else logits,
        tokens,
        told,
        scratch.scores,
        scratch.places,
        scratch.arrived,
        logits.stride(0),
        VOCAB=vocab,
        SPLITS=splits,
        WIDTH=triton.next_power_of_2(splits),
        TAKE=tile.take,
        RECORD=RECORD,
        HOT=hot,
        CARD=logits.is_cuda,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
