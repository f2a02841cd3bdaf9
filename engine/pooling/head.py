"""Hidden states → class logits, and logits → scores.

Goes in: hidden states, which rows are whose, and what an adapter has of a head of its own.  Comes
out: logits in fp32.  Knows no requests.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.kernels.elementwise import activate, layer_norm
from engine.kernels.gemm import linear
from engine.kernels.lora_ends import add_head
from engine.kernels.lora_meta import LoraRows
from engine.models.head_spec import HeadSpec
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
    def logits(
        self,
        sequences: Sequence[Tensor],
        own: Mapping[str, Tensor] = NONE,
        dense: LoraRows | None = None,
    ) -> Tensor:
        """(length, hidden) of each sequence, all of them of one adapter -> (n, labels) fp32.

        `own` stands in the place of the base's parts, `dense` is a pair on the head's dense layer.
        Ask `missing` first.
        """
        parts, fixed = {**self._base, **own}, self._deterministic
        x = torch.stack([self._pool(rows) for rows in sequences])
        if self.spec.dense:
            x = self._dense(x, parts, dense)
            x = activate(x, self.spec.activation, deterministic=fixed)
        if self.spec.norm:
            bias = parts["head.norm.bias"] if self.spec.norm_bias else None
            x = layer_norm(x, parts["head.norm.weight"], bias, self._eps)
        bias = parts["score.bias"] if self.spec.score_bias else None
        return linear(x, parts["score.weight"], bias, deterministic=fixed).float()

    def _dense(self, x: Tensor, parts: Mapping[str, Tensor], pair: LoraRows | None) -> Tensor:
        weight, fixed = parts["head.dense.weight"], self._deterministic
        bias = parts["head.dense.bias"] if self.spec.dense_bias else None
        if pair is None:
            return linear(x, weight, bias, deterministic=fixed)
        y = linear(x, weight, None, deterministic=fixed).float()
        add_head(y, x, pair, deterministic=fixed)  # its gain is not the base bias's
        return (y if bias is None else y + bias).to(x.dtype)

    def _pool(self, rows: Tensor) -> Tensor:
        if self.spec.pools == "mean":
            return rows.float().mean(0).to(rows.dtype)
        return rows[0] if self.spec.pools == "cls" else rows[-1]


def scores(logits: Tensor, rule: ScoreRule) -> Tensor:
    """logits (n, labels) fp32 -> the same shape.  Sort by logits: scores may be equal where those
    are not."""
    if rule == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits, -1) if rule == "softmax" else logits
