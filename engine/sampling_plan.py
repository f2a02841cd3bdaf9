"""What the rows of one draw ask for, as arrays: the sampler's host side.

Goes in: the sequence of each row.  Comes out: a SamplingPlan of numpy arrays, and from `send` the
same on the device in one upload.  A row's noise is a hash of (seed, position of the token to draw),
made here so that every device draws the same.  Knows no logits.
"""

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.messages import SamplingParams
from engine.sequence import Sequence
from engine.upload import Parcel

#: Below this a temperature is greedy: dividing by it would only overflow.
GREEDY_BELOW = 1e-5

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """`vocab_size` is the tokenizer's: ids past it (padding of the embedding) are never drawn."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wishes:
    """A plan on the device; None = no row asks for it.  Rows are int64 and ascending."""

    asked: Tensor | None = None  # rows whose log-probabilities are told
    penalised: Tensor | None = None  # rows
    penalties: Tensor | None = None  # (3, rows) fp32: repetition, frequency, presence
    #: Flat places in (penalised rows, vocab): all prompts' tokens, then all that was generated.
    history: Tensor | None = None
    num_prompt_history: int = 0
    bias_places: Tensor | None = None  # flat places in (all rows, vocab)
    biases: Tensor | None = None  # fp32
    bans: Tensor | None = None  # flat places in (all rows, vocab)
    plain: Tensor | None = None  # rows that are drawn from everything
    filtered: Tensor | None = None  # rows with top-k, top-p or min-p
    filters: Tensor | None = None  # (3, filtered rows) fp32: top-k, top-p, min-p
    heat: Tensor | None = None  # (plain, then filtered) fp32 temperatures
    noise: Tensor | None = None  # (plain, then filtered) fp64 in [0, 1), 32 bits


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Fields of `Wishes` as arrays; a field that is not needed is not there."""

    arrays: dict[str, Array]
    num_top: dict[int, int]  # row -> alternatives that it asked for
    num_prompt_history: int

    @classmethod
    def of(
        cls, seqs: Seq[Sequence], limits: SamplerLimits, nonce: bytes, *, vocab: int
    ) -> "SamplingPlan":
        """What `seqs` ask for, row by row.  `vocab` is the logits' width."""
        num_top = {
            row: seq.sampling.logprobs
            for row, seq in enumerate(seqs)
            if seq.sampling.logprobs is not None
        }
        arrays: dict[str, Array] = {}
        if num_top:
            arrays["asked"] = _ints(num_top)
        num_prompt_history = _add_penalties(arrays, seqs, vocab)
        _add_biases(arrays, seqs, limits, vocab)
        _add_bans(arrays, seqs, limits, vocab)
        _add_draws(arrays, seqs, nonce, vocab)
        return cls(arrays, num_top, num_prompt_history)

    def send(self, parcel: Parcel) -> Wishes:
        """The plan on the device, in one upload; none for rows that are plainly greedy."""
        if not self.arrays:
            return Wishes()
        tensors = parcel.send(list(self.arrays.values()))
        fields = dict(zip(self.arrays, tensors, strict=True))
        for name in ("penalties", "filters"):
            if name in fields:
                fields[name] = fields[name].view(3, -1)
        return Wishes(num_prompt_history=self.num_prompt_history, **fields)


def _add_penalties(arrays: dict[str, Array], seqs: Seq[Sequence], vocab: int) -> int:
    """Returns how many places of the history are prompts'."""
    rows = [row for row, seq in enumerate(seqs) if _is_penalised(seq.sampling)]
    if not rows:
        return 0
    params = [seqs[row].sampling for row in rows]
    prompts = [
        _places(seqs[row].tokens[: seqs[row].num_prompt], i * vocab) for i, row in enumerate(rows)
    ]
    output = [
        _places(seqs[row].tokens[seqs[row].num_prompt :], i * vocab) for i, row in enumerate(rows)
    ]
    arrays["penalised"] = _ints(rows)
    arrays["penalties"] = _floats(
        [p.repetition_penalty for p in params]
        + [p.frequency_penalty for p in params]
        + [p.presence_penalty for p in params]
    )
    arrays["history"] = np.concatenate(prompts + output)
    return sum(map(len, prompts))


def _add_biases(
    arrays: dict[str, Array], seqs: Seq[Sequence], limits: SamplerLimits, vocab: int
) -> None:
    entries = [
        (row * vocab + token, bias)
        for row, seq in enumerate(seqs)
        for token, bias in seq.sampling.logit_bias.items()
        if 0 <= token < limits.vocab_size
    ]
    if entries:
        arrays["bias_places"] = _ints(place for place, _ in entries)
        arrays["biases"] = _floats(bias for _, bias in entries)


def _add_bans(
    arrays: dict[str, Array], seqs: Seq[Sequence], limits: SamplerLimits, vocab: int
) -> None:
    """No end before `min_tokens`."""
    places: list[int] = []
    for row, seq in enumerate(seqs):
        if len(seq.tokens) - seq.num_prompt < seq.sampling.min_tokens:
            ends = {*limits.eos_token_ids, *seq.sampling.stop_token_ids}
            places += [row * vocab + end for end in ends if 0 <= end < vocab]
    if places:
        arrays["bans"] = _ints(places)


def _add_draws(arrays: dict[str, Array], seqs: Seq[Sequence], nonce: bytes, vocab: int) -> None:
    hot = [row for row, seq in enumerate(seqs) if seq.sampling.temperature >= GREEDY_BELOW]
    if not hot:
        return
    plain = [row for row in hot if not _is_filtered(seqs[row].sampling)]
    filtered = [row for row in hot if _is_filtered(seqs[row].sampling)]
    if plain:
        arrays["plain"] = _ints(plain)
    if filtered:
        params = [seqs[row].sampling for row in filtered]
        arrays["filtered"] = _ints(filtered)
        arrays["filters"] = _floats(
            [p.top_k if p.top_k > 0 else vocab for p in params]
            + [p.top_p for p in params]
            + [p.min_p for p in params]
        )
    order = plain + filtered
    arrays["heat"] = _floats(seqs[row].sampling.temperature for row in order)
    arrays["noise"] = np.array([_noise(seqs[row], nonce) for row in order], dtype=np.float64)


def _noise(seq: Sequence, nonce: bytes) -> float:
    """32 bits in [0, 1), the same wherever and beside whomever the token is drawn."""
    seed = seq.sampling.seed
    key = nonce + seq.request_id.encode() if seed is None else str(seed).encode()
    digest = hashlib.blake2b(len(seq.tokens).to_bytes(8, "big"), key=_key(key), digest_size=4)
    return int.from_bytes(digest.digest(), "big") / 2**32


def _key(text: bytes) -> bytes:
    """At most 64 bytes, as blake2b wants its key."""
    return text if len(text) <= 64 else hashlib.blake2b(text).digest()


def _is_penalised(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _places(tokens: Seq[int], start: int) -> npt.NDArray[np.int64]:
    return np.asarray(tokens, dtype=np.int64) + start


def _ints(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)


def _floats(values: Iterable[float]) -> npt.NDArray[np.float32]:
    return np.array(list(values), dtype=np.float32)
