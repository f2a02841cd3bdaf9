"""Decode-only steps: one forward pass into one static buffer of logits, from a CUDA graph.

Goes in: padded batches of single rows, whose tensors never move, and a step plan.  Comes out: their
logits, in a buffer that never moves either.  The base model's graphs and the usual plans' are
captured at start, a rarer plan's when it comes back, as long as there is room for more.  A step
without a graph runs eagerly and computes the same bits, only later.  All graphs share one memory
pool: they run one after the other.  Knows no sequences.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels.lora_meta import LoraMeta
from engine.memory.arena import Arena
from engine.models.decoder import Decoder

#: Padded rows, and what else a graph bakes in: None = base rows only, or the plan's class.
Key = tuple[int, Hashable]

#: Graphs that may be captured after the start; the memory plan counts them.
LATE_GRAPHS = 32
#: How often a class has to come before it is worth the pause of a capture.
WORTH_IT = 3


class DecodeSteps:
    """The model over one arena, for steps of at most `max_rows` single rows."""

    def __init__(self, model: Decoder, arena: Arena, max_rows: int) -> None:
        self._model = model
        self._kv = [arena.kv(layer) for layer in range(model.spec.num_layers)]
        vocab = model.spec.vocab_size
        self._logits = torch.zeros(max_rows, vocab, dtype=torch.float32, device=arena.device)
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._seen: dict[Key, int] = {}
        self._late = LATE_GRAPHS
        #: False: every step runs eagerly, for comparison.
        self.use_graphs = arena.device.type == "cuda"
        if self.use_graphs:
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def capture(self, batch: Batch, lora: LoraMeta | None = None) -> Tensor:
        """Compute `batch` once, eagerly, and capture the graph of its rows and `lora`'s class.

        Start with the most rows: the others then live in the memory of the first.
        """
        current = torch.cuda.current_stream(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Outside of the graph first: kernels are compiled and workspaces made there.
            logits = self._forward(batch, lora)
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._forward(batch, lora)
            graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs[_key(batch, lora)] = graph
        return logits

    def run(self, batch: Batch, lora: LoraMeta | None) -> Tensor:
        """Logits (rows, vocab) in fp32, padding included; the next step overwrites them."""
        key = _key(batch, lora)
        graph = self._graphs.get(key)
        if graph is not None and self.use_graphs:
            graph.replay()
            self.num_replays += 1
            return self._logits[: len(batch.tokens)]
        if self.use_graphs and self._is_worth_it(key, lora):
            return self.capture(batch, lora)
        return self._forward(batch, lora)

    def _is_worth_it(self, key: Key, lora: LoraMeta | None) -> bool:
        if not self._late or (lora is not None and lora.device is None):
            return False  # torch's own LoRA takes its sizes from the host: it cannot be replayed
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] < WORTH_IT:
            return False
        self._late -= 1
        return True

    def _forward(self, batch: Batch, lora: LoraMeta | None) -> Tensor:
        batch.attn.derived.clear()  # what attention derives has to be derived within the graph
        hidden = self._model(batch.tokens, batch.positions, self._kv, batch.attn, lora)
        batch.attn.derived.clear()
        return self._model.logits(hidden, out=self._logits[: len(batch.tokens)])


def _key(batch: Batch, lora: LoraMeta | None) -> Key:
    if lora is None:
        return len(batch.tokens), None
    return len(batch.tokens), "torch" if lora.device is None else lora.device.kind
