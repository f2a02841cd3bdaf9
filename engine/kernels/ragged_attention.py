"""Attention of whole sequences that lie one behind the other, to both sides, without any cache.

Goes in: q, k, v of all rows, and where each sequence lies.  Comes out: one row for each.  No row is
padding and none sees another sequence's.  Knows nothing of layers and of requests.

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
        return max(self.lengths)

    @cached_property
    def groups(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Length -> first rows of the sequences that have it."""
        found: dict[int, list[int]] = {}
        for start, length in zip(self.starts, self.lengths, strict=False):
            found.setdefault(length, []).append(start)
        return tuple((length, tuple(starts)) for length, starts in sorted(found.items()))


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
    if q.is_cuda and q.dtype in _HALF and q.shape[-1] <= _LARGEST_HEAD and not deterministic:
        return _on_card(q, k, v, ragged, scale, window)
    out = torch.empty_like(q)
    for length, starts in ragged.groups:
        for some in [(start,) for start in starts] if deterministic else [starts]:
            rows = _rows(some, length, q.device)
            shape = len(some), length, *q.shape[1:]
            parts = (x[rows].view(shape).transpose(1, 2) for x in (q, k, v))
            done = _equal_lengths(*parts, scale=scale, window=window)
            out[rows] = done.transpose(1, 2).reshape(-1, *q.shape[1:])
    return out


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
