"""Sequence: one request inside the engine, and the vocabulary of a step's work.

Goes in: a Submit.  Comes out: token ids, and where they stand.  Plain data: the scheduler decides,
the runner reads, and only settling appends.  `Chunk`, `StepWork` and `Sampled` are what scheduler,
batch, runner and sampler say to each other.
"""

from dataclasses import dataclass, field
from enum import Enum

from engine.messages import FinishReason, SamplingParams, TokenLogprobs


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
    deadline: float | None = None  # of the injected clock
    status: Status = Status.WAITING
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = -1  # -1 = base
    chain: list[bytes] = field(default_factory=list)  # keys of its full blocks
    num_entered: int = 0  # full blocks that the prefix index has seen
    cached_tokens: int | None = None  # found at the first admission
    flying: int = 0  # rows of it that are being computed into its blocks, in all launched steps
    owed: int = 0  # tokens of it that launched steps are drawing
    stay: int = 0  # differs whenever it has lost its blocks
    doom: Doom | None = None
    told: bool = False  # the first delta is out

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
        return self.length - self.next_row

    @property
    def is_prompt(self) -> bool:
        """Nobody waits for its next token yet: its prompt, or all of it anew, is being computed."""
        return self.pending > 1 or self.length == self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that it may still compute, at most."""
        return self.pending + max(self.sampling.max_tokens - self.num_generated, 0)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is served first and preempted last: priority, then arrival."""
        return -self.priority, self.order


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one sequence in one step: `tokens[start : start + length]`.

    The last one may be a token that the step before is still drawing.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool  # the last row's logits are sampled
    stay: int = 0  # the sequence's, when this was launched


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step.  Rows of one slot are consecutive, base first, decode before prefill in a slot.

    `fences` are what the step's stream waits for: events on blocks that changed owner.
    """

    chunks: tuple[Chunk, ...]
    fences: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler drew for one chunk.  `prompt_logprobs` comes with the first token only."""

    token: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
