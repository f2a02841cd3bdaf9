"""What fits: limits of a step, whether a request can ever run, and the step under construction.

Goes in: sequences with the rows they want.  Comes out: a StepWork within the token budget, in slot
order.  A `StepBuilder` lives for one pass.  Knows nothing of queues or of who comes first.
"""

from dataclasses import dataclass, field

from engine.adapters.residency import Residency
from engine.memory.reclaim import Reclaimer
from engine.messages import Submit
from engine.sequence import Chunk, Sequence, StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes of one engine, all resolved.  `max_batch_tokens` is rows a step."""

    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    starve_after: float = 2.0  # seconds

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens`."""
        return -(-num_tokens // self.block_size)


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
    if submit.rev is not None and not residency.knows(submit.rev):
        return Refusal("model_not_found", f"revision {submit.rev[:12]} is unknown")
    return None


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


@dataclass(slots=True)
class StepBuilder:
    """Rows chosen so far; `left` is what remains of the token budget."""

    left: int
    preempted: bool = False
    _rows: dict[Sequence, int] = field(default_factory=dict)
    _fences: list[object] = field(default_factory=list)

    def add(self, seq: Sequence, length: int) -> None:
        """The next `length` pending tokens of `seq` are computed in this step."""
        self._rows[seq] = length
        self.left -= length

    def drop(self, seq: Sequence) -> None:
        """`seq` was preempted in this very pass."""
        self.preempted = True
        self.left += self._rows.pop(seq, 0)

    def wait_for(self, fences: tuple[object, ...]) -> None:
        """Blocks that were taken for this step carry these events."""
        self._fences.extend(fences)

    def build(self) -> StepWork | None:
        """Base first, then slot by slot, decode before prefill; None if there are no rows."""
        chunks = [
            Chunk(seq, seq.next_row, length, samples=length == seq.pending, stay=seq.stay)
            for seq, length in self._rows.items()
        ]
        chunks.sort(key=lambda c: (c.seq.slot, c.length > 1))  # stable: by rank within
        return StepWork(tuple(chunks), tuple(self._fences)) if chunks else None
