"""One step of a pooling core: inputs side by side, one forward, and what each is told.

Goes in: inputs with their slots.  Comes out: a PoolResult for each.  Sequences lie in the order of
their slots, so that an adapter's rows are a run, and then of their lengths.  Knows nothing of
queues and of who may run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.lora_meta import LoraMeta
from engine.models.spec import ModelSpec
from engine.pooling.answers import Answers, Computed, num_read
from engine.pooling.backbone import Backbone
from engine.pooling.queue import Item
from engine.pooling.requests import Floats, PoolResult


@dataclass(frozen=True, slots=True)
class Placed:
    """An input and the slot that it runs on, -1 = the base model."""

    item: Item
    slot: int


@dataclass(slots=True)
class StepRunner:
    """Runs steps.  Used from one thread."""

    backbone: Backbone
    answers: Answers

    @torch.no_grad()
    def run(self, placed: Iterable[Placed]) -> list[PoolResult]:
        """One forward; there is at least one input."""
        batch = sorted(placed, key=lambda p: (p.slot, p.item.length, p.item.order))
        lora = self.answers.planner.of_runs((p.item.length, p.slot) for p in batch)
        rows = self._read(batch, self._forward(batch, lora))
        told = self.answers.of(
            [Computed(p.item.request, p.slot, x) for p, x in zip(batch, rows, strict=True)]
        )
        return [
            PoolResult(
                request_id=p.item.request.request_id,
                num_tokens=p.item.length,
                num_cut=p.item.num_cut,
                values=array_of(one.values),
                logits=None if one.logits is None else array_of(one.logits),
            )
            for p, one in zip(batch, told, strict=True)
        ]

    def _forward(self, batch: Sequence[Placed], lora: LoraMeta | None) -> list[Tensor]:
        """Hidden states of each, (length, hidden)."""
        owners = [(p.item.length, p.slot) for p in batch]
        embedding = self.answers.planner.ends(owners, "embed_tokens")
        hidden = self.backbone.run([p.item for p in batch], lora, embedding)
        return list(torch.split(hidden, [p.item.length for p in batch]))

    def _read(self, batch: Sequence[Placed], hidden: list[Tensor]) -> list[Tensor]:
        """What each is made of, as `Computed` has it."""
        spec = self.backbone.spec
        padding = spec.pad_token_id if isinstance(spec, ModelSpec) else None
        embedded = [i for i, p in enumerate(batch) if p.item.request.task == "embed"]
        if embedded:
            asked = [batch[i].item.request for i in embedded]
            rows = [hidden[i] for i in embedded]
            # Of an input that was cut there may be no more left than its prompt.
            prompts = [min(r.prompt_tokens, len(x) - 1) for r, x in zip(asked, rows, strict=True)]
            for i, one in zip(embedded, self.answers.pooler.pool(rows, prompts), strict=True):
                hidden[i] = one
        for i, p in enumerate(batch):
            if p.item.request.task == "classify" and not self.answers.by_words(p.slot):
                hidden[i] = hidden[i][: num_read(p.item.tokens, padding)]
        return hidden


def array_of(x: Tensor) -> Floats:
    """A copy: a result must not keep the whole step's memory."""
    copied: Floats = x.float().cpu().clone().numpy()
    return copied
