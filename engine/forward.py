"""The forward pass of one packed step, by a graph or eagerly: what every rank of a model does.

Goes in: a batch, its plan, embeddings if some row's adapter has a part in them, and the prompt
rows whose logits are owed.  Comes out: the logits of the sampled rows, and the hidden states.  One
rank calls the model as often as another, whatever it makes of the answer.  Knows no sequences.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.batch import Batch
from engine.graphs import StepGraphs
from engine.kernels.lora_meta import LoraMeta, OwnRows
from engine.ladder import Ladder
from engine.memory.arena import Arena
from engine.models.decoder import Decoder

#: Rows [first, last) of a step that logits are owed for.
Rows = tuple[int, int]


class Forward:
    """A model over one arena.  Used from the step loop's thread only."""

    def __init__(
        self, model: Decoder, arena: Arena, ladder: Ladder | None, own: OwnRows | None = None
    ) -> None:
        """`own`: what steps find rows of adapters' own in, whose embeddings are not given."""
        self.model, self._own = model, own
        self._kv = [arena.kv(layer) for layer in range(model.spec.num_layers)]
        #: Padded steps; None where steps are not padded.
        self.graphs = StepGraphs(model, self._kv, ladder, own) if ladder else None

    def run(
        self,
        batch: Batch,
        lora: LoraMeta | None,
        embedded: Tensor | None,
        owed: Sequence[Rows] = (),
        tell: Callable[[Tensor, Tensor], None] = lambda logits, hidden: None,
    ) -> tuple[Tensor | None, Tensor]:
        """Logits (N, num_ids) of the sampled rows, None if there are none, and all rows' hidden
        states (T, hidden).  `tell` gets logits and hidden states of each of the `owed`, in order.
        """
        if self.graphs is not None and batch.rung is not None and not owed:
            logits = self.graphs.run(batch, lora, embedded)
            return logits, self.graphs.hidden(batch)
        hidden = self.model(
            batch.tokens,
            batch.positions,
            self._kv,
            batch.attn,
            lora,
            embedded=embedded,
            own=self._own,
        )
        for first, last in owed:
            tell(self.model.logits(hidden[first:last]), hidden[first:last])
        if self.graphs is not None:
            return self.graphs.head(hidden, batch), hidden
        if not batch.sampled:
            return None, hidden
        return self.model.logits(hidden.index_select(0, batch.sample_rows)), hidden
