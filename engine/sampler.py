"""From logits to tokens, for a whole batch at once, on the device that holds the logits.

Goes in: raw logits (rows, vocab) in fp32 and the sequence of each row.  Comes out: one `Sampled` a
row.  A row's token depends on that row alone: its noise is a pure function of (seed, position), and
no tensor operation here mixes rows, so batch mates and preemption change nothing.

Order: penalties, bias and the ban on early ends; then temperature, top-k, top-p of what top-k left,
min-p.  Greedy is the exact argmax, the lowest id on ties.  Log-probabilities are those of the raw
model distribution over the tokenizer's ids, before any of the above.  Knows nothing of stop rules.
"""

import hashlib
import secrets
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.messages import SamplingParams, TokenLogprobs
from engine.sequence import Sampled, Sequence

#: Below this a temperature is greedy: dividing by it would only overflow.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """`vocab_size` is the tokenizer's: ids past it (padding of the embedding) are never drawn."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Sampler:
    """Draws tokens.  Stateless but for one random number that seeds requests without a seed."""

    def __init__(self, limits: SamplerLimits) -> None:
        self._limits = limits
        self._nonce = secrets.token_bytes(16)

    def sample(self, logits: Tensor, seqs: Seq[Sequence]) -> list[Sampled]:
        """One token for each row of `logits` (rows, vocab), fp32, which is overwritten."""
        self._mask_padding(logits)
        raw = self._raw_rows(logits, seqs)
        self._penalise(logits, seqs)
        self._add_bias(logits, seqs)
        self._ban_early_end(logits, seqs)
        tokens = self._draw(logits, seqs)
        return self._answers(tokens.tolist(), raw, seqs)

    def prompt_logprobs(
        self, logits: Tensor, targets: Seq[int], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Log-probability of `targets[i]` under row i of `logits` (rows, vocab)."""
        self._mask_padding(logits)
        return tuple(_logprobs(torch.log_softmax(logits, -1), targets, [num_top] * len(targets)))

    # ------------------------------------------------------------- changes to the logits
    def _mask_padding(self, logits: Tensor) -> None:
        if logits.shape[1] > self._limits.vocab_size:
            logits[:, self._limits.vocab_size :] = -torch.inf

    def _raw_rows(self, logits: Tensor, seqs: Seq[Sequence]) -> dict[int, Tensor]:
        """Row -> log-probabilities, for the rows that asked; taken before anything is changed."""
        rows = [i for i, seq in enumerate(seqs) if seq.sampling.logprobs is not None]
        if not rows:
            return {}
        return dict(zip(rows, torch.log_softmax(logits[rows], -1), strict=True))

    def _penalise(self, logits: Tensor, seqs: Seq[Sequence]) -> None:
        """Repetition counts prompt and output (as transformers does), the others output alone."""
        rows = [i for i, seq in enumerate(seqs) if _is_penalised(seq.sampling)]
        if not rows:
            return
        chosen = [seqs[i] for i in rows]
        everything = _counts([s.tokens for s in chosen], logits)
        output = _counts([s.tokens[s.num_prompt :] for s in chosen], logits)
        part = logits[rows]
        repetition = _column([s.sampling.repetition_penalty for s in chosen], logits)
        seen = torch.where(part > 0, part / repetition, part * repetition)
        part = torch.where(everything > 0, seen, part)
        part -= output * _column([s.sampling.frequency_penalty for s in chosen], logits)
        part -= (output > 0) * _column([s.sampling.presence_penalty for s in chosen], logits)
        logits[rows] = part

    def _add_bias(self, logits: Tensor, seqs: Seq[Sequence]) -> None:
        entries = [
            (row, token, bias)
            for row, seq in enumerate(seqs)
            for token, bias in seq.sampling.logit_bias.items()
            if 0 <= token < self._limits.vocab_size
        ]
        if entries:
            rows, tokens, biases = zip(*entries, strict=True)
            logits[list(rows), list(tokens)] += torch.tensor(biases, device=logits.device)

    def _ban_early_end(self, logits: Tensor, seqs: Seq[Sequence]) -> None:
        for row, seq in enumerate(seqs):
            if len(seq.tokens) - seq.num_prompt < seq.sampling.min_tokens:
                ends = {*self._limits.eos_token_ids, *seq.sampling.stop_token_ids}
                logits[row, [e for e in ends if 0 <= e < logits.shape[1]]] = -torch.inf

    # ------------------------------------------------------------- the draw
    def _draw(self, logits: Tensor, seqs: Seq[Sequence]) -> Tensor:
        """(rows,) int64.  Rows that need a sort get one; the others are drawn without."""
        tokens = torch.argmax(logits, -1)
        hot = [i for i, seq in enumerate(seqs) if seq.sampling.temperature >= GREEDY_BELOW]
        plain = [i for i in hot if not _is_filtered(seqs[i].sampling)]
        filtered = [i for i in hot if _is_filtered(seqs[i].sampling)]
        if plain:
            probs = _probabilities(logits[plain], [seqs[i] for i in plain])
            tokens[plain] = _pick(probs, self._uniform(plain, seqs, logits))
        if filtered:
            chosen = [seqs[i] for i in filtered]
            probs, ids = torch.sort(
                _probabilities(logits[filtered], chosen), dim=-1, descending=True, stable=True
            )
            kept = _filter(probs, [s.sampling for s in chosen])
            place = _pick(kept, self._uniform(filtered, seqs, logits))
            tokens[filtered] = ids.gather(1, place[:, None])[:, 0]
        return tokens

    def _uniform(self, rows: Seq[int], seqs: Seq[Sequence], like: Tensor) -> Tensor:
        """(rows, 1) in [0, 1), 32 bits: a hash of (seed, position of the token to draw)."""
        values = [self._noise(seqs[i]) for i in rows]
        return torch.tensor(values, dtype=torch.float64).to(like.device)[:, None]

    def _noise(self, seq: Sequence) -> float:
        seed = seq.sampling.seed
        key = self._nonce + seq.request_id.encode() if seed is None else str(seed).encode()
        digest = hashlib.blake2b(len(seq.tokens).to_bytes(8, "big"), key=_key(key), digest_size=4)
        return int.from_bytes(digest.digest(), "big") / 2**32

    def _answers(
        self, tokens: list[int], raw: dict[int, Tensor], seqs: Seq[Sequence]
    ) -> list[Sampled]:
        asked = {}
        if raw:
            counts = [seqs[i].sampling.logprobs or 0 for i in raw]
            rows = _logprobs(torch.stack(list(raw.values())), [tokens[i] for i in raw], counts)
            asked = dict(zip(raw, rows, strict=True))
        return [Sampled(token, asked.get(i)) for i, token in enumerate(tokens)]


def _key(text: bytes) -> bytes:
    """At most 64 bytes, as blake2b wants its key."""
    return text if len(text) <= 64 else hashlib.blake2b(text).digest()


def _is_penalised(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _column(values: Iterable[float], like: Tensor) -> Tensor:
    """(rows, 1) fp32 on the device of `like`."""
    return torch.tensor(list(values), dtype=torch.float32).to(like.device)[:, None]


def _counts(lists: Seq[Seq[int]], like: Tensor) -> Tensor:
    """(rows, vocab) fp32: how often each id is in each list."""
    vocab = like.shape[1]
    flat = np.concatenate(
        [np.asarray(ids, dtype=np.int64) + row * vocab for row, ids in enumerate(lists)]
    )
    counts = torch.bincount(torch.from_numpy(flat), minlength=len(lists) * vocab)
    return counts.to(device=like.device, dtype=torch.float32).view(len(lists), vocab)


def _probabilities(logits: Tensor, seqs: Seq[Sequence]) -> Tensor:
    """(rows, vocab) fp32 after temperature; without the maximum first, small ones overflow."""
    temperature = _column([s.sampling.temperature for s in seqs], logits)
    return torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)


def _filter(probs: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Zero what top-k, top-p and min-p leave out.  `probs` (rows, vocab), each row descending."""
    vocab = probs.shape[1]
    ranks = torch.arange(vocab, device=probs.device)
    top_k = _column([p.top_k if p.top_k > 0 else vocab for p in params], probs)
    kept = torch.where(ranks < top_k, probs, 0.0)
    before = kept.cumsum(-1, dtype=torch.float64) - kept  # mass ahead of each token
    top_p = _column([p.top_p for p in params], probs)
    inside = before < top_p * kept.sum(-1, keepdim=True, dtype=torch.float64)
    inside |= top_p >= 1.0  # exactly all of it, whatever the rounding of the sum
    inside |= ranks == 0
    likely = kept >= _column([p.min_p for p in params], probs) * probs[:, :1]
    return torch.where(inside & likely, kept, 0.0)


def _pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """(rows,) first place where the running sum passes `uniform` of the whole.

    In fp64, and never a place of probability zero: a parallel sum may wobble by an ulp, and
    `uniform` has 32 bits, far from one by more than that.
    """
    running = probs.cumsum(-1, dtype=torch.float64)
    passed = (running > uniform * running[:, -1:]) & (probs > 0)
    return passed.to(torch.uint8).argmax(-1)


def _logprobs(rows: Tensor, targets: Seq[int], num_top: Seq[int]) -> list[TokenLogprobs]:
    """`rows` (n, vocab) log-probabilities; the alternatives of row i are its best `num_top[i]`."""
    chosen = rows.gather(1, torch.tensor(targets).to(rows.device)[:, None])[:, 0].tolist()
    width = min(max(num_top), rows.shape[1])
    values, ids = torch.topk(rows, width, dim=-1)
    return [
        TokenLogprobs(target, logprob, tuple(zip(top_ids[:n], top_values[:n], strict=True)))
        for target, logprob, n, top_ids, top_values in zip(
            targets, chosen, num_top, ids.tolist(), values.tolist(), strict=True
        )
    ]
