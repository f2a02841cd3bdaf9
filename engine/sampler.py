"""From logits to tokens, for a whole batch at once, on the device that holds the logits.

Goes in: raw logits (rows, vocab) in fp32 and the sequence of each row.  Comes out: one `Sampled` a
row.  A row's token depends on that row alone: its noise is a pure function of (seed, position), and
no tensor operation here mixes rows, so batch mates and preemption change nothing.

`launch` puts the draw on the device's queue and returns at once: what the rows ask for goes up in
one pinned copy (none if all are plainly greedy), what was drawn comes down in another.  `finish`
waits for that one.  `sample` is both.

Order: penalties, bias and the ban on early ends; then temperature, top-k, top-p of what top-k left,
min-p.  Greedy is the exact argmax, the lowest id on ties.  Log-probabilities are those of the raw
model distribution over the tokenizer's ids, before any of the above.  Knows nothing of stop rules.
"""

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.messages import TokenLogprobs
from engine.sampling_plan import SamplerLimits, SamplingPlan, Wishes
from engine.sequence import Sampled, Sequence
from engine.upload import Arrival, DownloadRing, Parcel

__all__ = ["Drawn", "Sampler", "SamplerLimits"]

#: Planned sizes of a step's transfers: alternatives a row, and history words a row for penalties.
#: More than that is served all the same, by a copy that waits.
MAX_TOP, HISTORY_WORDS = 20, 4096


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draw on its way: `tokens` (rows,) int64 on the device, everything else in `arrival`."""

    tokens: Tensor
    arrival: Arrival
    num_top: dict[int, int]  # row -> alternatives that it asked for
    width: int  # alternatives a row that came down


class Sampler:
    """Draws tokens.  Stateless but for one random number that seeds requests without a seed.

    `max_rows` sizes the pinned buffers on a card.
    """

    def __init__(
        self,
        limits: SamplerLimits,
        *,
        device: torch.device | None = None,
        max_rows: int = 64,
    ) -> None:
        device = device or torch.device("cpu")
        self._limits = limits
        self._nonce = secrets.token_bytes(16)
        self._up = Parcel(max_rows * HISTORY_WORDS, device)
        self._down = DownloadRing(max_rows * (2 + 2 * MAX_TOP), device)

    def sample(self, logits: Tensor, seqs: Seq[Sequence]) -> list[Sampled]:
        """One token for each row of `logits` (rows, vocab), fp32, which is overwritten."""
        return self.finish(self.launch(logits, seqs))

    def launch(self, logits: Tensor, seqs: Seq[Sequence]) -> Drawn:
        """Start the draw of a token for each row of `logits`, which is overwritten."""
        self._mask_padding(logits)
        plan = SamplingPlan.of(seqs, self._limits, self._nonce, vocab=logits.shape[1])
        wishes = plan.send(self._up)
        raw = None
        if wishes.asked is not None:
            raw = torch.log_softmax(_rows(logits, wishes.asked), -1)
        _change(logits, wishes)
        tokens = _draw(logits, wishes)
        width = min(max(plan.num_top.values(), default=0), logits.shape[1])
        told = [tokens.double()]
        if raw is not None and wishes.asked is not None:
            chosen = raw.gather(1, _rows(tokens[:, None], wishes.asked))
            told.append(chosen[:, 0].double())
            if width:
                values, ids = torch.topk(raw, width, dim=-1)
                told += [values.double().view(-1), ids.double().view(-1)]
        # fp64 holds every id and every fp32 exactly: one tensor, one copy.
        arrival = self._down.fetch(torch.cat(told) if len(told) > 1 else told[0])
        return Drawn(tokens, arrival, plan.num_top, width)

    def finish(self, drawn: Drawn) -> list[Sampled]:
        """Wait for a draw; one `Sampled` a row."""
        values = drawn.arrival.wait()
        rows, asked, width = len(drawn.tokens), len(drawn.num_top), drawn.width
        tokens = values[:rows].astype(int).tolist()
        if not asked:
            return [Sampled(token) for token in tokens]
        chosen = values[rows : rows + asked].tolist()
        top = values[rows + asked :].reshape(2, asked, width)
        best, ids = top[0].tolist(), top[1].astype(int).tolist()
        told = {
            row: TokenLogprobs(
                tokens[row], chosen[i], tuple(zip(ids[i][:count], best[i][:count], strict=True))
            )
            for i, (row, count) in enumerate(drawn.num_top.items())
        }
        return [Sampled(token, told.get(row)) for row, token in enumerate(tokens)]

    def prompt_logprobs(
        self, logits: Tensor, targets: Seq[int], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Log-probability of `targets[i]` under row i of `logits` (rows, vocab).  Waits."""
        self._mask_padding(logits)
        rows = torch.log_softmax(logits, -1)
        picked = torch.tensor(targets).to(rows.device)[:, None]
        chosen = rows.gather(1, picked)[:, 0].tolist()
        values, ids = torch.topk(rows, min(num_top, rows.shape[1]), dim=-1)
        return tuple(
            TokenLogprobs(target, logprob, tuple(zip(top_ids, top_values, strict=True)))
            for target, logprob, top_ids, top_values in zip(
                targets, chosen, ids.tolist(), values.tolist(), strict=True
            )
        )

    def _mask_padding(self, logits: Tensor) -> None:
        if logits.shape[1] > self._limits.vocab_size:
            logits[:, self._limits.vocab_size :] = -torch.inf


# ----------------------------------------------------------------- changes to the logits
def _change(logits: Tensor, wishes: Wishes) -> None:
    """Penalties, bias and bans, in place."""
    flat = logits.view(-1)
    if wishes.penalised is not None:
        _penalise(logits, wishes)
    if wishes.bias_places is not None and wishes.biases is not None:
        flat.index_add_(0, wishes.bias_places, wishes.biases)
    if wishes.bans is not None:
        flat.index_fill_(0, wishes.bans, -torch.inf)


def _penalise(logits: Tensor, wishes: Wishes) -> None:
    """Repetition counts prompt and output (as transformers does), the others output alone."""
    rows, penalties, history = wishes.penalised, wishes.penalties, wishes.history
    assert rows is not None and penalties is not None and history is not None
    repetition, frequency, presence = penalties[:, :, None]
    part = _rows(logits, rows)
    everything = _counts(history, part)
    output = _counts(history[wishes.num_prompt_history :], part)
    seen = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(everything > 0, seen, part)
    part -= output * frequency
    part -= (output > 0) * presence
    logits.index_copy_(0, rows, part)


def _counts(places: Tensor, like: Tensor) -> Tensor:
    """(rows, vocab) fp32: how often each place of `like`, laid flat, is named."""
    counts = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    ones = torch.ones(len(places), dtype=torch.float32, device=like.device)
    return counts.scatter_add_(0, places, ones).view(like.shape)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """These rows of `x`; without a copy if that is all of them (they are in order)."""
    return x if len(rows) == len(x) else x.index_select(0, rows)


# ----------------------------------------------------------------- the draw
def _draw(logits: Tensor, wishes: Wishes) -> Tensor:
    """(rows,) int64.  Rows that need a sort get one; the others are drawn without."""
    tokens = torch.argmax(logits, -1)
    if wishes.plain is not None and wishes.heat is not None and wishes.noise is not None:
        plain = wishes.plain
        probs = _probabilities(_rows(logits, plain), wishes.heat[: len(plain)])
        tokens.index_copy_(0, plain, _pick(probs, wishes.noise[: len(plain)]))
    if wishes.filtered is not None and wishes.heat is not None and wishes.noise is not None:
        filtered = wishes.filtered
        probs, ids = torch.sort(
            _probabilities(_rows(logits, filtered), wishes.heat[-len(filtered) :]),
            dim=-1,
            descending=True,
            stable=True,
        )
        assert wishes.filters is not None
        place = _pick(_filter(probs, wishes.filters), wishes.noise[-len(filtered) :])
        tokens.index_copy_(0, filtered, ids.gather(1, place[:, None])[:, 0])
    return tokens


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """(rows, vocab) fp32 after temperature; without the maximum first, small ones overflow."""
    return torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature[:, None], -1)


def _filter(probs: Tensor, filters: Tensor) -> Tensor:
    """Zero what top-k, top-p and min-p leave out.  `probs` (rows, vocab), each row descending."""
    top_k, top_p, min_p = filters[:, :, None]
    ranks = torch.arange(probs.shape[1], device=probs.device)
    kept = torch.where(ranks < top_k, probs, 0.0)
    before = kept.cumsum(-1, dtype=torch.float64) - kept  # mass ahead of each token
    inside = before < top_p * kept.sum(-1, keepdim=True, dtype=torch.float64)
    inside |= top_p >= 1.0  # exactly all of it, whatever the rounding of the sum
    inside |= ranks == 0
    likely = kept >= min_p * probs[:, :1]
    return torch.where(inside & likely, kept, 0.0)


def _pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """(rows,) first place where the running sum passes `uniform` of the whole.

    In fp64, and never a place of probability zero: a parallel sum may wobble by an ulp, and
    `uniform` has 32 bits, far from one by more than that.
    """
    running = probs.cumsum(-1, dtype=torch.float64)
    passed = (running > uniform[:, None] * running[:, -1:]) & (probs > 0)
    return passed.to(torch.uint8).argmax(-1)
