"""What fits: limits of a step, whether a request can ever run, and the step under construction.

Goes in: sequences with the rows they want.  Comes out: a StepWork within the token budget, in slot
order.  A `StepBuilder` lives for one pass.  Knows nothing of queues or of who comes first.
"""

import math
from dataclasses import dataclass

import msgspec

from engine.adapters.residency import Residency
from engine.memory.reclaim import Reclaimer
from engine.messages import Submit
from engine.sequence import Chunk, Sequence, StepWork

#: A backlog of prompts is meant to be gone in so many steps, were they all as large as the first.
DRAIN_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes of one engine, all resolved.

    `max_batch_tokens` is rows a step, `mixed_tokens` rows of a step in which somebody decodes, and
    `crowd_tokens` what these may grow to while many prompts wait.
    """

    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    mixed_tokens: int
    crowd_tokens: int = 0  # 0 = mixed_tokens
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    starve_after: float = 2.0  # seconds
    speculation_tokens: int = 0  # drafts a sequence; 0 = none
    #: Rows of inputs to be pooled, of a step in which somebody decodes; 0 = half as many as decode.
    pooled_tokens: int = 1 << 30
    draft_cost: float = 0.0  # of a draft's token by a model, as a share of a step

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def longest(self, submit: Submit) -> int:
        """Tokens, the prompt's included, with which a request ends for sure."""
        return min(len(submit.prompt) + submit.sampling.max_tokens, self.max_model_len)

    def rows(self, decoding: int, backlog: int = 0) -> int:
        """Rows of a step with `decoding` rows of sequences that make tokens, where `backlog` rows
        of prompts could be computed.

        A token costs everybody the whole step, so prompts then get what `mixed_tokens` leaves; but
        never less than a quarter of it, or a full house would keep every prompt out.  A crowd gets
        more, in proportion, so that steps grow and shrink slowly, and what arrives evenly is
        computed in steps of one size.
        """
        if not decoding:
            return self.max_batch_tokens
        floor = max(self.block_size, self.mixed_tokens // 4)
        crowd = min(decoding + backlog // DRAIN_STEPS, self.crowd_tokens)
        return min(max(self.mixed_tokens, crowd, decoding + floor), self.max_batch_tokens)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request cannot run: an EngineError code and one line."""

    code: str
    message: str


def refusal(submit: Submit, limits: SchedulerLimits, residency: Residency) -> Refusal | None:
    """What is wrong with the request itself, or None."""
    length, longest = len(submit.prompt), limits.max_model_len
    if not length:
        return Refusal("invalid_value", "the prompt is empty; send at least one token")
    if length + min(submit.sampling.max_tokens, 1) > longest:
        return Refusal(
            "invalid_value",
            f"the prompt has {length} tokens and the context holds {longest}; shorten it",
        )
    if not 0 < submit.weight < math.inf:
        return Refusal("invalid_value", f"a weight of {submit.weight} is no share; give above 0")
    if submit.rev is not None and not residency.knows(submit.rev):
        return Refusal("model_not_found", f"revision {submit.rev[:12]} is unknown")
    return None


def invoke(submit: Submit, residency: Residency) -> tuple[Submit, int] | Refusal:
    """What is to run, for a known revision, and its first row on which the adapter acts.

    That is 0, but for an activated LoRA where its tokens begin for the last time in the prompt.
    """
    wanted = () if submit.rev is None else residency.manifest(submit.rev).alora_tokens
    if not wanted:
        return submit, 0
    activation = last_place(submit.prompt, wanted)
    if activation >= 0:
        return submit, activation
    if submit.alora_fallback == "base":
        return msgspec.structs.replace(submit, rev=None), 0
    return Refusal(
        "invocation_missing",
        f"the prompt lacks the invocation tokens {list(wanted)} from which this aLoRA acts; "
        'add them, or send "alora_fallback": "base" to have the base model answer',
    )


def last_place(tokens: list[int], wanted: tuple[int, ...]) -> int:
    """Where `wanted`, not empty, begins for the last time in `tokens`; -1: nowhere.

    From the end, where it mostly is: all of 128k ids take 3 ms.
    """
    size, first = len(wanted), wanted[0]
    for at in range(len(tokens) - size, -1, -1):
        if tokens[at] == first and tuple(tokens[at : at + size]) == wanted:
            return at
    return -1


def never_fits(
    num_tokens: int, rev: str | None, limits: SchedulerLimits, memory: Reclaimer, res: Residency
) -> Refusal | None:
    """Whether KV of `num_tokens` has no place even with everything evictable gone."""
    blocks = limits.blocks(num_tokens)
    fixed = sum(len(r.blocks) for r in res.slots.rows.values() if r.pinned and r.rev != rev)
    own = res.manifest(rev).num_blocks if rev is not None else 0
    most = min(memory.kv_limit, memory.pool.num_blocks - fixed - own)
    if blocks <= most:
        return None
    if most <= 0:
        message = (
            f"the adapter takes {own} blocks and pinned ones {fixed}, which leaves none of "
            f"{memory.pool.num_blocks} for KV; unpin some or enlarge the pool"
        )
    else:
        message = (
            f"{num_tokens} tokens take {blocks} blocks and at most {most} can be had; "
            "shorten the request or enlarge the pool"
        )
    return Refusal("no_room", message)


class StepBuilder:
    """Rows chosen so far; `left` is what nobody has.  Decode rows first, then drafts, then `open`
    it to prompts.

    Prompts share their room so that a long one neither starves nor holds short ones up: the first
    by rank has a right to half of it, and the rest goes to whoever has the fewest rows to go.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.left = limits.max_batch_tokens
        self.preempted = False  # somebody gave way in this very pass
        self._limits = limits
        self._rows: dict[Sequence, int] = {}
        self._drafts: dict[Sequence, tuple[int, ...]] = {}
        self._fences: list[object] = []
        self._first: Sequence | None = None
        self._kept = 0  # rows that are the first prompt's, whoever else comes
        self._door = 0  # rows that are a newcomer's, whoever else runs
        self._pooled = 0  # rows that inputs to be pooled may have yet

    def decode(self, seq: Sequence) -> None:
        """The next token of `seq` is computed in this step."""
        self._rows[seq] = 1
        self.left -= 1

    @property
    def decoding(self) -> list[Sequence]:
        """Those with a row so far; before the step is opened to prompts."""
        return list(self._rows)

    def draft(self, seq: Sequence, drafts: tuple[int, ...]) -> None:
        """So are `drafts`, in case they follow; `seq` has its row and blocks for all of them."""
        self._rows[seq] += len(drafts)
        self._drafts[seq] = drafts
        self.left -= len(drafts)

    @property
    def fences(self) -> tuple[object, ...]:
        """Of all blocks that were taken so far."""
        return tuple(self._fences)

    def wait_for(self, fences: tuple[object, ...]) -> None:
        """Blocks that were taken for this step carry these events."""
        self._fences.extend(fences)

    def open(self, first: Sequence | None, backlog: int = 0, *, queued: bool) -> None:
        """All decode rows are in.  `first` is the one that ranks first of the prompts that run,
        `backlog` the rows that prompts could have.

        If others are `queued`, a block of rows is kept for them: whoever begins is known to be
        short or long, and short ones need not wait until a long one has ended before them.
        """
        decoding = sum(self._rows.values())
        self.left = self._limits.rows(decoding, backlog) - decoding
        pooled = self._limits.pooled_tokens or -(-decoding // 2)
        self._pooled = min(pooled, self.left) if decoding else self.left
        self._first = first
        self._kept = min(self._due(first), -(-self.left // 2)) if first else 0
        half = self.left - self._kept
        self._door = min(self._limits.block_size, half // 2) if queued else 0

    @property
    def full(self) -> bool:
        """There is no row for any other prompt than the first."""
        return self.left <= self._kept

    def takes(self, seq: Sequence) -> bool:
        """Whether a step that is not full has a row for `seq`."""
        return self._due(seq) > 0

    def go_on(self, seq: Sequence) -> None:
        """Rows of a prompt that runs, other than the first."""
        self._take(seq, self._spare(seq) - self._door)

    def begin(self, seq: Sequence) -> None:
        """Rows of a newcomer: a block at least, unless the step is `full`."""
        self._take(seq, max(self._spare(seq), min(self._limits.block_size, self.left - self._kept)))

    def build(self) -> StepWork | None:
        """Base first, then slot by slot, decode before prefill; None if there are no rows."""
        if self._first is not None:
            self._take(self._first, self.left)
        chunks = [
            Chunk(seq, seq.next_row, length, length == seq.pending and not seq.pooled, seq.stay)
            for seq, length in self._rows.items()
        ]
        for chunk in chunks if self._drafts else ():
            if drafts := self._drafts.get(chunk.seq):
                chunk.samples, chunk.drafts = True, drafts
        chunks.sort(key=_place)
        return StepWork(tuple(chunks), tuple(self._fences)) if chunks else None

    def _spare(self, seq: Sequence) -> int:
        """Rows for another prompt: all but the first one's half if it has fewer to go, else what
        the first leaves over."""
        first = self._first
        if first is None or (-seq.priority, seq.pending) < (-first.priority, first.pending):
            return self.left - self._kept
        return self.left - self._due(first)

    def _due(self, seq: Sequence) -> int:
        """Rows that it may use, as far as it goes by what it is for."""
        if seq.pooled is None:
            return seq.pending
        first = self._first
        kept = self._kept if first is not None and first is not seq and first.pooled else 0
        return min(seq.pending, self._pooled - kept)

    def _take(self, seq: Sequence, most: int) -> None:
        rows = min(self._due(seq), most)
        if rows > 0:
            self._rows[seq] = rows
            self.left -= rows
            self._pooled -= rows if seq.pooled else 0


def _place(chunk: Chunk) -> int:
    seq = chunk.seq
    slot = seq.slot if chunk.start + chunk.length > seq.activation else -1
    return 2 * slot + (chunk.length > 1)
