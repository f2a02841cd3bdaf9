"""Padded steps from CUDA graphs: a forward pass into static buffers, replayed with other numbers.

Goes in: batches that are padded to a rung, whose tensors never move, and a step plan.  Comes out:
logits of the sampled rows, in a buffer that never moves either.  A decode-only graph ends with the
logits of all its rows, a mixed one with its hidden states: few of its rows are sampled, and a head
of 512 rows would cost as much as a few layers.  Either leaves the hidden states behind, for what
adapters have on the head; what they have on the embedding comes ahead: such a step's graph takes
the embeddings of all rows, unless all that they have are a few rows, where a table in front of
every graph says whose (`Decoder.forward`).  The usual plans' graphs are captured at start, a plan
that none of them holds when it comes back, as long as there is room for more.  A step without a
graph runs eagerly and computes the same bits, only later.  All graphs share one memory pool: they
run one after the other.  Knows no sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels.lora_meta import LoraClass, LoraMeta, OwnRows
from engine.ladder import Ladder, Rung
from engine.models.decoder import Decoder
from engine.recording import Recorder, Regulars, Replayable, parts_of

#: What a graph bakes in: the padded sizes, the plan's class (None = base rows only), and whether
#: embeddings are given to it.
Key = tuple[Rung, LoraClass | None, bool]

#: Graphs captured at start, if a coarser choice of them keeps to it (234 at 64 sequences; 301, of
#: coarser grids, at 128).
START_GRAPHS = 304


class StepGraphs:
    """The model over one arena, whose view of each layer is in `kv`, for steps padded to a rung of
    `ladder`; `own` as in `Decoder.forward`."""

    def __init__(
        self, model: Decoder, kv: Sequence[Tensor], ladder: Ladder, own: OwnRows | None = None
    ) -> None:
        self._model, self._own = model, own
        self._kv = kv
        device, table = model.embedding.device, model.embedding
        seqs = ladder.decode[-1].seqs
        rows = max((rung.rows for rung in ladder.mixed), default=0)
        rows = max(rows, seqs)
        self._logits = model.new_logits(ladder.draws[-1]).zero_()
        self._hidden = torch.zeros(rows, table.shape[1], dtype=table.dtype, device=device)
        self._embedded = torch.zeros_like(self._hidden)
        self._graphs: dict[Key, Replayable] = {}
        self._collectives: dict[Key, int] = {}  # that ranks take part in with each of them
        self._kinds: dict[Rung, list[LoraClass]] = {}
        self._recorder, self._regulars = Recorder(device), Regulars()
        #: False: every step runs eagerly, for comparison.
        self.use_graphs = device.type == "cuda"
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def start_over(self) -> None:
        """Forget every step so far, which were a rehearsal; graphs stay."""
        self.num_replays = 0
        self._regulars.start_over()

    def kinds(self, rung: Rung) -> Sequence[LoraClass]:
        """Classes that steps of `rung` have graphs for: a plan that fits into one takes it."""
        return self._kinds.get(rung, ())

    def capture(self, batch: Batch, lora: LoraMeta | None = None, given: bool = False) -> None:
        """Capture the graph of `batch`'s rung and `lora`'s class; `given`: with embeddings.

        Start with the most rows: the others then live in the memory of the first.
        """
        rung, kind, _ = key = _key(batch, lora, given)
        self._graphs[key] = self._record(batch, lora, given)
        if kind is not None and kind not in self.kinds(rung):
            self._kinds.setdefault(rung, []).append(kind)

    def run(
        self, batch: Batch, lora: LoraMeta | None, embedded: Tensor | None = None
    ) -> Tensor | None:
        """Logits (N, num_ids) of the sampled rows in fp32, None if there are none.

        The next step overwrites them.  `embedded` as in `Decoder.forward`.
        """
        rung, given = batch.rung, embedded is not None
        assert rung is not None, "a step that is not padded has no graph"
        if embedded is not None:
            self._embedded[: rung.rows].copy_(embedded)
        graph = self._find(batch, lora, given) if self.use_graphs else None
        if graph is None:
            self._compute(batch, lora, given)
        else:
            graph.replay()
            self.num_replays += 1
            if self._model.ranks is not None:
                self._model.ranks.count += self._collectives[_key(batch, lora, given)]
        if not rung.single:
            return self.head(self.hidden(batch), batch)
        logits = self._logits[: rung.rows]
        if batch.samples_every_row:
            return logits[: len(batch.sampled)]
        if not (count := len(batch.sampled)):
            return None
        picked = self._model.new_logits(count)  # rows begin alike: no kernel is compiled for others
        return picked.copy_(logits.index_select(0, batch.sample_rows[:count]))

    def hidden(self, batch: Batch) -> Tensor:
        """Normed hidden states (T, width) of all rows of the `batch` that ran last."""
        assert batch.rung is not None
        return self._hidden[: batch.rung.rows]

    def head(self, hidden: Tensor, batch: Batch) -> Tensor | None:
        """The same from normed hidden states (T, width) of all rows."""
        if not batch.sampled:
            return None
        picked = hidden.index_select(0, batch.sample_rows)
        return self._model.logits(picked, out=self._logits[: len(picked)])[: len(batch.sampled)]

    def _find(self, batch: Batch, lora: LoraMeta | None, given: bool) -> Replayable | None:
        if lora is not None and lora.device is None:
            return None  # torch's own LoRA takes its sizes from the host: it cannot be replayed
        key = _key(batch, lora, given)
        if key not in self._graphs and self._regulars.came(key):
            kept = self._embedded.clone() if given else None  # a capture's first run overwrites it
            self.capture(batch, lora, given)
            if kept is not None:
                self._embedded.copy_(kept)
        return self._graphs.get(key)

    def _record(self, batch: Batch, lora: LoraMeta | None, given: bool) -> Replayable:
        rung, kind, _ = key = _key(batch, lora, given)

        def compute() -> None:
            ranks = self._model.ranks
            before = ranks.count if ranks is not None else 0
            self._compute(batch, lora, given)
            if ranks is not None:
                self._collectives[key] = ranks.count - before

        return self._recorder.record(compute, parts_of(rung, kind))

    def _compute(self, batch: Batch, lora: LoraMeta | None, given: bool) -> None:
        assert batch.rung is not None
        batch.attn.derived.clear()  # what attention derives has to be derived within the graph
        hidden = self.hidden(batch)
        self._model(
            batch.tokens,
            batch.positions,
            self._kv,
            batch.attn,
            lora,
            out=hidden,
            embedded=self._embedded[: batch.rung.rows] if given else None,
            own=self._own,
        )
        batch.attn.derived.clear()
        if batch.rung.single:
            self._model.logits(hidden, out=self._logits[: batch.rung.rows])


def _key(batch: Batch, lora: LoraMeta | None, given: bool = False) -> Key:
    assert batch.rung is not None, "a step that is not padded has no graph"
    kind = lora.device.kind if lora is not None and lora.device is not None else None
    return batch.rung, kind, given
