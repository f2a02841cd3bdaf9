"""One step of a pooling core: inputs side by side, one forward, and what each is told.

Goes in: inputs with their slots.  Comes out: a Landing, and from it, when the device is through, a
PoolResult for each.  Sequences lie in the order of their slots, so that an adapter's rows are a
run, and then of their lengths.  On a card nothing here waits for it but `collect`.  Knows nothing
of queues and of who may run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.kernels import backend
from engine.models.spec import ModelSpec
from engine.pooling.answers import Answers, Computed, Lot, num_read
from engine.pooling.backbone import Backbone
from engine.pooling.queue import Item
from engine.pooling.requests import Floats, PoolRequest, PoolResult
from engine.upload import Parcel


@dataclass(frozen=True, slots=True)
class Placed:
    """An input and the slot that it runs on, -1 = the base model."""

    item: Item
    slot: int


@dataclass(frozen=True, slots=True)
class Landing:
    """A step's answers on their way to the host; `there`: when they have arrived, None: they have.
    The numbers of the lots' members are places in `batch`."""

    batch: tuple[Placed, ...]
    lots: tuple[Lot, ...]
    there: torch.cuda.Event | None = None


class StepRunner:
    """Runs steps of `max_seqs` inputs.  Used from one thread."""

    def __init__(self, backbone: Backbone, answers: Answers, *, max_seqs: int) -> None:
        self._backbone, self._answers = backbone, answers
        # What is computed ahead of it may go up on the same stream: a buffer of its own.
        self._parcel: Parcel | None = None
        self._words = 3 * max_seqs // 2 + 1

    @torch.no_grad()
    def launch(self, placed: Iterable[Placed]) -> Landing:
        """One forward; there is at least one input.  On a card it has not ended then."""
        batch = sorted(placed, key=lambda p: (p.slot, p.item.length, p.item.order))
        owners = [(p.item.length, p.slot) for p in batch]
        items = [p.item for p in batch]
        rung, known = self._backbone.padding(items)
        lora = self._answers.planner.of_runs(owners, rung, known)
        embedding = self._answers.planner.ends(owners, "embed_tokens")
        hidden = self._backbone.run(items, lora, embedding, rung)
        lots = [_leaving(lot) for lot in self._read(batch, hidden)]
        return Landing(tuple(batch), tuple(lots), _event() if hidden.is_cuda else None)

    def collect(self, landing: Landing) -> list[PoolResult]:
        """A result for each input; waits for the step."""
        if landing.there is not None:
            landing.there.synchronize()
        told: dict[int, tuple[Floats, Floats | None]] = {}
        for lot in landing.lots:
            told.update(_copied(lot))
        return [
            PoolResult(
                request_id=p.item.request.request_id,
                num_tokens=p.item.length,
                num_cut=p.item.num_cut,
                values=told[i][0],
                logits=told[i][1],
            )
            for i, p in enumerate(landing.batch)
        ]

    def _read(self, batch: Sequence[Placed], hidden: Tensor) -> list[Lot]:
        """What is told of hidden states (rows of all, hidden), behind which there may be others."""
        spec = self._backbone.spec
        padding = spec.pad_token_id if isinstance(spec, ModelSpec) else None
        starts = [0, *accumulate(p.item.length for p in batch)]
        embedded: dict[int, PoolRequest] = {}
        others: dict[int, Computed] = {}
        for i, p in enumerate(batch):
            request, count = p.item.request, p.item.length
            if request.task == "embed":
                embedded[i] = request
                continue
            if request.task == "classify" and not self._answers.by_words(p.slot):
                count = num_read(p.item.tokens, padding)
            others[i] = Computed(request, p.slot, hidden[starts[i] : starts[i] + count])
        lots = self._answers.others(others)
        if embedded:
            pooled = self._pooled(hidden, starts, embedded)
            lots += self._answers.embedded(embedded, pooled)
        return lots

    def _pooled(
        self, hidden: Tensor, starts: Sequence[int], embedded: dict[int, PoolRequest]
    ) -> Tensor:
        """(embedded, width of all kinds) fp32."""
        pooler, members = self._answers.pooler, list(embedded)
        lengths = [starts[i + 1] - starts[i] for i in members]
        # Of an input that was cut there may be no more left than its prompt.
        asked = [embedded[i].prompt_tokens for i in members]
        prompts = [min(count, n - 1) for count, n in zip(asked, lengths, strict=True)]
        if not backend.use_kernels(hidden):
            rows = [hidden[starts[i] : starts[i + 1]] for i in members]
            return pooler.pool(rows, prompts)
        if self._parcel is None:
            self._parcel = Parcel(self._words, hidden.device)
        firsts = np.array([starts[i] for i in members])
        spans = pooler.spans_of(firsts, np.array(lengths), np.array(prompts))
        (there,) = self._parcel.send([spans.ravel()])
        return pooler.pool_spans(hidden, there.view(-1, 3))


def array_of(x: Tensor) -> Floats:
    """A copy: a result must not keep the whole step's memory."""
    copied: Floats = x.float().cpu().clone().numpy()
    return copied


def _copied(lot: Lot) -> Iterator[tuple[int, tuple[Floats, Floats | None]]]:
    """Number, values and logits of each member of a lot on the host."""
    values, logits = lot.values.numpy(), None if lot.logits is None else lot.logits.numpy()
    ends = list(accumulate(lot.lengths))
    for place, number in enumerate(lot.members):
        own = slice(ends[place] - lot.lengths[place], ends[place]) if ends else place
        yield number, (values[own].copy(), None if logits is None else logits[place].copy())


def _leaving(lot: Lot) -> Lot:
    """The same as tensors on the host, which fill by and by."""
    logits = None if lot.logits is None else _to_host(lot.logits)
    return replace(lot, values=_to_host(lot.values), logits=logits)


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.float()
    there = torch.empty(x.shape, dtype=torch.float32, pin_memory=True)
    return there.copy_(x, non_blocking=True)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
