"""What is kept of an input whose hidden states come in chunks, step by step.

Goes in: rows in order.  Comes out: what `Pooler.pool` makes of all of them at once, but for the
order of a sum.  Every kind of pooling reads a row once, and no row hangs on one behind it, so that
sums, a maximum and single rows are all there is to keep.  Knows no requests.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.pooling.spec import PoolingKind


class PooledSoFar:
    """Of one input of `length` rows, of which the first `left_out` are not looked at."""

    def __init__(self, kinds: Sequence[PoolingKind], length: int, left_out: int) -> None:
        self._kinds, self._length, self._left_out = tuple(kinds), length, left_out
        self._kept: dict[PoolingKind, Tensor] = {}

    def add(self, rows: Tensor, start: int) -> None:
        """Rows (n, hidden) from place `start` on; they may be overwritten afterwards."""
        first = max(self._left_out - start, 0)
        seen, start = rows[first:].float(), start + first
        if not len(seen):
            return
        for kind in self._kinds:
            now, kept = self._of(kind, seen, start), self._kept.get(kind)
            if kept is None:
                self._kept[kind] = now.clone()
            elif kind == "max":
                torch.maximum(kept, now, out=kept)
            elif kind == "last":
                kept.copy_(now)
            elif kind != "cls":
                kept += now

    def vector(self) -> Tensor:
        """(width of all kinds,) fp32, of all rows."""
        return torch.cat([self._kept[kind] / self._divisor(kind) for kind in self._kinds])

    def _of(self, kind: PoolingKind, rows: Tensor, start: int) -> Tensor:
        """What some rows (n, hidden) say, (hidden,)."""
        if kind in ("cls", "last"):
            return rows[0 if kind == "cls" else -1]
        if kind == "max":
            return rows.amax(0)
        if kind == "weighted_mean":
            end = start + len(rows)
            places = torch.arange(start + 1, end + 1, device=rows.device, dtype=rows.dtype)
            rows = rows * places[:, None]
        return rows.sum(0)

    def _divisor(self, kind: PoolingKind) -> float:
        count = self._length - self._left_out
        if kind == "mean":
            return float(count)
        if kind == "mean_sqrt_length":
            return math.sqrt(count)
        if kind == "weighted_mean":  # the sum of the places
            return (self._left_out + 1 + self._length) * count / 2
        return 1.0


class TokensSoFar:
    """Every row, on the host."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor, start: int) -> None:
        """Rows (n, hidden); they may be overwritten afterwards."""
        self._rows.append(rows.clone())

    def vector(self) -> Tensor:
        """(tokens, hidden)."""
        return torch.cat(self._rows)
