"""What the rows of one draw ask for, as one run of words: the sampler's host side.

Goes in: the sequence of each row.  Comes out: a SampleMeta, whose words go up in one copy, or in
none if every row is plainly greedy.  What a sequence asks for is worked out once and remembered.
A row's noise hangs on (seed, position of the token to draw) alone.  Knows no logits.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.sample_meta import RECORD, Field, Kind, SampleMeta
from engine.messages import SamplingParams
from engine.sequence import Sequence
from engine.token_changes import Entries, TokenChanges
from engine.upload import Parcel

#: Below this a temperature is greedy: dividing by it would only overflow.
GREEDY_BELOW = 1e-5
#: From here on every token is as likely: -inf divided by infinity would be none.
FAIR_ABOVE = 1e9
#: No limit: more tokens than any vocabulary has.
_ALL = 0x7FFFFFFF

#: ceil(vocab / 32) uint32 words; bit i % 32 of word i // 32 is set if token i may be drawn.
Mask = npt.NDArray[np.uint32]
Words = npt.NDArray[np.int32]

_NO_MASKS: Mapping[int, Mask] = {}
_NONE_AHEAD: Mapping[int, Seq[int]] = {}


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """`vocab_size` is the tokenizer's: ids past it (padding of the embedding) are drawn for those
    alone whose adapter's tokenizer has them, below `num_ids`; 0 = there are none."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_ids: int = 0

    @property
    def width(self) -> int:
        """Columns of logits that some row may draw from."""
        return max(self.vocab_size, self.num_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """A draw's words on the host, and what they hold."""

    words: Words
    meta: SampleMeta  # its words are not there yet
    num_top: dict[int, int]  # row -> alternatives that it asked for
    changes_asked: bool = False  # a row that tells log-probabilities is changed

    def send(self, parcel: Parcel) -> SampleMeta:
        """The meta with its words on the device, by one upload at most."""
        if not len(self.words):
            return self.meta
        [words] = parcel.send([self.words])
        return dataclasses.replace(self.meta, words=words)


@dataclass(slots=True)
class _Wish:
    """What a sequence asks for in every draw."""

    seq: Sequence
    kind: Kind
    key: int  # of all its noise, 64 bits
    record: Words  # (RECORD,): what does not change
    changes: TokenChanges | None
    mask: Mask | None
    num_top: int | None
    limit: int  # its ids are below
    quiet: bool  # greedy and nothing else, of the base's ids


class Planner:
    """Plans draws.  Remembers the last sequences, at least `max_rows` of them."""

    def __init__(self, limits: SamplerLimits, nonce: bytes, max_rows: int) -> None:
        self._limits = limits
        self._nonce = nonce
        self._room = 2 * max_rows
        self._known: dict[int, _Wish] = {}  # by the identity of the sequence, which each holds

    def plan(
        self,
        seqs: Seq[Sequence],
        masks: Mapping[int, Mask] = _NO_MASKS,
        ahead: Mapping[int, Seq[int]] = _NONE_AHEAD,
        *,
        guesses: bool = False,
    ) -> Plan:
        """`masks`: row -> tokens that it may draw in this step, besides what its request allows.
        `ahead`: row -> tokens that stand between its sequence's and the one to draw.  `guesses`: of
        a model that drafts, whose logits are of the base's ids alone.
        """
        wishes = [self._wish(seq) for seq in seqs]
        if len(self._known) > self._room:
            self._known = {id(wish.seq): wish for wish in wishes}
        if not masks and all(wish.quiet for wish in wishes):
            return self.greedy(len(seqs))
        limits = self._limits
        own = not guesses and any(wish.limit != limits.vocab_size for wish in wishes)
        columns = limits.width if own else limits.vocab_size
        return _Packing(wishes, masks, ahead, columns, own=own).plan()

    def greedy(self, rows: int) -> Plan:
        """The plan for rows that ask for nothing."""
        return Plan(np.empty(0, np.int32), _meta(rows), {})

    def prompt(self, rows: int, limit: int = 0) -> Plan:
        """The plan for rows that are not drawn: all that they want is log-probabilities, of ids
        below `limit`; 0 = of the base's."""
        words = np.zeros((rows, RECORD), dtype=np.int32)
        words[:, Field.ASKED], words[:, Field.LIMIT] = 1, limit
        least = 0 if limit == self._limits.vocab_size else limit
        return Plan(words.reshape(-1), _meta(rows, num_asked=rows, least=least), {})

    def _wish(self, seq: Sequence) -> _Wish:
        known = self._known.get(id(seq))
        if known is None:
            known = self._known[id(seq)] = self._read(seq)
        return known

    def _read(self, seq: Sequence) -> _Wish:
        params, limits = seq.sampling, self._limits
        kind, limit = _kind(params), seq.num_tokens or limits.vocab_size
        changes = TokenChanges.of(seq, limit, limits.eos_token_ids)
        mask = None
        if params.allowed_token_ids is not None:
            mask = mask_of(params.allowed_token_ids, limit)
        silent = changes is None and mask is None and params.logprobs is None
        silent = silent and limit == limits.vocab_size
        return _Wish(
            seq=seq,
            kind=kind,
            key=_key(seq, self._nonce),
            record=_record(params, kind, limit),
            changes=changes,
            mask=mask,
            num_top=params.logprobs,
            limit=limit,
            quiet=silent and kind is Kind.GREEDY,
        )


class _Packing:
    """One plan being laid out; dies with it."""

    def __init__(
        self,
        wishes: list[_Wish],
        masks: Mapping[int, Mask],
        ahead: Mapping[int, Seq[int]],
        columns: int,
        *,
        own: bool,
    ) -> None:
        """Of rows of so many `columns`; `own`: their limits differ."""
        self._wishes, self._ahead = wishes, ahead
        self._masks = {row: wish.mask for row, wish in enumerate(wishes) if wish.mask is not None}
        for row, mask in masks.items():
            words = _mask_words(wishes[row].limit)
            assert mask.shape == (words,), "a mask has a bit for each token"
            fixed = self._masks.get(row)
            self._masks[row] = mask if fixed is None else mask & fixed
        self._changes = {
            row: _below(columns, w, w.changes.entries(w.seq.tokens, ahead.get(row, ())))
            for row, w in enumerate(wishes)
            if w.changes is not None
        }
        self._mask_words = _mask_words(columns)
        self._least = min(wish.limit for wish in wishes) if own else 0

    def plan(self) -> Plan:
        wishes, rows = self._wishes, len(self._wishes)
        sizes = [len(changes.ids) for changes in self._changes.values()]
        entries, head = sum(sizes), rows * RECORD
        words = np.empty(head + 3 * entries + len(self._masks) * self._mask_words, dtype=np.int32)
        records = words[:head].reshape(rows, RECORD)
        records[:] = [wish.record for wish in wishes]
        self._put_keys(records)
        self._put_entries(records, words[head : head + 3 * entries].reshape(3, entries))
        self._put_masks(records, words, head + 3 * entries)
        num_top = {row: w.num_top for row, w in enumerate(wishes) if w.num_top is not None}
        changed = self._changes.keys() | self._masks.keys()
        meta = _meta(
            rows,
            num_hot=sum(wish.kind is not Kind.GREEDY for wish in wishes),
            num_filtered=sum(wish.kind is Kind.FILTERED for wish in wishes),
            num_masked=len(self._masks),
            num_entries=entries,
            most_entries=max(sizes, default=0),
            num_asked=len(num_top),
            least=self._least,
        )
        return Plan(words, meta, num_top, not changed.isdisjoint(num_top))

    def _put_keys(self, records: Words) -> None:
        keys = np.array([wish.key for wish in self._wishes], dtype=np.uint64)
        lengths = [len(wish.seq.tokens) for wish in self._wishes]
        for row, tokens in self._ahead.items():
            lengths[row] += len(tokens)
        positions = np.array(lengths, dtype=np.uint64)
        records[:, Field.KEY_LOW : Field.KEY_HIGH + 1] = noise_keys(keys, positions)

    def _put_entries(self, records: Words, entries: Words) -> None:
        ids, counts, biases = entries[0], entries[1], entries[2].view(np.float32)
        start = 0
        for row, changes in self._changes.items():
            size = len(changes.ids)
            part = slice(start, start + size)
            ids[part], counts[part], biases[part] = changes
            records[row, Field.FIRST], records[row, Field.COUNT] = start, size
            start += size

    def _put_masks(self, records: Words, words: Words, start: int) -> None:
        for row, mask in self._masks.items():
            part, mask = words[start : start + self._mask_words], mask[: self._mask_words]
            part[: len(mask)], part[len(mask) :] = mask.view(np.int32), 0
            records[row, Field.MASK] = start
            start += self._mask_words


def _mask_words(columns: int) -> int:
    return -(-columns // 32)


def _below(columns: int, wish: _Wish, entries: Entries) -> Entries:
    """Those of so many columns: a model that drafts has none for ids of an adapter's own."""
    if wish.limit <= columns:
        return entries
    there = entries.ids < columns
    return Entries(entries.ids[there], entries.counts[there], entries.biases[there])


def problem(params: SamplingParams, vocab_size: int) -> str | None:
    """What makes `params` impossible to follow with this vocabulary, in one line."""
    allowed = params.allowed_token_ids
    if allowed is None:
        return None
    if not allowed:
        return "allowed_token_ids is empty; name at least one token or leave it out"
    foreign = next((token for token in allowed if not 0 <= token < vocab_size), None)
    if foreign is not None:
        return f"allowed_token_ids holds {foreign}, which is outside 0..{vocab_size - 1}"
    return None


def mask_of(tokens: Seq[int], vocab_size: int) -> Mask:
    """The mask that allows these tokens and no others."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def noise_keys(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> Words:
    """(rows, 2): words of each row's noise: splitmix64 at `positions` of the streams `keys`."""
    x = keys + positions * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words: Words = (x ^ (x >> np.uint64(31))).view(np.int32).reshape(-1, 2)
    return words


def _key(seq: Sequence, nonce: bytes) -> int:
    """64 bits that all noise of a sequence comes from: its seed's, or its own."""
    seed = seq.sampling.seed
    text = nonce + seq.request_id.encode() if seed is None else str(seed).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _kind(params: SamplingParams) -> Kind:
    if params.temperature < GREEDY_BELOW:
        return Kind.GREEDY
    is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return Kind.FILTERED if is_filtered else Kind.PLAIN


def _record(params: SamplingParams, kind: Kind, limit: int) -> Words:
    record = np.zeros(RECORD, dtype=np.int32)
    floats = record.view(np.float32)
    record[Field.KIND] = kind
    if kind is not Kind.GREEDY:
        floats[Field.HEAT] = 1.0 / min(params.temperature, FAIR_ABOVE)
        record[Field.TOP_K] = params.top_k if 0 < params.top_k < limit else _ALL
        floats[Field.TOP_P] = max(params.top_p, 1e-9)  # 0 keeps the best token alone
        floats[Field.FLOOR] = _floor(params)
    record[Field.ASKED], record[Field.LIMIT] = params.logprobs is not None, limit
    floats[Field.REPETITION] = params.repetition_penalty
    floats[Field.FREQUENCY] = params.frequency_penalty
    floats[Field.PRESENCE] = params.presence_penalty
    return record


def _floor(params: SamplingParams) -> float:
    """p >= min_p * p_best, said of logits: at most so far below the best."""
    if params.min_p <= 0.0:
        return -math.inf
    return min(params.temperature, FAIR_ABOVE) * math.log(min(params.min_p, 1.0))


def _meta(rows: int, **counts: int) -> SampleMeta:
    return SampleMeta(torch.empty(0, dtype=torch.int32), rows, **counts)
