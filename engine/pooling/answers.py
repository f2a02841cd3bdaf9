"""Hidden states → what each input is told: a vector, one for each token, or scores.

Goes in: what was computed of inputs in a step, and on whose slot each ran.  Comes out: tensors, on
the device still.  Knows nothing of steps and of how rows came to lie where they do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.adapters.plan import StepPlanner
from engine.kernels.lora_meta import LoraRows
from engine.layout import HEAD_DENSE
from engine.models.bases import BaseSpec
from engine.pooling.head import Head, scores
from engine.pooling.pooler import Pooler, unit_length
from engine.pooling.queue import Ids
from engine.pooling.requests import PoolRequest
from engine.pooling.token_scores import TokenScores

K = TypeVar("K")
#: Of a head's parts, those that are no vectors.
MATRICES = ("head.dense.weight", "score.weight")


@dataclass(frozen=True, slots=True)
class Computed:
    """An input.  `rows`: (width,) fp32 as pooled, of one that is embedded; (tokens, hidden) of one
    whose tokens are; of one that is classified so many that the last one, or all of them, are what
    a head reads."""

    request: PoolRequest
    slot: int  # that it ran on, -1 = the base model
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Told:
    """`values` (width,), (tokens, width) or (labels,); `logits` (labels,) of a classifier."""

    values: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lot:
    """Several inputs' answers as one tensor, so that they leave the device together.

    `values` (members, width); where `lengths` has the number of each one's rows, their token
    vectors one behind the other.  `logits` (members, labels) of a classifier.
    """

    members: tuple[int, ...]  # numbers of inputs
    values: Tensor
    logits: Tensor | None = None
    lengths: tuple[int, ...] = ()

    def told(self) -> Iterable[tuple[int, Told]]:
        """One for each."""
        values = (
            torch.split(self.values, list(self.lengths)) if self.lengths else self.values.unbind()
        )
        logits = [None] * len(values) if self.logits is None else self.logits.unbind()
        return zip(self.members, map(Told, values, logits), strict=True)


@dataclass(frozen=True, slots=True)
class Answers:
    """`words`: what scores where there is no classifier.  `planner` must have planned the step."""

    spec: BaseSpec
    pooler: Pooler
    head: Head
    words: TokenScores | None
    planner: StepPlanner

    @torch.no_grad()
    def of(self, inputs: Sequence[Computed]) -> list[Told]:
        """One for each."""
        told: dict[int, Told] = {}
        numbered = dict(enumerate(inputs))
        embedded = [i for i, one in numbered.items() if one.request.task == "embed"]
        lots = self.others({i: one for i, one in numbered.items() if one.request.task != "embed"})
        if embedded:
            pooled = torch.stack([inputs[i].rows for i in embedded])
            lots += self.embedded({i: inputs[i].request for i in embedded}, pooled)
        for lot in lots:
            told.update(lot.told())
        return [told[i] for i in range(len(inputs))]

    @torch.no_grad()
    def embedded(self, requests: Mapping[int, PoolRequest], pooled: Tensor) -> list[Lot]:
        """`requests` by number, pooled (requests, width) fp32 in their order."""
        numbers = list(requests)

        def wish(place: int) -> tuple[bool | None, int | None]:
            asked = requests[numbers[place]]
            return asked.normalize, asked.dimensions

        lots = []
        for (normalize, dimensions), places in groups(range(len(numbers)), wish).items():
            all_alike = len(places) == len(numbers)
            rows = pooled if all_alike else torch.stack([pooled[place] for place in places])
            values = self.pooler.finish(rows, normalize=normalize, dimensions=dimensions)
            lots.append(Lot(tuple(numbers[place] for place in places), values))
        return lots

    @torch.no_grad()
    def others(self, inputs: Mapping[int, Computed]) -> list[Lot]:
        """Of inputs by number, none of which is embedded."""
        lots = []
        for task, members in groups(inputs, lambda i: inputs[i].request.task).items():
            assert task != "embed"
            make = self._tokens if task == "tokens" else self._classified
            lots += make(inputs, members)
        return lots

    def by_words(self, slot: int) -> bool:
        """Whether what runs on `slot` is scored by words, and not by a head."""
        if self.words is None:
            return False
        return (self.spec.num_layers, "score.weight.rows") not in self.planner.ends_of(slot)

    def _tokens(self, inputs: Mapping[int, Computed], members: Sequence[int]) -> list[Lot]:
        """As they leave the model, since what stands behind pooling is for one vector; but of late
        interaction, where nothing is pooled."""
        if self.pooler.spec.late:
            return self._late(inputs, members)
        lots = []
        for width, some in groups(members, lambda i: inputs[i].request.dimensions).items():
            found = []
            for i in some:
                rows = inputs[i].rows.float()[:, :width]
                found.append(unit_length(rows) if inputs[i].request.normalize else rows)
            lots.append(Lot(tuple(some), torch.cat(found), lengths=tuple(map(len, found))))
        return lots

    def _late(self, inputs: Mapping[int, Computed], members: Sequence[int]) -> list[Lot]:
        lots = []

        def wish(i: int) -> tuple[bool | None, int | None]:
            return inputs[i].request.normalize, inputs[i].request.dimensions

        for (normalize, dimensions), some in groups(members, wish).items():
            rows = torch.cat([inputs[i].rows for i in some]).float()
            values = self.pooler.finish(rows, normalize=normalize, dimensions=dimensions)
            lengths = tuple(len(inputs[i].rows) for i in some)
            lots.append(Lot(tuple(some), values, lengths=lengths))
        return lots

    def _classified(self, inputs: Mapping[int, Computed], members: Sequence[int]) -> list[Lot]:
        lots = []
        for slot, some in groups(members, lambda i: inputs[i].slot).items():
            found = self._logits(slot, [inputs[i].rows for i in some])
            rule = self.pooler.spec.score_rule(found.shape[1])
            lots.append(Lot(tuple(some), scores(found, rule), found))
        return lots

    def _logits(self, slot: int, rows: Sequence[Tensor]) -> Tensor:
        """By the adapter's own head, else by the base's, else by words of its output head."""
        if self.by_words(slot):
            assert self.words is not None
            return self.words.logits(rows, self.planner.ends_of(slot))
        own, pair = self._head_of(slot)
        return self.head.logits(rows, own, pair)

    def _head_of(self, slot: int) -> tuple[dict[str, Tensor], LoraRows | None]:
        """What the adapter in `slot` has of a head: parts, and a pair on its dense layer."""
        end, pairs = self.spec.num_layers, self.planner.ends_of(slot)
        own: dict[str, Tensor] = {}
        for part in self.head.spec.parts:
            rows = pairs.get((end, f"{part}.rows"))
            if rows is not None:
                whole = torch.cat(rows.a)
                own[part] = whole if part in MATRICES else whole.flatten()
        if "score.bias" in own:  # the last row may be filled up
            own["score.bias"] = own["score.bias"][: len(own["score.weight"])]
        return own, pairs.get((end, HEAD_DENSE))


def num_read(tokens: Ids, padding: int | None) -> int:
    """How many rows of an input a classifier's head looks at: a decoder's, as transformers has it,
    those up to the last token that is not `padding`; the first alone if all are."""
    count = len(tokens)
    while padding is not None and count > 1 and tokens[count - 1] == padding:
        count -= 1
    return count


def groups(members: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    """Members by their key, in order."""
    found: dict[K, list[int]] = {}
    for i in members:
        found.setdefault(key(i), []).append(i)
    return found
