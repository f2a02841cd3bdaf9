"""Attention of whole sequences that lie one behind the other, to both sides, without any cache.

Goes in: q, k, v of all rows, and where each sequence lies.  Comes out: one row for each.  No row is
padding and none sees another sequence's; of some sequences the last rows see the others, and none
sees them.  Knows nothing of layers and of requests.

On a card, in half precision, it is torch's kernel for sequences of different lengths, which splits
long ones by what is beside them and so is not deterministic.  Elsewhere
sequences of equal length are one product, and those with a window that is short beside them are cut
into strips, so that the work grows with the length and not with its square.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows of a strip.  It reads a window more of keys to either side.
STRIP = 256
#: torch's kernel for the card takes these alone.
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class Ragged:
    """Sequences of `lengths` rows, side by side, on `device`; each has a row at least."""

    lengths: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    uploaded: Tensor | None = None  # `on_device`, where it came with a step's other arrays
    seen: tuple[int, ...] | None = None  # of each, the first rows, which are seen; None: all are
    #: Where `on_device` alone tells of the sequences, and `lengths` of none: none has more rows.
    #: Some may have no row, and behind the last there may be rows of nobody, which get anything.
    most: int = 0

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each, and the number of all rows."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def on_device(self) -> Tensor:
        """`starts` (sequences + 1,) int32."""
        if self.uploaded is not None:
            return self.uploaded
        return torch.tensor(self.starts, dtype=torch.int32, device=self.device)

    @cached_property
    def longest(self) -> int:
        """Rows."""
        return self.most or max(self.lengths)

    @cached_property
    def groups(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Length -> first rows of the sequences that have it, and of which all rows are seen."""
        found: dict[int, list[int]] = {}
        seen = self.seen or self.lengths
        for start, length, count in zip(self.starts, self.lengths, seen, strict=False):
            if count == length:
                found.setdefault(length, []).append(start)
        return tuple((length, tuple(starts)) for length, starts in sorted(found.items()))

    @cached_property
    def half_seen(self) -> tuple[tuple[int, int, int], ...]:
        """(first row, rows, how many of them are seen) of all others."""
        places = zip(self.starts, self.lengths, self.seen or self.lengths, strict=False)
        return tuple(place for place in places if place[1] != place[2])


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ragged: Ragged,
    *,
    scale: float,
    window: int = 0,
    deterministic: bool = False,
) -> Tensor:
    """softmax(scale * q Kᵀ) V over each sequence; with `window` over rows at most so far away.

    All are (rows, heads, head_dim).  `deterministic`: a sequence's bits do not depend on others.
    """
    if not deterministic and takes_ragged(q.device, q.dtype, q.shape[-1]):
        out = _on_card(q, k, v, ragged, scale, window)
        _attend_half_seen(q, k, v, out, ragged, scale, window)  # in the place of what that gave
        return out
    assert not ragged.most, "without that kernel lengths are the host's to tell"
    out = torch.empty_like(q)
    _attend_half_seen(q, k, v, out, ragged, scale, window)
    for length, starts in ragged.groups:
        for some in [(start,) for start in starts] if deterministic else [starts]:
            rows = _rows(some, length, q.device)
            shape = len(some), length, *q.shape[1:]
            parts = (x[rows].view(shape).transpose(1, 2) for x in (q, k, v))
            done = _equal_lengths(*parts, scale=scale, window=window)
            out[rows] = done.transpose(1, 2).reshape(-1, *q.shape[1:])
    return out


def takes_ragged(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a kernel that reads on the device where sequences begin and end."""
    fits = head_dim <= _LARGEST_HEAD and head_dim % 8 == 0
    return device.type == "cuda" and dtype in _HALF and fits


def _on_card(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float, window: int) -> Tensor:
    """As torch.nn.attention.varlen calls it, whose wrapper is Python around every launch, and one
    launch more: of a small step that is longer than its attention."""
    longest, starts, side = ragged.longest, ragged.on_device, window or -1
    forward = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        0.0,  # dropout
        False,  # causal
        return_debug_mask=False,
        scale=scale,
        window_size_left=side,
        window_size_right=side,
    )[0]
    return out


def _attend_half_seen(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, ragged: Ragged, scale: float, window: int
) -> None:
    """Sequences of which not all rows are seen, one by one: they are queries that were filled up,
    which are short and few.  A row with nothing in its window that it sees gets nothing."""
    for start, length, count in ragged.half_seen:
        rows, keys = slice(start, start + length), slice(start, start + count)
        mine, key, value = (
            x[at].transpose(0, 1)[None] for x, at in ((q, rows), (k, keys), (v, keys))
        )
        near = None
        if window and length > window + 1:
            places = torch.arange(length, device=q.device)
            near = (places[:, None] - places[:count]).abs() <= window  # (rows, keys)
        done = F.scaled_dot_product_attention(mine, key, value, attn_mask=near, scale=scale)[0]
        if near is not None:
            done = done.masked_fill(~near.any(1)[:, None], 0.0)
        out[rows] = done.transpose(0, 1)


def _rows(starts: Sequence[int], length: int, device: torch.device) -> slice | Tensor:
    """Rows of sequences of one length: a view where they lie behind each other."""
    first = starts[0]
    if all(start == first + i * length for i, start in enumerate(starts)):
        return slice(first, first + len(starts) * length)
    at = torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
    return at.flatten()


def _equal_lengths(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> Tensor:
    """(sequences, heads, length, head_dim)."""
    length = q.shape[2]
    if not window or length <= window + 1:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    out = torch.empty_like(q)
    for first in range(0, length, STRIP):
        last = min(first + STRIP, length)
        near = slice(max(0, first - window), min(length, last + window))
        rows = torch.arange(first, last, device=q.device)[:, None]
        keys = torch.arange(near.start, near.stop, device=q.device)
        seen = (rows - keys).abs() <= window  # (rows, keys)
        out[:, :, first:last] = F.scaled_dot_product_attention(
            q[:, :, first:last], k[:, :, near], v[:, :, near], attn_mask=seen, scale=scale
        )
    return out
