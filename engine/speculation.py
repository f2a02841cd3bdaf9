"""Speculation: which sequences are given drafts, how long, and how many of them were right.

Goes in: sequences that decode, and what became of their drafts.  Comes out: drafts, tokens that a
sequence may draw next, for the scheduler to have computed in one step with the token before them;
or how long they may be, where a model drafts (`drafting.py`).

A row draws with noise of its own position, whoever else is in the step (`engine/sampler.py`).  So
each draft's row is drawn as it would have been without drafts, and drafts are right as far as the
draws equal them: what is told is the same, token for token, at any temperature.  (It is rejection
sampling too: a draft is right with its probability p, and a draw that differs has the distribution
of what is left.)

Who never gets drafts, and why:
- guided sequences: the mask of a token is made once the token before it is known (`guides.py`);
- those whose request wants none;
- those whose next token is the last that they may have: there is nothing to gain.
Everything else is exact row by row: penalties, bias, bans, allowed tokens, log-probabilities.

Drafts cost rows.  A revision's length follows from how often its drafts were right lately, down to
none; then one is tried now and then.  With more sequences drafts become fewer, down to none.
Knows no blocks and no device.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.ngram import NgramIndex
from engine.sequence import Sampled, Sequence

#: Rows of those who decode and of their drafts in one step.  Mixed steps on a card are padded to 64
#: rows at the least (`ladder.py`), and up to there a large model takes the time of reading its
#: weights: on an H200 a step of 8 sequences takes 5.97 ms with 24 rows or with 40, 6.66 with 72.
ROWS = 64
#: Right tokens that a draft has to promise: what any draft costs, as a share of a plain step.  On
#: an H200 a step with drafts takes 36% longer than a plain one of one sequence, and 34% of eight,
#: whether they are of 2 tokens or of 8.  Each token of a model's draft has its own cost besides.
WORTH = 0.36
#: What is thought of a revision before its first draft, as if so many had been tried.
FIRST_SHARE, FIRST_TRIES = 0.7, 8.0
#: A try counts 1/e after so many others.
MEMORY_TRIES = 64.0
#: Of a revision without drafts, one of so many that could have been made is tried.
PROBE_EVERY = 64
#: Places of long prompts that are learned in one step: 0.2 ms (2 cores).  A guess takes 1 to 10 us.
LEARNED_A_STEP = 512


def may_speculate(seq: Sequence) -> bool:
    """Whether `seq` may have drafts at all; see above."""
    return not seq.sampling.grammar and seq.sampling.draft_tokens != 0


def draft_rows(max_num_seqs: int, tokens: int) -> int:
    """Rows of drafts that one step may hold; `tokens` a sequence at the most, 0 = none."""
    return min(max_num_seqs * tokens, ROWS - 1)


def verified(drafts: Seq[int], drawn: Seq[Sampled]) -> Sampled:
    """Draw i stands on the first i drafts: those count whose drafts are what was drawn.

    One that cannot be drawn from is left to the next step, unless it is the first.
    """
    count = 1
    while count <= len(drafts) and drawn[count - 1].token == drafts[count - 1]:
        if drawn[count].doom is not None:
            break
        count += 1
    first = drawn[0]
    more = tuple(drawn[1:count])
    return Sampled(first.token, first.logprobs, first.prompt_logprobs, first.doom, more)


@dataclass(slots=True)
class _Record:
    """How a revision's drafts fared lately.  A try is a draft whose forerunners were all right."""

    right: float = FIRST_SHARE * FIRST_TRIES
    tries: float = FIRST_TRIES
    passed_over: int = 0  # since the last one: drafts that were not worth it

    def length(self, most: int, cost: float) -> int:
        """Of the next draft: as long as each token's chance is its `cost` at least; 0 if all of
        them together promise too little."""
        share, length = min(self.right / self.tries, 1.0), most
        if 0.0 < share < 1.0 and 0.0 < cost < 1.0:
            length = min(most, int(math.log(cost) / math.log(share) + 1e-9))
        elif share < cost:
            length = 0
        promised = sum(share**place for place in range(1, length + 1)) - cost * length
        return length if promised >= WORTH else 0

    def note(self, proposed: int, accepted: int, *, probe: bool) -> None:
        """So many of a draft's tokens were right, from the first on."""
        if probe:  # what was known is old, and counts little
            kept = min(1.0, FIRST_TRIES / self.tries)
            self.right, self.tries = self.right * kept, self.tries * kept
        tries = accepted + (accepted < proposed)
        kept = math.exp(-tries / MEMORY_TRIES)
        self.right = self.right * kept + accepted
        self.tries = self.tries * kept + tries
        self.passed_over = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one draft."""

    rev: str | None
    proposed: int
    accepted: int  # and told: a stop token may cut it short


class Speculation:
    """Drafts of up to `tokens` a sequence; steps of up to `rows` rows have any.

    `cost`: of a draft's token by a model, as a share of a step; 0 = from the text itself.  Used
    from the step loop's thread.
    """

    def __init__(self, tokens: int, rows: int, cost: float = 0.0) -> None:
        self.tokens = tokens
        self.cost = cost
        self._rows = min(rows, ROWS)
        self._counted: set[Sequence] = set()  # by `is_due`, of the draft that is asked for next
        self._indexes: dict[Sequence, NgramIndex] = {}
        self._records: dict[str | None, _Record] = {}
        self._outcomes: list[Outcome] = []
        self._limit = 0  # tokens of a draft in this step
        self._unlearned = 0  # places that may still be learned in this step

    def open(self, decoding: int) -> int:
        """A step of so many sequences that decode begins: what a draft may have at the most."""
        self._unlearned, self._limit = LEARNED_A_STEP, 0
        if decoding:
            self._limit = max(0, min(self.tokens, (self._rows - decoding) // decoding))
        return self._limit

    def drafts(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """What `seq`, all of whose tokens are known, may draw from its next token on."""
        most = self._most(seq, most)
        guess = self._guess(seq, most) if most else ()
        return guess[: self._own_length(seq, most)] if guess else ()

    def longest(self, seq: Sequence, most: int) -> int:
        """Of a model's draft for `seq`, all of whose tokens are known; 0 = it is not worth it."""
        most = self._most(seq, most)
        return self._own_length(seq, most) if most else 0

    def is_due(self, seq: Sequence, *, by_model: bool = False) -> bool:
        """Whether `seq`, whose next token is being drawn, is likely to get a draft behind it."""
        if seq.longest - len(seq.tokens) < 3 or not may_speculate(seq):
            return False
        if not by_model and len(self._guess(seq, 2)) < 2:
            return False
        self._counted.add(seq)
        return self._length(seq, self._limit) > 0

    def note(self, seq: Sequence, proposed: int, accepted: int, *, right: int) -> None:
        """Of a draft of `proposed` tokens `right` were drawn and `accepted` of them told."""
        record = self._record(seq.rev)
        record.note(proposed, right, probe=not record.length(self.tokens, self.cost))
        self._outcomes.append(Outcome(seq.rev, proposed, accepted))

    def take_outcomes(self) -> list[Outcome]:
        """Of all drafts since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def forget(self, seq: Sequence) -> None:
        """It has ended."""
        self._indexes.pop(seq, None)
        self._counted.discard(seq)

    def forget_revision(self, rev: str) -> None:
        """It is gone."""
        self._records.pop(rev, None)

    # ------------------------------------------------------------- one level down
    def _most(self, seq: Sequence, most: int) -> int:
        """Of `most` tokens, those that `seq` may have, and wants."""
        if not may_speculate(seq):
            return 0
        asked = seq.sampling.draft_tokens
        most = most if asked is None else min(most, asked)
        return max(min(most, seq.longest - len(seq.tokens) - 1), 0)

    def _record(self, rev: str | None) -> _Record:
        record = self._records.get(rev)
        if record is None:
            record = self._records[rev] = _Record()
        return record

    def _guess(self, seq: Sequence, most: int) -> tuple[int, ...]:
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = NgramIndex()
        self._unlearned -= index.learn(seq.tokens, self._unlearned)
        return index.guess(seq.tokens, most)

    def _own_length(self, seq: Sequence, most: int) -> int:
        """Of a draft that is made now; `is_due` may have counted it already."""
        is_new = seq not in self._counted
        self._counted.discard(seq)
        return self._length(seq, most, count=is_new)

    def _length(self, seq: Sequence, most: int, *, count: bool = True) -> int:
        """Of a draft that could be made; counts those that are not worth it."""
        record = self._record(seq.rev)
        length = record.length(most, self.cost)
        if not length:
            record.passed_over += count
            return int(record.passed_over >= PROBE_EVERY)
        return length
