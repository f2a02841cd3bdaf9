"""Sequence: one request inside the engine, and the vocabulary of a step's work.

Goes in: a Submit.  Comes out: token ids, and where they stand.  Plain data: the scheduler decides,
the runner reads, and only settling appends.  `Chunk`, `StepWork` and `Sampled` are what scheduler,
batch, runner and sampler say to each other.
"""

from dataclasses import dataclass, field
from enum import Enum

from engine.messages import FinishReason, SamplingParams, TokenLogprobs
from engine.pooling_messages import PoolRequest

#: What an account begins with that is of inputs to be pooled; no revision does.
POOLED = "pooled:"


class Status(Enum):
    """Where a sequence is kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Doom:
    """How a sequence whose rows are being computed right now will end, once they are settled."""

    reason: FinishReason
    code: str
    message: str


@dataclass(slots=True, eq=False)
class PooledInput:
    """What a sequence is for that draws nothing: its hidden states become a vector or a score."""

    request: PoolRequest
    num_tokens: int  # of the input; a classifier may look at fewer
    num_cut: int = 0
    reuses: bool = True  # rows that a cached prefix no longer has are not needed
    kept: object = None  # the pooler's, of chunks so far


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt, then what was generated.

    The KV of the first `num_computed` tokens lies in `blocks` (pool block numbers, in order).
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    rev: str | None
    identity: str  # under which its KV is cached: "base" or the revision
    salt: str
    priority: int
    order: int  # of arrival
    activation: int = 0  # rows before it are the base model's, though it has a slot (aLoRA)
    num_tokens: int = 0  # the ids that it may draw are below; 0 = those of the base's tokenizer
    tenant: str = ""
    weight: float = 1.0  # its tokens are charged divided by it
    longest: int = 1 << 62  # tokens with which it ends, whatever they are
    deadline: float | None = None  # of the injected clock
    status: Status = Status.WAITING
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = -1  # -1 = base
    chain: list[bytes] = field(default_factory=list)  # keys of its full blocks
    num_entered: int = 0  # full blocks that the prefix index has seen
    cached_tokens: int | None = None  # found at the first admission
    arrived_at: float = 0.0  # of the injected clock
    queued_seconds: float | None = None  # until the first admission
    flying: int = 0  # rows of it that are being computed into its blocks, in all launched steps
    owed: int = 0  # tokens of it that launched steps are drawing, at most
    stay: int = 0  # differs whenever it has lost its blocks
    admitted_at: float = 0.0  # the last time, of the injected clock
    doom: Doom | None = None
    told: bool = False  # the first delta is out
    held: bool = False  # all that is pending is the row of a draw that waits for its mask
    pooled: PooledInput | None = None  # None: it generates

    @property
    def may_go_on(self) -> bool:
        """Whether it does not end for sure with the token that is being drawn."""
        return not self.owed or len(self.tokens) + self.owed < self.longest

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens once everything launched is settled, those being drawn included."""
        return len(self.tokens) + self.owed

    @property
    def next_row(self) -> int:
        """Position of the first token whose KV nobody has computed or is computing."""
        return self.num_computed + self.flying

    @property
    def pending(self) -> int:
        """Tokens whose KV nobody has computed or is computing; 1 while decoding."""
        return len(self.tokens) + self.owed - self.num_computed - self.flying

    @property
    def is_prompt(self) -> bool:
        """Nobody waits for its next token yet: its prompt, or all of it anew, is being computed."""
        length = len(self.tokens) + self.owed
        return length - self.num_computed - self.flying > 1 or length == self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that it may still compute, at most."""
        return self.pending + max(self.sampling.max_tokens - self.num_generated, 0)

    def check(self, block_size: int) -> None:
        """Raise AssertionError unless its numbers agree with each other."""
        runs = self.status is Status.RUNNING
        assert self.status is not Status.FINISHED, f"{self.request_id}: ended, and still here"
        assert runs or not (self.blocks or self.num_computed or self.flying), "holds while it waits"
        assert not runs or self.next_row <= len(self.blocks) * block_size, "rows without a block"
        assert not runs or (self.slot >= 0) == (self.rev is not None), "on other weights"
        assert 0 <= self.activation < self.num_prompt, "activated outside of its prompt"
        assert self.num_entered * block_size <= self.num_computed <= self.length, "KV of nothing"

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Smaller is served first and preempted last: priority, who generates, then arrival."""
        return -self.priority, self.pooled is not None, self.order

    @property
    def account(self) -> str | None:
        """Within its tenant, whose tokens they are: what is pooled takes turns with what is
        generated, on the same revision too."""
        return self.rev if self.pooled is None else POOLED + (self.rev or "")

    @property
    def reuses(self) -> bool:
        """Its blocks may come from the prefix index, and are filed there."""
        return self.pooled is None or self.pooled.reuses

    @property
    def is_done(self) -> bool:
        """All of an input that is pooled has been computed."""
        return self.pooled is not None and self.num_computed == len(self.tokens)


@dataclass(slots=True)
class Chunk:
    """Rows of one sequence in one step: `tokens[start : start + length]`.

    The last one may be a token that the step before is still drawing.  With `drafts` the last
    ones are these, which may turn out to be no tokens of the sequence.  Nobody but
    `Scheduler.put_off` changes a chunk; frozen ones take three times as long to build, once a
    sequence in each step.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool  # the last row's logits are sampled
    stay: int = 0  # the sequence's, when this was launched
    drafts: tuple[int, ...] = ()  # behind its last token: a draw for each of these rows too

    @property
    def draws(self) -> int:
        """Tokens that are drawn for it."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def inactive(self) -> int:
        """Rows at its start that are the base model's, whatever slot the sequence has."""
        return min(max(self.seq.activation - self.start, 0), self.length)


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step.  Rows of one slot are consecutive, base first, decode before prefill in a slot; but
    a chunk that begins before its sequence's activation has rows of the base model among them.

    `fences` are what the step's stream waits for: events on blocks that changed owner.
    """

    chunks: tuple[Chunk, ...]
    fences: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler drew for one chunk.  `prompt_logprobs` comes with the first token only.

    With a `doom` there was nothing to draw from, and `token` is none.  `more` are the draws behind
    drafts that were right, in order.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    doom: Doom | None = None
    more: "tuple[Sampled, ...]" = ()
