"""A rehearsal: the largest steps that can come, run once before the engine is ready.

Goes in: a runner and the sizes that bound its steps.  Comes out: nothing, but the device allocator
then holds all that a step will ever ask it for, and every kernel has been compiled.  Writes rubbish
into the arena, which nobody has used yet.
"""

import torch

from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.runner import Runner
from engine.sequence import Chunk, Sequence, StepWork

#: A draw that needs everything at once.
EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20, logit_bias={0: -1.0}, seed=0
)


def rehearse(runner: Runner, config: EngineConfig, *, max_len: int, num_blocks: int) -> None:
    """Run the largest prefill, its worst cut, and the most demanding draw.  Waits for the device.

    `max_len` is the longest sequence; `num_blocks` is the arena's.
    """
    rows, seqs = config.max_batch_tokens, config.max_num_seqs

    def sequence(name: str, length: int, start: int) -> Sequence:
        """Blocks from `start` on, again and again if there are too few."""
        count = -(-length // config.block_size)
        return Sequence(
            request_id=name,
            tokens=[0] * length,
            num_prompt=length,
            sampling=EVERYTHING,
            rev=None,
            identity="base",
            salt="",
            priority=0,
            order=0,
            blocks=[(start + i) % num_blocks for i in range(count)],
        )

    prompts: list[Sequence] = []
    left = rows
    while left and len(prompts) < seqs:
        length = min(left, max_len)
        prompts.append(
            sequence(f"prompt {len(prompts)}", length, (rows - left) // config.block_size)
        )
        left -= length
    decoders = [sequence(f"row {i}", min(2, max_len), i) for i in range(seqs)]
    steps = [
        [Chunk(seq, 0, len(seq.tokens), True) for seq in prompts],
        [Chunk(seq, len(seq.tokens) - 1, 1, True) for seq in decoders],
        [Chunk(decoders[0], len(decoders[0].tokens) - 1, 1, True)],
    ]
    for chunks in steps:
        runner.run(StepWork(tuple(chunks)))
    torch.cuda.synchronize()
    runner.start_over()
