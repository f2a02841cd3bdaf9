"""Hidden states → vectors, as a PoolingSpec says.

Goes in: hidden states of whole sequences.  Comes out: one vector each, in fp32.  Knows no requests
and no adapters.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import FETCH_AGAIN, ModelUnsupported
from engine.kernels.elementwise import activate
from engine.kernels.gemm import linear
from engine.models import weights
from engine.pooling.spec import DenseSpec, PoolingKind, PoolingSpec

Spans = NDArray[np.integer[Any]]


class Dense:
    """One of the spec's linear maps, with its weights."""

    def __init__(self, spec: DenseSpec, folder: Path, device: torch.device) -> None:
        self.activation = spec.activation
        self.weight = torch.empty(spec.d_out, spec.d_in, device=device)
        self.bias = torch.empty(spec.d_out, device=device) if spec.bias else None
        places = {"linear.weight": self.weight}
        if self.bias is not None:
            places["linear.bias"] = self.bias
        weights.load(places, folder / spec.folder, ignored=lambda name: spec.among)

    def __call__(self, x: Tensor, *, deterministic: bool) -> Tensor:
        """x (n, d_in) fp32 -> (n, d_out) fp32."""
        y = linear(x, self.weight, self.bias, deterministic=deterministic)
        return activate(y, self.activation, deterministic=deterministic)


class Pooler:
    """Pools, and takes the steps behind it.  `folder` is the model's; raises ConfigError or
    ModelUnsupported for weights that are missing or do not fit."""

    def __init__(
        self,
        spec: PoolingSpec,
        folder: Path,
        *,
        hidden_size: int,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
    ) -> None:
        self.spec = spec
        self.deterministic = deterministic
        self.width = hidden_size if spec.late else len(spec.kinds) * hidden_size
        self._steps: list[Dense | None] = []  # None = normalize
        for step in spec.steps:
            if step == "normalize":
                self._steps.append(None)
                continue
            assert isinstance(step, DenseSpec)
            if step.d_in != self.width:
                raise ModelUnsupported(
                    f"{step.folder} takes {step.d_in} numbers, what is ahead gives {self.width}",
                    hint=FETCH_AGAIN,
                )
            self._steps.append(Dense(step, folder, torch.device(device)))
            self.width = step.d_out

    @torch.no_grad()
    def pool(self, sequences: Sequence[Tensor], prompts: Sequence[int] = ()) -> Tensor:
        """(length, hidden) of each sequence -> (sequences, width of all kinds) fp32.

        `prompts` has the number of tokens of each sequence's prompt, () = none has one: where the
        spec leaves prompts out, so many of its first rows are not looked at.
        """
        pooled = []
        for i, hidden in enumerate(sequences):
            left_out = prompts[i] if prompts and not self.spec.include_prompt else 0
            rows = hidden if ONE_ROW.issuperset(self.spec.kinds) else hidden.float()
            parts = [POOLS[kind](rows, left_out).float() for kind in self.spec.kinds]
            pooled.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return torch.stack(pooled)

    @torch.no_grad()
    def pool_spans(self, hidden: Tensor, spans: Tensor) -> Tensor:
        """hidden (T, hidden) on a card -> the same, of all sequences in one launch for each kind.

        `spans` (sequences, 3) int32 are the columns of `spans_of`, on the card.
        """
        from engine.kernels.pool_rows import pool_rows

        kinds, width = self.spec.kinds, hidden.shape[1]
        out = torch.empty(len(spans), len(kinds) * width, device=hidden.device)
        for kind, part in zip(kinds, torch.split(out, width, dim=1), strict=True):
            pool_rows(hidden, spans, kind, part)
        return out

    def spans_of(self, starts: Spans, lengths: Spans, prompts: Spans) -> Spans:
        """(sequences, 3) int32: where each begins, its first row that is looked at, its end."""
        left_out = np.zeros_like(prompts) if self.spec.include_prompt else prompts
        return np.stack([starts, starts + left_out, starts + lengths], axis=1).astype(np.int32)

    @torch.no_grad()
    def finish(
        self, x: Tensor, *, normalize: bool | None = None, dimensions: int | None = None
    ) -> Tensor:
        """x (n, width of all kinds) fp32 -> what is told, (n, dimensions or all).  Of late
        interaction x (tokens, hidden).

        `normalize` None: as the model does it; False leaves its last step out.  What is cut to
        `dimensions` is normed anew where the whole was.
        """
        unit = self.spec.normalizes if normalize is None else normalize
        steps = self._steps[:-1] if self.spec.normalizes and not unit else self._steps
        for step in steps:
            x = unit_length(x) if step is None else step(x, deterministic=self.deterministic)
        if dimensions is not None:
            x = x[:, :dimensions]
        return unit_length(x) if unit else x


def unit_length(x: Tensor) -> Tensor:
    """Rows of x (n, width) by their length; one of zeros stays so."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.div(x, length.clamp_min(1e-12))


def _first(rows: Tensor, left_out: int) -> Tensor:
    return rows[left_out]


def _last(rows: Tensor, left_out: int) -> Tensor:
    return rows[-1]


def _mean(rows: Tensor, left_out: int) -> Tensor:
    return rows[left_out:].sum(0) / (len(rows) - left_out)


def _mean_sqrt_length(rows: Tensor, left_out: int) -> Tensor:
    return rows[left_out:].sum(0) / math.sqrt(len(rows) - left_out)


def _weighted_mean(rows: Tensor, left_out: int) -> Tensor:
    """Places are counted from the text's begin, the prompt's among them."""
    places = torch.arange(left_out + 1, len(rows) + 1, device=rows.device, dtype=rows.dtype)
    return torch.div((rows[left_out:] * places[:, None]).sum(0), places.sum())


def _max(rows: Tensor, left_out: int) -> Tensor:
    return rows[left_out:].amax(0)


#: Of long inputs the other rows need not be widened first.
ONE_ROW: frozenset[PoolingKind] = frozenset(("cls", "last"))
#: kind -> rows (n, width) of one sequence and how many are left out -> (width,)
POOLS: dict[PoolingKind, Callable[[Tensor, int], Tensor]] = {
    "cls": _first,
    "last": _last,
    "mean": _mean,
    "mean_sqrt_length": _mean_sqrt_length,
    "weighted_mean": _weighted_mean,
    "max": _max,
}
