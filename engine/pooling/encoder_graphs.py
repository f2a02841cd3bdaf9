"""Small steps of an encoder from CUDA graphs: padded to a rung, out of buffers that never move.

Goes in: inputs side by side, and the plan of their adapters.  Comes out: hidden states, in a buffer
that never moves either.  Behind the inputs' rows lie rows of nobody, up to the rung's: attention
launches programs for them that do nothing, and what they hold is anything.  Graphs of base rows are
captured at the start, those of an adapters' plan when steps like it come back.  A padded step
without a graph runs eagerly and computes the same bits.  Knows no pooling and no requests.

An encoder is launched kernel by kernel in some 450 us a layer, whatever the rows: BGE-large took 11
to 13 ms for 512 rows, which are a millisecond of an H200's time.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.lora_meta import LoraClass, LoraMeta
from engine.kernels.ragged_attention import Ragged
from engine.ladder import InputLadder, Rung
from engine.models.encoder import Encoder
from engine.pooling.queue import Item
from engine.recording import Recorder, Regulars, Replayable, parts_of
from engine.upload import UploadRing

#: What a graph bakes in: the padded sizes, and the plan's class (None = base rows only).
Key = tuple[Rung, LoraClass | None]
Words = TypeVar("Words", npt.NDArray[np.int32], Tensor)


class EncoderGraphs:
    """The model for steps padded to a rung of `ladder`.  Used from the step loop's thread only."""

    def __init__(self, encoder: Encoder, ladder: InputLadder) -> None:
        self._encoder, self._ladder = encoder, ladder
        table = encoder.word
        rows = ladder.all[-1].rows
        self._ring = UploadRing(max(_words(rung) for rung in ladder.all), table.device)
        self._hidden = torch.zeros(rows, table.shape[1], dtype=table.dtype, device=table.device)
        self._graphs: dict[Key, Replayable] = {}
        self._kinds: dict[Rung, list[LoraClass]] = {}
        self._recorder, self._regulars = Recorder(table.device), Regulars()
        #: False: every step runs eagerly, for comparison.
        self.use_graphs = table.is_cuda
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def find(self, items: Sequence[Item]) -> Rung | None:
        """What a step of these is padded to; None: it is not.  Inputs with rows that nobody sees
        have attention one by one, whose sizes are the host's."""
        if any(item.request.unseen for item in items):
            return None
        return self._ladder.find(sum(item.length for item in items), len(items))

    def kinds(self, rung: Rung) -> Sequence[LoraClass]:
        """Classes that steps of `rung` have graphs for: a plan that fits into one takes it."""
        return self._kinds.get(rung, ())

    def capture(self, progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Graphs of base rows for every rung, the largest first: the others then live in the memory
        of the first."""
        rungs = self._ladder.all[::-1]
        for done, rung in enumerate(rungs, start=1):
            self._capture(rung, None)
            progress(done / len(rungs))

    @torch.no_grad()
    def run(self, items: Sequence[Item], rung: Rung, lora: LoraMeta | None) -> Tensor:
        """Hidden states (rung.rows, hidden); those behind the items' rows are nobody's.  The next
        step overwrites them."""
        self._upload(items, rung)
        graph = self._find_graph(rung, lora) if self.use_graphs else None
        if graph is None:
            self._compute(rung, lora)
        else:
            graph.replay()
            self.num_replays += 1
        return self._hidden[: rung.rows]

    # ------------------------------------------------------------- one level down
    def _upload(self, items: Sequence[Item], rung: Rung) -> None:
        """Rows of nobody have token, type and position 0, and inputs of nobody begin and end where
        the last one ends."""
        host = self._ring.next().view(np.int32)
        lengths = tuple(item.length for item in items)
        starts, tokens, positions, types = _places(host, rung)
        starts[: len(items) + 1] = (0, *accumulate(lengths))
        starts[len(items) + 1 :] = count = sum(lengths)
        ids = np.concatenate([item.tokens for item in items])
        tokens[:count], positions[:count] = ids, self._encoder.spec.packed_positions(ids, lengths)
        for part in (tokens, positions):
            part[count:] = 0
        types[:] = 0
        for item, start in zip(items, starts, strict=False):
            if item.types is not None:
                types[start : start + item.length] = item.types
        self._ring.send(_words(rung))

    def _find_graph(self, rung: Rung, lora: LoraMeta | None) -> Replayable | None:
        if lora is not None and lora.device is None:
            return None  # torch's own LoRA takes its sizes from the host: it cannot be replayed
        key = rung, _class_of(lora)
        if key not in self._graphs and self._regulars.came(key):
            self._capture(rung, lora)
        return self._graphs.get(key)

    @torch.no_grad()
    def _capture(self, rung: Rung, lora: LoraMeta | None) -> None:
        kind = _class_of(lora)
        compute, parts = lambda: self._compute(rung, lora), parts_of(rung, kind)
        self._graphs[rung, kind] = self._recorder.record(compute, parts)
        if kind is not None:
            self._kinds.setdefault(rung, []).append(kind)

    def _compute(self, rung: Rung, lora: LoraMeta | None) -> None:
        there = self._ring.device_words.view(torch.int32)
        starts, tokens, positions, types = _places(there, rung)
        ragged = Ragged((), there.device, uploaded=starts, most=rung.rows)
        known = types if self._encoder.spec.num_types else None
        hidden = self._encoder(tokens, positions, known, ragged, lora)
        self._hidden[: rung.rows].copy_(hidden)


def _places(words: Words, rung: Rung) -> tuple[Words, Words, Words, Words]:
    """Of int32 `words`: where inputs begin (seqs + 1,); tokens, positions and types (rows,)."""
    first, rows = rung.seqs + 1, rung.rows
    parts = [words[first + n * rows : first + (n + 1) * rows] for n in range(3)]
    return words[:first], parts[0], parts[1], parts[2]


def _words(rung: Rung) -> int:
    """int64 of a step's upload."""
    return (rung.seqs + 1 + 3 * rung.rows) // 2 + 1


def _class_of(lora: LoraMeta | None) -> LoraClass | None:
    return lora.device.kind if lora is not None and lora.device is not None else None
