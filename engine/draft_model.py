"""DraftModel: a smaller model on the device that says what the served one may draw next.

Goes in: what `drafting.py` asks for.  Comes out: a draft for each.  A draft of k tokens takes k
passes.  The first computes what the model has not seen of its sequences yet, of most of them a row
or two; the others a row each.  What one pass draws is the next one's token on the device, and the
host waits for the last of them alone.

It knows no adapters: whatever a sequence runs on, its rows are the draft model's own.  It draws as
the sequence would, with the very noise that the draw to come will have: where the two models agree
the draft is right, at any temperature.  Penalties do not count the tokens of the draft itself.
"""

import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch import Batch, Batcher
from engine.drafting import Ask
from engine.graphs import StepGraphs
from engine.ladder import Ladder
from engine.models.decoder import Decoder
from engine.sampler import Sampler
from engine.sequence import Chunk, Sequence, StepWork


class DraftModel:
    """Used from the step loop's thread only.

    `kv`: the arena's view of each of the model's layers.  `sampler` is the one that draws from the
    served model.  Drafts are of `longest` tokens at the most, for as many sequences as `batcher`
    packs.
    """

    def __init__(
        self,
        model: Decoder,
        kv: Seq[Tensor],
        batcher: Batcher,
        sampler: Sampler,
        *,
        longest: int,
        max_seqs: int,
        vocab_size: int,
    ) -> None:
        self._model, self._kv = model, kv
        self._batcher, self._sampler = batcher, sampler
        self._device = model.embedding.device
        self._vocab = model.spec.vocab_size
        #: Ids that only the served model's embedding has; they are in no tokenizer.
        self._narrow = self._vocab < vocab_size
        self._told = torch.zeros(longest, max_seqs, dtype=torch.int64, device=self._device)
        self._host = self._told
        if self._device.type == "cuda":
            self._host = torch.zeros_like(self._told, device="cpu", pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.graphs = StepGraphs(model, kv, batcher.ladder) if batcher.ladder else None
        #: False: drafts are the likeliest tokens, whatever will be drawn; for comparison.
        self.coupled = True
        self.forward_passes = 0
        self._seconds = 0.0

    @property
    def ladder(self) -> Ladder | None:
        """What passes are padded to; None where they are not."""
        return self._batcher.ladder

    @torch.inference_mode()
    def propose(self, asks: Seq[Ask], fences: Seq[object] = ()) -> list[tuple[int, ...]]:
        """A draft for each of `asks`; see `drafting.DraftModel`."""
        began = time.monotonic()
        for fence in fences:
            assert isinstance(fence, torch.cuda.Event)
            torch.cuda.current_stream(self._device).wait_event(fence)
        order = sorted(asks, key=lambda ask: -ask.count)  # those that go on stay in their columns
        chunks = [Chunk(ask.seq, ask.start, ask.length, ask.count > 0) for ask in order]
        most = order[0].count if order else 0
        if not most and chunks:
            self._pass(chunks, {})
        for ahead in range(most):
            seqs = [ask.seq for ask in order if ask.count > ahead]
            if ahead:
                chunks = [Chunk(seq, len(seq.tokens) + ahead - 1, 1, True) for seq in seqs]
            logits = self._pass(chunks, {seq: at for at, seq in enumerate(seqs)})
            assert logits is not None, "somebody is to have a draft"
            ids = self._batcher.ids
            self._sampler.draft(logits, seqs, ahead, ids, coupled=self.coupled)
            self._told[ahead, : len(seqs)].copy_(ids[: len(seqs)])
        columns = self._wait(most, len(order))
        found = {ask.seq: tuple(columns[at][: ask.count]) for at, ask in enumerate(order)}
        self._seconds += time.monotonic() - began
        return [found[ask.seq] for ask in asks]

    def take_seconds(self) -> float:
        """That drafts have taken since the last call: a part of the step that they are for."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of all its passes."""
        for rung in self.ladder.all if self.ladder else ():
            assert self.graphs is not None
            self.graphs.capture(self._batcher.blank(rung))

    def start_over(self) -> None:
        """Forget every pass so far: they were a rehearsal."""
        self.forward_passes, self._seconds = 0, 0.0
        if self.graphs is not None:
            self.graphs.start_over()
        self._batcher.forget()

    # ------------------------------------------------------------- one level down
    def _pass(self, chunks: list[Chunk], drawing: dict[Sequence, int]) -> Tensor | None:
        """Logits of the rows that are drawn for; `drawing`: where the last pass's tokens are."""
        batch = self._batcher.pack(StepWork(tuple(chunks)), drawing)
        if self._narrow or any(chunk.seq.num_tokens > self._vocab for chunk in chunks):
            batch.tokens.clamp_(max=self._vocab - 1)
        self.forward_passes += 1
        if self.graphs is not None and batch.rung is not None:
            return self.graphs.run(batch, None)
        return self._eager(batch)

    def _eager(self, batch: Batch) -> Tensor | None:
        hidden = self._model(batch.tokens, batch.positions, self._kv, batch.attn, None)
        if self.graphs is not None:
            return self.graphs.head(hidden, batch)
        if not batch.sampled:
            return None
        return self._model.logits(hidden.index_select(0, batch.sample_rows))

    def _wait(self, most: int, count: int) -> list[list[int]]:
        """The drafts, a list of `most` tokens each."""
        if self._device.type == "cuda" and most:
            self._host[:most].copy_(self._told[:most], non_blocking=True)
            self._arrived.record(torch.cuda.current_stream(self._device))
            self._arrived.synchronize()
        told: list[list[int]] = self._host[:most, :count].T.tolist()
        return told
