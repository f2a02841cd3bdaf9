"""From logits to tokens, for a whole batch at once, on the device that holds the logits.

Goes in: raw logits (rows, width) in fp32 and the sequence of each row.  Comes out: one `Sampled` a
row.  A row's token depends on that row alone: its noise is a pure function of (seed, position,
token), and nothing here mixes rows, so batch mates and preemption change nothing.

`launch` puts the draw on the device's queue and returns at once: what the rows ask for goes up in
one pinned copy (none if all are plainly greedy), what was drawn comes down in another.  `finish`
waits for that one.  `sample` is both.  Between the copies there are on a card at most a launch each
for penalties with bias and bans, for allowed tokens, for rows without a filter, for rows with one
and for log-probabilities, and one copy of the raw logits if a row that tells them is changed.

Where some row's adapter has a vocabulary of its own, a row's logits are closed first from its own
limit on, in one more launch; where none has, nobody looks at columns behind the base's.

Order: penalties, bias and the ban on early ends; then allowed tokens; then temperature, top-k,
top-p of what top-k left, min-p.  Log-probabilities are those of the raw model distribution over the
tokenizer's ids, before any of the above.  A row whose logits hold NaN or +inf, or none that may be
drawn, yields no token but the end of its sequence.  Knows nothing of stop rules.
"""

import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kernels import backend
from engine.kernels.sample_meta import NOT_FINITE, NOTHING_LEFT, SampleMeta
from engine.kernels.sample_reference import ReferenceOps
from engine.messages import TokenLogprobs
from engine.sampling_plan import Mask, Planner, SamplerLimits
from engine.sequence import Doom, Sampled, Sequence
from engine.upload import Arrival, DownloadRing, Parcel

__all__ = ["Drawn", "Sampler", "SamplerLimits"]

#: A token of no vocabulary, in place of one that is not known.
NOBODYS = -1
#: Planned sizes of a step's transfers: alternatives a row, and words a row for what it asks.
#: More than that is served all the same, by a copy that waits.
MAX_TOP, WISH_WORDS = 20, 4096

DOOMS = {
    NOTHING_LEFT: Doom(
        "error",
        "invalid_value",
        "every token is ruled out by allowed_token_ids, logit_bias, min_tokens and the format that "
        "was asked for together; allow one more",
    ),
    NOT_FINITE: Doom(
        "error",
        "internal_error",
        "the model's logits are not finite: the weights of the base or of the adapter overflow; "
        "try another dtype, or check the adapter",
    ),
}


class Ops(Protocol):
    """What a device does for a draw; see `ReferenceOps`."""

    def close(self, logits: Tensor, meta: SampleMeta) -> None: ...

    def draw(self, logits: Tensor, meta: SampleMeta, tokens: Tensor, told: Tensor) -> None: ...

    def tell(
        self, raw: Tensor, tokens: Tensor, meta: SampleMeta, width: int, told: Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draw on its way: `tokens` (rows,) int64 on the device, everything else in `arrival`."""

    tokens: Tensor
    arrival: Arrival
    num_top: dict[int, int]  # row -> alternatives that it asked for
    width: int  # alternatives a row that came down


class Sampler:
    """Draws tokens.  Keeps one random number, which seeds requests without a seed.

    `max_rows` sizes what is allocated on a card, where `kernels` draw instead of those that are
    served.
    """

    def __init__(
        self,
        limits: SamplerLimits,
        *,
        device: torch.device | None = None,
        max_rows: int = 64,
        kernels: Ops | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self._vocab, self._width = limits.vocab_size, limits.width
        self._max_rows = max_rows
        self._planner = Planner(limits, secrets.token_bytes(16), max_rows)
        mask_words = -(-limits.width // 64)  # of 64 bits, as a parcel's are
        self._up = Parcel(max_rows * (WISH_WORDS + mask_words), device)
        self._down = DownloadRing(max_rows * (2 + 2 * MAX_TOP), device)
        self._reference: Ops = ReferenceOps(limits.vocab_size, limits.width)
        if kernels is None and device.type == "cuda":
            kernels = self._make_kernels(device)
        self._kernels = kernels

    def sample(self, logits: Tensor, seqs: Seq[Sequence]) -> list[Sampled]:
        """One token for each row of `logits` (rows, width), fp32, which is overwritten."""
        return self.finish(self.launch(logits, seqs))

    def launch(
        self,
        logits: Tensor,
        seqs: Seq[Sequence],
        *,
        tokens: Tensor | None = None,
        masks: Mapping[int, Mask] | None = None,
        ahead: Mapping[int, Seq[int]] | None = None,
    ) -> Drawn:
        """Start the draw of a token for each row of `logits`, which is overwritten.

        The ids go into `tokens` (rows or more,) int64 if given: 0 where there was nothing to draw.
        `masks`: row -> the tokens that it may draw in this step.  `ahead`: row -> tokens between
        those of its sequence and the one to draw, where there are any.
        """
        rows, ops = len(seqs), self._ops(logits)
        plan = self._planner.plan(seqs, masks or {}, ahead or {})
        meta = plan.send(self._up)
        tokens = _empty(rows, logits, torch.int64) if tokens is None else tokens[:rows]
        width = min(max(plan.num_top.values(), default=0), meta.least or self._vocab)
        told = _empty(rows + bool(plan.num_top) * rows * (1 + 2 * width), logits, torch.float64)
        ops.close(logits, meta)
        raw = _copied(logits) if plan.changes_asked else logits
        ops.draw(logits, meta, tokens, told[:rows])
        if plan.num_top:
            ops.tell(raw, tokens, meta, width, told[rows:])
        return Drawn(tokens, self._down.fetch(told), plan.num_top, width)

    def draft(
        self,
        logits: Tensor,
        seqs: Seq[Sequence],
        ahead: int,
        tokens: Tensor,
        *,
        coupled: bool = True,
    ) -> None:
        """What each row would draw if these were the logits: into tokens (rows or more,) int64.

        Every row stands on `ahead` tokens that are not known here yet: penalties do not count them.
        The noise is that of the draw to come, so that two models that agree draw alike; without
        `coupled` there is none.  They are of the base's ids alone, whatever others a sequence may
        draw.  Logits are overwritten; nothing is told, and nothing is waited for.
        """
        rows = len(seqs)
        unknown = dict.fromkeys(range(rows), (NOBODYS,) * ahead) if ahead else {}
        plan = self._planner.greedy(rows)
        if coupled:
            plan = self._planner.plan(seqs, {}, unknown, guesses=True)
        told = _empty(rows, logits, torch.float64)
        self._ops(logits).draw(logits, plan.send(self._up), tokens[:rows], told)

    def finish(self, drawn: Drawn) -> list[Sampled]:
        """Wait for a draw; one `Sampled` a row."""
        values = drawn.arrival.wait()
        rows = len(drawn.tokens)
        tokens = values[:rows].astype(np.int64).tolist()
        told = {}
        if drawn.num_top:
            picked = [tokens[row] for row in drawn.num_top]
            told = dict(zip(drawn.num_top, _told(drawn, values[rows:], picked), strict=True))
        return [Sampled(t, told.get(row), doom=DOOMS.get(t)) for row, t in enumerate(tokens)]

    def prompt_logprobs(
        self, logits: Tensor, targets: Seq[int], num_top: int, limit: int = 0
    ) -> tuple[TokenLogprobs, ...]:
        """Log-probability of `targets[i]` under row i of `logits` (rows, width), whose ids are
        below `limit`; 0 = the base's.  Waits."""
        rows, width = len(targets), min(num_top, limit or self._vocab)
        meta = self._planner.prompt(rows, limit).send(self._up)
        tokens = torch.tensor(targets).to(logits.device)
        told = _empty(rows * (1 + 2 * width), logits, torch.float64)
        ops = self._ops(logits)
        ops.close(logits, meta)
        ops.tell(logits, tokens, meta, width, told)
        drawn = Drawn(tokens, Arrival(told, None), dict.fromkeys(range(rows), width), width)
        return tuple(_told(drawn, drawn.arrival.wait(), targets))

    def _ops(self, logits: Tensor) -> Ops:
        if not backend.use_kernels(logits):
            return self._reference
        if self._kernels is None:
            self._kernels = self._make_kernels(logits.device)
        return self._kernels

    def _make_kernels(self, device: torch.device) -> Ops:
        from engine.kernels.sample_device import DeviceOps

        return DeviceOps(device, rows=self._max_rows, vocab=self._vocab, width=self._width)


def _told(drawn: Drawn, values: np.ndarray, tokens: Seq[int]) -> list[TokenLogprobs]:
    """What came down for the rows that asked, in their order; `tokens` are theirs."""
    rows, width = len(drawn.tokens), drawn.width
    chosen = values[:rows].tolist()
    best, ids = values[rows:].reshape(2, rows, width)
    return [
        TokenLogprobs(
            token,
            chosen[row],
            tuple(
                zip(ids[row, :count].astype(int).tolist(), best[row, :count].tolist(), strict=True)
            ),
        )
        for token, (row, count) in zip(tokens, drawn.num_top.items(), strict=True)
    ]


def _copied(logits: Tensor) -> Tensor:
    """A copy whose rows begin as the original's: kernels are compiled for how they do."""
    size, stride = logits.size(), logits.stride()
    return torch.empty_strided(size, stride, dtype=logits.dtype, device=logits.device).copy_(logits)


def _empty(count: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=like.device)
