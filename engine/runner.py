"""One step on the device: pack, one forward pass, sample.

Goes in: the scheduler's work.  Comes out: a `Sampled` for each sequence whose last row is sampled.
Whatever the mix of adapters, there is one forward pass a step, and `forward_passes` counts them.
Knows nothing of queues, tiers or stop rules.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.adapters.plan import StepPlanner
from engine.batch import Batcher
from engine.memory.arena import Arena
from engine.messages import TokenLogprobs
from engine.models.decoder import Decoder
from engine.sampler import Sampler
from engine.sequence import Chunk, Sampled, Sequence, StepWork

#: Prompt rows get their logits this many at a time: 2,048 rows of a 128k vocabulary are 1 GB.
PROMPT_ROWS = 128


class Runner:
    """Runs steps eagerly.  Used from the step loop's thread only."""

    def __init__(
        self, model: Decoder, arena: Arena, batcher: Batcher, planner: StepPlanner, sampler: Sampler
    ) -> None:
        self._model = model
        self._kv = [arena.kv(layer) for layer in range(model.spec.num_layers)]
        self._device = arena.device
        self._batcher = batcher
        self._planner = planner
        self._sampler = sampler
        #: request id -> position -> log-probability of that prompt token, until the first sample.
        self._prompts: dict[str, dict[int, TokenLogprobs]] = {}
        self.forward_passes = 0
        #: What the next owner of a block that this step has used waits for; None on the CPU.
        self.fence: torch.cuda.Event | None = None

    @torch.inference_mode()
    def run(self, work: StepWork) -> dict[str, Sampled]:
        """Request id -> what was drawn, for the chunks that sample."""
        batch = self._batcher.pack(work)
        self._wait_for(work.fences)
        lora = self._planner.meta(work)
        hidden = self._model(batch.tokens, batch.positions, self._kv, batch.attn, lora)
        self.forward_passes += 1
        self._record_fence()
        self._note_prompts(work.chunks, hidden)
        if not batch.sampled:
            return {}
        logits = self._model.logits(hidden[batch.sample_rows])
        drawn = self._sampler.sample(logits, batch.sampled)
        return {
            seq.request_id: self._with_prompt(seq, one)
            for seq, one in zip(batch.sampled, drawn, strict=True)
        }

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what was kept for sequences that have ended."""
        for request_id in request_ids:
            self._prompts.pop(request_id, None)

    def _wait_for(self, fences: tuple[object, ...]) -> None:
        for fence in fences:
            assert isinstance(fence, torch.cuda.Event)
            torch.cuda.current_stream(self._device).wait_event(fence)

    def _record_fence(self) -> None:
        if self._device.type == "cuda":
            self.fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.fence.record(torch.cuda.current_stream(self._device))

    def _note_prompts(self, chunks: tuple[Chunk, ...], hidden: Tensor) -> None:
        row = 0
        for chunk in chunks:
            if _owes_prompt(chunk.seq):
                self._note_prompt(chunk, hidden[row : row + chunk.length])
            row += chunk.length

    def _note_prompt(self, chunk: Chunk, hidden: Tensor) -> None:
        """Row i speaks of token i + 1; the prompt's last row speaks of no prompt token."""
        seq, num_top = chunk.seq, chunk.seq.sampling.prompt_logprobs or 0
        end = min(chunk.start + chunk.length, seq.num_prompt - 1)
        known = self._prompts.setdefault(seq.request_id, {})
        for start in range(chunk.start, end, PROMPT_ROWS):
            stop = min(start + PROMPT_ROWS, end)
            logits = self._model.logits(hidden[start - chunk.start : stop - chunk.start])
            targets = seq.tokens[start + 1 : stop + 1]
            rows = self._sampler.prompt_logprobs(logits, targets, num_top)
            known.update(zip(range(start + 1, stop + 1), rows, strict=True))

    def _with_prompt(self, seq: Sequence, sampled: Sampled) -> Sampled:
        if not _owes_prompt(seq):
            return sampled
        known = self._prompts.pop(seq.request_id, {})
        if len(known) < seq.num_prompt - 1:  # a second Submit of this id was refused meanwhile
            return sampled
        rows = (None, *(known[i] for i in range(1, seq.num_prompt)))
        return Sampled(sampled.token, sampled.logprobs, rows)


def _owes_prompt(seq: Sequence) -> bool:
    """Asked for, and not told yet: it goes out with the first sampled token."""
    return seq.sampling.prompt_logprobs is not None and len(seq.tokens) == seq.num_prompt
