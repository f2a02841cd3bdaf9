"""The draw in plain torch: how a card draws too, and what the CPU runs.

Goes in: raw logits (rows, width) in fp32, of which the first `vocab` columns are tokens, and a
SampleMeta.  Comes out: a token a row.  Where rows have limits of their own, each is drawn and told
from its own columns alone, so that its bits are those that it has without the others.

`change` first: penalties, bias and bans, then the allowed tokens.  A row is then an exponential
race: token i arrives at E_i / p_i, where E_i is exponential noise, and the first one wins, which
is a draw from p.  The noise is a hash of (the row's key, i) in integers, the same on any device;
nothing is summed, so no order matters; tokens that a filter leaves out do not run.  In logarithms:
the largest of logit / temperature + gumbel.  Greedy rows run without noise.  The lowest id wins a
tie.

What top-k, top-p and min-p leave is a prefix of the tokens by (logit down, id up): at most k; those
before which less than top_p of what top-k left is spent; those with p_i >= min_p * p_best.

Rows are drawn one by one: torch's vector code would let a value's bits depend on where it lies.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.sample_meta import (
    NOT_FINITE,
    NOTHING_LEFT,
    Field,
    Kind,
    SampleMeta,
)

#: How many of the largest logits are tried first for top-p.
SORTED = 1024
#: -ln 2^-32: no exponential noise is beyond it.
LARGEST = 22.18070977791825


class ReferenceOps:
    """Draws by torch, on the device of the logits.  `DeviceOps` has the same methods."""

    def __init__(self, vocab: int, width: int = 0) -> None:
        """Rows have `vocab` columns, or `width` at the most where some have a limit of their own;
        0 = `vocab`, whatever anybody asks for."""
        self._vocab, self._width = vocab, max(vocab, width)

    def close(self, logits: Tensor, meta: SampleMeta) -> None:
        """Put -inf where a row's ids end, up to `width`, if some row has a limit of its own."""
        if meta.least:
            close(logits[:, : self._width], meta)

    def draw(self, logits: Tensor, meta: SampleMeta, tokens: Tensor, told: Tensor) -> None:
        """Change logits (rows, width) in place as `meta` says, and draw a token a row.

        tokens (rows,) int64 receives ids that exist, told (rows,) fp64 NOTHING_LEFT and NOT_FINITE
        too.
        """
        vocab = self._columns(meta)
        change(logits, meta, vocab)
        drawn = draw(logits, meta, vocab)
        told.copy_(drawn)
        tokens.copy_(drawn.clamp(min=0))

    def tell(self, raw: Tensor, tokens: Tensor, meta: SampleMeta, width: int, told: Tensor) -> None:
        """What `tell` says, for this vocabulary."""
        tell(raw, tokens, meta, self._columns(meta), width, told)

    def _columns(self, meta: SampleMeta) -> int:
        return self._width if meta.least else self._vocab


# ----------------------------------------------------------------- changes to the logits
def close(logits: Tensor, meta: SampleMeta) -> None:
    """-inf in every column of logits (rows, width) that is no id of the row's."""
    columns = torch.arange(meta.least, logits.shape[1], device=logits.device)
    beyond = columns >= meta.ints(Field.LIMIT)[:, None]
    logits[:, meta.least :].masked_fill_(beyond, -torch.inf)


def change(logits: Tensor, meta: SampleMeta, vocab: int) -> None:
    """Apply entries and masks in place."""
    if meta.num_entries:
        _change_entries(logits, meta)
    if meta.num_masked:
        for row, start in enumerate(meta.ints(Field.MASK).tolist()):
            if start:
                words = meta.words[start : start + -(-vocab // 32)]
                logits[row, :vocab].masked_fill_(~_unpack(words)[:vocab], -torch.inf)


def _change_entries(logits: Tensor, meta: SampleMeta) -> None:
    """Repetition counts prompt and output (as transformers does), the others output alone."""
    row = torch.repeat_interleave(meta.ints(Field.COUNT))
    repetition, frequency, presence = (
        meta.floats(field)[row] for field in (Field.REPETITION, Field.FREQUENCY, Field.PRESENCE)
    )
    ids, counts, biases = meta.entries()
    x = logits[row, ids]
    x = torch.where(counts >= 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - counts.clamp(min=0) * frequency
    x = x - torch.where(counts > 0, presence, 0.0)
    logits[row, ids] = x + biases


def _unpack(words: Tensor) -> Tensor:
    """Bits of int32 words, the lowest first."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[:, None] >> places & 1).view(-1).bool()


# ----------------------------------------------------------------- the draw
def draw(logits: Tensor, meta: SampleMeta, vocab: int) -> Tensor:
    """(rows,) int64: a token a row, or NOTHING_LEFT, or NOT_FINITE."""
    x = logits[:, :vocab]
    peaks, tokens = x.amax(-1), x.argmax(-1)
    tokens.masked_fill_(peaks == -torch.inf, NOTHING_LEFT)
    tokens.masked_fill_(~(peaks < torch.inf), NOT_FINITE)
    if meta.num_hot:
        peak, drawn = peaks.tolist(), tokens.tolist()
        limits = _limits(meta, vocab)
        for row, wish in enumerate(wishes(meta)):
            if wish.kind != Kind.GREEDY and drawn[row] >= 0:
                tokens[row] = _race(x[row, : limits[row]], peak[row], wish)
    return tokens


@dataclass(frozen=True, slots=True)
class Wish:
    """How one row is drawn."""

    kind: int
    low: int
    high: int
    heat: float
    top_k: int
    top_p: float
    floor: float


def wishes(meta: SampleMeta) -> Iterator[Wish]:
    """The records' fields of that name, row by row."""
    ints = (meta.ints(f).tolist() for f in (Field.KIND, Field.KEY_LOW, Field.KEY_HIGH))
    top_k = meta.ints(Field.TOP_K).tolist()
    heat, top_p, floor = (meta.floats(f).tolist() for f in (Field.HEAT, Field.TOP_P, Field.FLOOR))
    return map(Wish, *ints, heat, top_k, top_p, floor)


def _race(x: Tensor, peak: float, wish: Wish) -> Tensor:
    """The winner of one row x (vocab,); its largest is `peak`."""
    if wish.kind == Kind.FILTERED:
        ids = left_by_filters(x, peak, wish)
        return ids[(x[ids] * wish.heat + gumbel(ids, wish.low, wish.high)).argmax()]
    noise = gumbel(torch.arange(len(x), device=x.device), wish.low, wish.high)
    return (x * wish.heat + noise).argmax()


def left_by_filters(x: Tensor, peak: float, wish: Wish) -> Tensor:
    """The tokens of one row x (vocab,) that its filters leave, by ascending id.  Sums are in fp64.

    Sorted are only as many of the largest as surely hold them: 49,152 logits take 12 ms.
    """
    weights = torch.exp((x - peak) * wish.heat)
    total = weights.sum(dtype=torch.float64)
    if wish.top_k < len(x):
        ids = _largest(x, wish.top_k)[: wish.top_k]
        total = weights[ids].sum(dtype=torch.float64)
    elif wish.top_p < 1.0:
        size = SORTED
        ids = _largest(x, size)
        while len(ids) < len(x) and weights[ids].sum(dtype=torch.float64) < wish.top_p * total:
            size *= 8
            ids = _largest(x, size)
    else:
        ids = torch.arange(len(x), device=x.device)
    floor = torch.tensor(peak, dtype=x.dtype) + wish.floor
    left = (x[ids] >= floor) & (x[ids] > -torch.inf)
    if wish.top_p < 1.0:  # exactly all of it from 1 on, whatever the rounding of the sum
        spent = weights[ids].cumsum(0, dtype=torch.float64) - weights[ids]  # before each token
        left &= spent < wish.top_p * total
    return ids[left].sort().values


def _largest(x: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest and of all that equal the last, by (value down, id up)."""
    ids = torch.arange(len(x), device=x.device)
    if count < len(x):
        [ids] = torch.nonzero(x >= x.topk(count).values[-1], as_tuple=True)
    return ids[torch.sort(x[ids], descending=True, stable=True).indices]


# ----------------------------------------------------------------- noise
def gumbel(ids: Tensor, low: int, high: int) -> Tensor:
    """-ln E (n,) fp32 of tokens ids (n,) under a key of two int32 words; E is exponential noise.

    E = -ln(1 - u) for u of 31 bits, the small ones, which decide a race, to their last digit.
    """
    bits = _mix(ids.int() ^ low)
    bits = _mix(bits.bitwise_xor_(high))
    u = _right(bits, 1).float().add_(0.5).mul_(2.0**-31)
    exponential = u.neg_().log1p_().neg_().clamp_(max=LARGEST)
    return exponential.log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Every bit of int32 x depends on every other: two rounds of multiply and fold, in place."""
    x.bitwise_xor_(_right(x, 16)).mul_(0x7FEB352D)
    x.bitwise_xor_(_right(x, 15)).mul_(0x846CA68B - (1 << 32))
    return x.bitwise_xor_(_right(x, 16))


def _right(x: Tensor, places: int) -> Tensor:
    """Shift int32 bits to the right, zeros coming in."""
    return (x >> places).bitwise_and_((1 << 32 - places) - 1)


# ----------------------------------------------------------------- telling
def tell(
    raw: Tensor, tokens: Tensor, meta: SampleMeta, vocab: int, width: int, told: Tensor
) -> None:
    """Log-probabilities of `tokens` (rows,), and the `width` best, for the rows that asked.

    Of the distribution over the first `vocab` columns of `raw`; equal ones by id.  told
    (rows * (1 + 2 * width),) fp64 receives, row by row: the token's, then (from `rows` on) the
    best values, then (behind all of those) the best ids.  Rows that did not ask are left alone.
    """
    limits = _limits(meta, vocab)
    each = torch.tensor(limits, device=raw.device)
    for limit in sorted(set(limits)):
        own = (meta.ints(Field.ASKED) > 0) & (each == limit)
        _tell(raw, limit, own, tokens, width, told)


def _tell(raw: Tensor, limit: int, own: Tensor, tokens: Tensor, width: int, told: Tensor) -> None:
    """The same for those rows that are marked in own (rows,), of so many columns."""
    rows = len(own)
    [asked] = torch.nonzero(own, as_tuple=True)
    x = raw[:, :limit].index_select(0, asked)
    logprobs = torch.log_softmax(x, -1)
    picked = tokens.index_select(0, asked).clamp(min=0)[:, None]
    chosen = logprobs.gather(1, picked.clamp(max=limit - 1))
    if bool((picked >= limit).any()):  # a prompt's, of the padding: told beside those, as it is
        beside = raw.index_select(0, asked).gather(1, picked) - x.logsumexp(-1, keepdim=True)
        chosen = torch.where(picked < limit, chosen, beside)
    told[:rows].index_copy_(0, asked, chosen[:, 0].double())
    if width:
        ids = _best(x, width)
        best = told[rows:].view(2, rows, width)
        best[0].index_copy_(0, asked, logprobs.gather(1, ids).double())
        best[1].index_copy_(0, asked, ids.double())


def _limits(meta: SampleMeta, vocab: int) -> list[int]:
    """Of every row: its ids are below."""
    limits: list[int] = meta.ints(Field.LIMIT).tolist() if meta.least else [vocab] * meta.num_rows
    return limits


def _best(x: Tensor, width: int) -> Tensor:
    """(rows, width) int64: the largest of each row, the lowest id first where they are equal."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)  # -0.0 is 0.0
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    last = x.shape[1] - 1
    keys = (ordered.long() << 32) + last - torch.arange(last + 1, device=x.device)
    return last - (torch.topk(keys, width, dim=-1).values & 0xFFFFFFFF)
