"""A rehearsal: the largest steps that can come, run once before the engine is ready.

Goes in: a runner and the sizes that bound its steps.  Comes out: nothing, but the device allocator
then holds all that a step will ever ask it for, and every kernel has been compiled.  Writes rubbish
into the arena, which nobody has used yet.
"""

from itertools import count

from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.runner import Runner
from engine.sequence import Chunk, Sequence, StepWork

#: A draw that needs everything at once, and those that take another way.
EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20, logit_bias={0: -1.0}, seed=0
)
OTHER_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.0, seed=0, min_tokens=2, stop_token_ids=(0,)),
)
#: Lengths of prompt chunks: kernels are compiled for kinds of sizes, and not after the start.
CHUNKS = (16, 128, 512)


def rehearse(runner: Runner, config: EngineConfig, *, max_len: int, num_blocks: int) -> None:
    """Run the largest prefill, the most demanding draw, and steps of every kind.  Waits.

    `max_len` is the longest sequence; `num_blocks` is the arena's.
    """
    cast = _Cast(config.block_size, max_len, num_blocks)
    decoders = [Chunk(seq, 1, 1, True) for seq in cast.sequences(config.max_num_seqs, 2)]
    steps = [_prompts(cast, config), decoders, decoders[:1]]
    for params in OTHER_WAYS:
        steps.append([Chunk(seq, 1, 1, True) for seq in cast.sequences(1, 2, params)])
    for length in CHUNKS:
        size, first = min(length, config.max_batch_tokens // 2), config.block_size
        if size < 2 or first + size > max_len:
            continue
        [fresh, begun] = cast.sequences(1, size) + cast.sequences(1, first + size)
        beside = decoders[: config.max_num_seqs // 2]
        for chunk in (Chunk(fresh, 0, size, True), Chunk(begun, first, size, True)):
            steps += [[chunk], [*beside, chunk]]
    for chunks in steps:
        runner.run(StepWork(tuple(chunks)))
    runner.start_over()


class _Cast:
    """Sequences whose blocks follow each other through the arena, again and again if need be."""

    def __init__(self, block_size: int, max_len: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._max_len = max_len
        self._num_blocks = num_blocks
        self._block = 0
        self._names = count()

    def sequences(
        self, number: int, length: int, params: SamplingParams = EVERYTHING
    ) -> list[Sequence]:
        """`number` of them, of `length` tokens or the most that there may be."""
        return [self._sequence(min(length, self._max_len), params) for _ in range(number)]

    def _sequence(self, length: int, params: SamplingParams) -> Sequence:
        blocks = -(-length // self._block_size)
        first, self._block = self._block, self._block + blocks
        return Sequence(
            request_id=f"rehearsal {next(self._names)}",
            tokens=[0] * length,
            num_prompt=length,
            sampling=params,
            rev=None,
            identity="base",
            salt="",
            priority=0,
            order=0,
            blocks=[(first + i) % self._num_blocks for i in range(blocks)],
        )


def _prompts(cast: _Cast, config: EngineConfig) -> list[Chunk]:
    """As many rows of whole prompts as a step may have, in as few prompts as they fit in."""
    chunks: list[Chunk] = []
    left = config.max_batch_tokens
    while left and len(chunks) < config.max_num_seqs:
        [seq] = cast.sequences(1, left)
        chunks.append(Chunk(seq, 0, len(seq.tokens), True))
        left -= len(seq.tokens)
    return chunks
