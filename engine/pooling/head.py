"""Hidden states → class logits, and logits → scores.

Goes in: hidden states, which rows are whose, and what an adapter has of a head of its own.  Comes
out: logits in fp32.  Knows no requests.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.kernels.elementwise import activate, layer_norm
from engine.kernels.gemm import linear
from engine.models.encoder_families import HeadSpec
from engine.pooling.spec import ScoreRule

NONE: Mapping[str, Tensor] = {}


class Head:
    """The base's head, in whose place any part of an adapter's may stand."""

    def __init__(
        self, spec: HeadSpec, base: Mapping[str, Tensor], *, eps: float, deterministic: bool = False
    ) -> None:
        self.spec = spec
        self._base = base
        self._eps = eps
        self._deterministic = deterministic

    def missing(self, own: Sequence[str] = ()) -> str:
        """Which part of a whole head neither the base nor `own` has, or ""."""
        there = {*self._base, *own}
        return next((part for part in self.spec.parts if part not in there), "")

    @torch.no_grad()
    def logits(self, rows: Sequence[Tensor], own: Mapping[str, Tensor] = NONE) -> Tensor:
        """rows: (length, hidden) of each sequence, all of them of one head -> (n, labels) fp32.

        Ask `missing` first.
        """
        parts, fixed = {**self._base, **own}, self._deterministic
        x = torch.stack([self._pool(one) for one in rows])
        bias = parts["head.dense.bias"] if self.spec.dense_bias else None
        x = linear(x, parts["head.dense.weight"], bias, deterministic=fixed)
        x = activate(x, self.spec.activation, deterministic=fixed)
        if self.spec.norm:
            bias = parts["head.norm.bias"] if self.spec.norm_bias else None
            x = layer_norm(x, parts["head.norm.weight"], bias, self._eps)
        return linear(x, parts["score.weight"], parts["score.bias"], deterministic=fixed).float()

    def _pool(self, rows: Tensor) -> Tensor:
        return rows[0] if self.spec.pools == "cls" else rows.float().mean(0).to(rows.dtype)


def scores(logits: Tensor, rule: ScoreRule) -> Tensor:
    """logits (n, labels) fp32 -> the same shape.  Sort by logits: scores may be equal where those
    are not."""
    if rule == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits, -1) if rule == "softmax" else logits
