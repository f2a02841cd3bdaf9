"""What one sequence asks of single tokens' logits: penalties by its history, bias, bans.

Goes in: the sequence, again and again as it grows.  Comes out: entries of `sample_meta`, kept up to
date a token at a time: a step costs the new tokens, not the length.  (They all go up again in every
step, 12 bytes for each distinct token of a penalised sequence.)  Knows no logits.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from engine.kernels.sample_meta import NEVER
from engine.messages import SamplingParams
from engine.sequence import Sequence

Item = TypeVar("Item", bound=np.generic)


class Entries(NamedTuple):
    """Of one row of a draw: (n,) each.  Valid until its sequence grows."""

    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    biases: npt.NDArray[np.float32]


class TokenChanges:
    """Three arrays of `size` entries that are in use: ids, counts, biases.

    Tokens from `vocab` on are not drawn anyway, and are left out.
    """

    def __init__(self, seq: Sequence, vocab: int, ends: tuple[int, ...]) -> None:
        """`ends` are banned until `min_tokens` are generated."""
        params = seq.sampling
        self.size = 0
        self.ids = np.empty(64, dtype=np.int32)
        self.counts = np.empty(64, dtype=np.int32)
        self.biases = np.empty(64, dtype=np.float32)
        self._vocab = vocab
        self._places: dict[int, int] = {}
        self._bias = params.logit_bias
        self._counts_output = is_penalised(params)
        self._taken = seq.num_prompt
        if params.repetition_penalty != 1.0:
            self._append(np.unique(np.asarray(seq.tokens[: seq.num_prompt], dtype=np.int64)))
        for token, bias in params.logit_bias.items():
            self._set_bias(token, bias)
        if params.ignore_eos:  # nothing ends with them, and to an adapter they may be words
            ends = ()
        self._banned = [*ends, *params.stop_token_ids] if params.min_tokens else []
        self._banned_until = seq.num_prompt + params.min_tokens
        for token in self._banned:
            self._set_bias(token, -np.inf)

    @classmethod
    def of(cls, seq: Sequence, vocab: int, ends: tuple[int, ...]) -> "TokenChanges | None":
        """None if `seq` asks for nothing of the kind."""
        params = seq.sampling
        if params.logit_bias or params.min_tokens or is_penalised(params):
            return cls(seq, vocab, ends)
        return None

    def entries(self, tokens: list[int], ahead: Seq[int] = ()) -> Entries:
        """For the draw behind `tokens`, which have only grown since the last call, and `ahead`."""
        self.follow(tokens)
        size = self.size
        now = Entries(self.ids[:size], self.counts[:size], self.biases[:size])
        return self._further(now, len(tokens), ahead) if ahead else now

    def _further(self, now: Entries, length: int, ahead: Seq[int]) -> Entries:
        """What `follow` would come to, and nothing of it is kept."""
        counts, biases = now.counts.copy(), now.biases.copy()
        if self._banned and length + len(ahead) >= self._banned_until:
            for token in self._banned:
                if (place := self._places.get(token)) is not None:
                    biases[place] = self._bias.get(token, 0.0)
        new: Counter[int] = Counter()
        for token in ahead if self._counts_output else ():
            if (place := self._places.get(token)) is not None:
                counts[place] = max(counts[place], 0) + 1
            elif 0 <= token < self._vocab:
                new[token] += 1
        return Entries(
            np.concatenate([now.ids, np.array(list(new), dtype=np.int32)]),
            np.concatenate([counts, np.array(list(new.values()), dtype=np.int32)]),
            np.concatenate([biases, np.zeros(len(new), dtype=np.float32)]),
        )

    def follow(self, tokens: list[int]) -> None:
        """Take in what has been generated since the last call."""
        if self._banned and len(tokens) >= self._banned_until:
            for token in self._banned:
                self._set_bias(token, self._bias.get(token, 0.0))
            self._banned = []
        if self._counts_output:
            for token in tokens[self._taken :]:
                place = self._place(token)
                if place is not None:
                    self.counts[place] = max(self.counts[place], 0) + 1
            self._taken = len(tokens)

    def _set_bias(self, token: int, bias: float) -> None:
        place = self._place(token)
        if place is not None:
            self.biases[place] = bias

    def _place(self, token: int) -> int | None:
        """Its entry, made if there is none; None for a token that is never drawn."""
        place = self._places.get(token)
        if place is None and 0 <= token < self._vocab:
            place = self._places[token] = self._make_room(1)
            self.ids[place], self.counts[place], self.biases[place] = token, NEVER, 0.0
        return place

    def _append(self, tokens: npt.NDArray[np.int64]) -> None:
        """Entries of distinct tokens of the prompt."""
        tokens = tokens[(tokens >= 0) & (tokens < self._vocab)]
        start = self._make_room(len(tokens))
        part = slice(start, self.size)
        self.ids[part], self.counts[part], self.biases[part] = tokens, 0, 0.0
        self._places |= zip(tokens.tolist(), range(start, self.size), strict=True)

    def _make_room(self, count: int) -> int:
        """The first of `count` new entries."""
        start, self.size = self.size, self.size + count
        if self.size > len(self.ids):
            self.ids = _longer(self.ids, 2 * self.size)
            self.counts = _longer(self.counts, 2 * self.size)
            self.biases = _longer(self.biases, 2 * self.size)
        return start


def _longer(array: npt.NDArray[Item], size: int) -> npt.NDArray[Item]:
    longer = np.empty(size, dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def is_penalised(params: SamplingParams) -> bool:
    """Whether what a sequence holds already counts against it."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )
