"""One step of a pooling core: inputs side by side, one forward, and what each is told.

Goes in: inputs with their slots.  Comes out: a PoolResult for each.  Sequences lie in the order of
their slots, so that an adapter's rows are a run, and then of their lengths.  Knows nothing of
queues and of who may run.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.adapters.plan import StepPlanner
from engine.kernels.lora_meta import LoraMeta, LoraRows
from engine.kernels.ragged_attention import Ragged
from engine.layout import HEAD_DENSE
from engine.models.encoder import Encoder
from engine.pooling.head import Head, scores
from engine.pooling.pooler import Pooler, unit_length
from engine.pooling.queue import Item
from engine.pooling.requests import Floats, PoolResult

K = TypeVar("K")
#: Of a head's parts, those that are no vectors.
MATRICES = ("head.dense.weight", "score.weight")


@dataclass(frozen=True, slots=True)
class Placed:
    """An input and the slot that it runs on, -1 = the base model."""

    item: Item
    slot: int


@dataclass(slots=True)
class StepRunner:
    """Runs steps.  Used from one thread."""

    encoder: Encoder
    pooler: Pooler
    head: Head
    planner: StepPlanner

    @torch.no_grad()
    def run(self, placed: Iterable[Placed]) -> list[PoolResult]:
        """One forward; there is at least one input."""
        batch = sorted(placed, key=lambda p: (p.slot, p.item.length, p.item.order))
        lora = self.planner.of_runs((p.item.length, p.slot) for p in batch)
        hidden = self._forward([p.item for p in batch], lora)
        told: dict[int, Tensor] = {}
        logits: dict[int, Tensor] = {}
        by_task = _groups(range(len(batch)), lambda i: batch[i].item.request.task)
        for task, members in by_task.items():
            if task == "embed":
                self._embed(batch, members, hidden, told)
            elif task == "tokens":
                self._tokens(batch, members, hidden, told)
            else:
                self._classify(batch, members, hidden, told, logits)
        return [
            PoolResult(
                request_id=p.item.request.request_id,
                num_tokens=p.item.length,
                num_cut=p.item.num_cut,
                values=_array(told[i]),
                logits=_array(logits[i]) if i in logits else None,
            )
            for i, p in enumerate(batch)
        ]

    def _forward(self, items: Sequence[Item], lora: LoraMeta | None) -> list[Tensor]:
        """Hidden states of each, (length, hidden)."""
        spec, device = self.encoder.spec, self.encoder.word.device
        ragged = Ragged(tuple(item.length for item in items), device)
        rows = [token for item in items for token in item.tokens]
        positions = [p for item in items for p in spec.position_ids(item.tokens)]
        words = [rows, positions]
        if any(item.types is not None for item in items):
            words.append([t for item in items for t in item.types or [0] * item.length])
        there = torch.tensor(words).to(device)  # one upload
        types = there[2] if len(words) > 2 else None
        hidden: Tensor = self.encoder(there[0], there[1], types, ragged, lora)
        return list(torch.split(hidden, list(ragged.lengths)))

    def _embed(
        self,
        batch: Sequence[Placed],
        members: Sequence[int],
        hidden: Sequence[Tensor],
        told: dict[int, Tensor],
    ) -> None:
        asked = [batch[i].item.request for i in members]
        rows = [hidden[i] for i in members]
        # Of an input that was cut there may be no more left than its prompt.
        prompts = [min(r.prompt_tokens, len(x) - 1) for r, x in zip(asked, rows, strict=True)]
        pooled = self.pooler.pool(rows, prompts)
        alike = _groups(range(len(rows)), lambda n: (asked[n].normalize, asked[n].dimensions))
        for (normalize, dimensions), some in alike.items():
            done = self.pooler.finish(pooled[some], normalize=normalize, dimensions=dimensions)
            told.update((members[n], one) for n, one in zip(some, done, strict=True))

    def _tokens(
        self,
        batch: Sequence[Placed],
        members: Sequence[int],
        hidden: Sequence[Tensor],
        told: dict[int, Tensor],
    ) -> None:
        """As they leave the encoder: what stands behind pooling is for one vector."""
        for i in members:
            asked = batch[i].item.request
            rows = hidden[i].float()[:, : asked.dimensions]
            told[i] = unit_length(rows) if asked.normalize else rows

    def _classify(
        self,
        batch: Sequence[Placed],
        members: Sequence[int],
        hidden: Sequence[Tensor],
        told: dict[int, Tensor],
        logits: dict[int, Tensor],
    ) -> None:
        for slot, some in _groups(members, lambda i: batch[i].slot).items():
            own, pair = self._head_of(slot)
            found = self.head.logits([hidden[i] for i in some], own, pair)
            rule = self.pooler.spec.score_rule(found.shape[1])
            for i, raw, score in zip(some, found, scores(found, rule), strict=True):
                logits[i], told[i] = raw, score

    def _head_of(self, slot: int) -> tuple[dict[str, Tensor], LoraRows | None]:
        """What the adapter in `slot` has of a head: parts, and a pair on its dense layer."""
        spec, pairs = self.encoder.spec, self.planner.ends_of(slot)
        own: dict[str, Tensor] = {}
        for part in spec.head.parts:
            rows = pairs.get((spec.num_layers, f"{part}.rows"))
            if rows is not None:
                whole = torch.cat(rows.a)
                own[part] = whole if part in MATRICES else whole.flatten()
        if "score.bias" in own:  # the last row may be filled up
            own["score.bias"] = own["score.bias"][: len(own["score.weight"])]
        return own, pairs.get((spec.num_layers, HEAD_DENSE))


def _groups(members: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    found: dict[K, list[int]] = {}
    for i in members:
        found.setdefault(key(i), []).append(i)
    return found


def _array(x: Tensor) -> Floats:
    """A copy: a result must not keep the whole step's memory."""
    copied: Floats = x.float().cpu().clone().numpy()
    return copied
