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
from engine.layout import HEAD_DENSE
from engine.models.spec import ModelSpec
from engine.pooling.backbone import Backbone
from engine.pooling.head import Head, scores
from engine.pooling.pooler import Pooler, unit_length
from engine.pooling.queue import Item
from engine.pooling.requests import Floats, PoolResult
from engine.pooling.token_scores import TokenScores

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

    backbone: Backbone
    pooler: Pooler
    head: Head
    words: TokenScores | None
    planner: StepPlanner

    @torch.no_grad()
    def run(self, placed: Iterable[Placed]) -> list[PoolResult]:
        """One forward; there is at least one input."""
        batch = sorted(placed, key=lambda p: (p.slot, p.item.length, p.item.order))
        lora = self.planner.of_runs((p.item.length, p.slot) for p in batch)
        hidden = self._forward(batch, lora)
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

    def _forward(self, batch: Sequence[Placed], lora: LoraMeta | None) -> list[Tensor]:
        """Hidden states of each, (length, hidden)."""
        owners = [(p.item.length, p.slot) for p in batch]
        embedding = self.planner.ends(owners, "embed_tokens")
        hidden = self.backbone.run([p.item for p in batch], lora, embedding)
        return list(torch.split(hidden, [p.item.length for p in batch]))

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
        """As they leave the model: what stands behind pooling is for one vector."""
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
            found = self._logits(slot, [batch[i].item for i in some], [hidden[i] for i in some])
            rule = self.pooler.spec.score_rule(found.shape[1])
            for i, raw, score in zip(some, found, scores(found, rule), strict=True):
                logits[i], told[i] = raw, score

    def _logits(self, slot: int, items: Sequence[Item], rows: Sequence[Tensor]) -> Tensor:
        """By the adapter's own head, else by the base's, else by words of its output head."""
        own, pair = self._head_of(slot)
        if self.words is not None and "score.weight" not in own:
            return self.words.logits(rows, self.planner.ends_of(slot))
        padding = self._padding
        cut = [x[: _seen(item.tokens, padding)] for item, x in zip(items, rows, strict=True)]
        return self.head.logits(cut, own, pair)

    @property
    def _padding(self) -> int | None:
        """The token that a decoder's classifier passes by at the end, as transformers has it."""
        spec = self.backbone.spec
        return spec.pad_token_id if isinstance(spec, ModelSpec) else None

    def _head_of(self, slot: int) -> tuple[dict[str, Tensor], LoraRows | None]:
        """What the adapter in `slot` has of a head: parts, and a pair on its dense layer."""
        end, pairs = self.backbone.spec.num_layers, self.planner.ends_of(slot)
        own: dict[str, Tensor] = {}
        for part in self.head.spec.parts:
            rows = pairs.get((end, f"{part}.rows"))
            if rows is not None:
                whole = torch.cat(rows.a)
                own[part] = whole if part in MATRICES else whole.flatten()
        if "score.bias" in own:  # the last row may be filled up
            own["score.bias"] = own["score.bias"][: len(own["score.weight"])]
        return own, pairs.get((end, HEAD_DENSE))


def _seen(tokens: Sequence[int], padding: int | None) -> int:
    """Tokens up to the last that is not `padding`; the first alone if all are."""
    count = len(tokens)
    while padding is not None and count > 1 and tokens[count - 1] == padding:
        count -= 1
    return count


def _groups(members: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    found: dict[K, list[int]] = {}
    for i in members:
        found.setdefault(key(i), []).append(i)
    return found


def _array(x: Tensor) -> Floats:
    """A copy: a result must not keep the whole step's memory."""
    copied: Floats = x.float().cpu().clone().numpy()
    return copied
