"""The model that a pooling engine runs: an encoder, or a decoder without the cache of one.

Goes in: inputs, whole and side by side, and what adapters have for their rows.  Comes out: hidden
states.  Knows nothing of queues, of pooling and of heads.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.lora_meta import LoraClass, LoraMeta
from engine.kernels.ragged_attention import Ragged
from engine.ladder import InputLadder, Rung
from engine.models.bases import BaseSpec
from engine.models.decoder import Decoder, load_model
from engine.models.encoder import Encoder, load_encoder
from engine.models.encoder_spec import EncoderSpec
from engine.pooling.encoder_graphs import EncoderGraphs
from engine.pooling.queue import Ids, Item
from engine.upload import Parcel

#: Rows of a block of a decoder's step; its attention reads whole ones.
BLOCK_ROWS = 16
#: Of a decoder with windows on a CPU so many rows have a mask together, a multiple of BLOCK_ROWS:
#: that of an input of 32,768 tokens as a whole would be a gigabyte.
STRIP_ROWS = 1024


class Backbone(Protocol):
    """A loaded model.  `head` has what its files hold of a classifier, by the engine's names."""

    @property
    def spec(self) -> BaseSpec: ...
    @property
    def head(self) -> Mapping[str, Tensor]: ...
    @property
    def layers(self) -> nn.ModuleList: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    def capture(self, progress: Callable[[float], None]) -> None:
        """Graphs of the usual steps, if it has any; `progress` gets 0..1."""
        ...

    def padding(self, items: Sequence[Item]) -> tuple[Rung | None, Sequence[LoraClass]]:
        """What a step of these is padded to, None: it is not; and the classes of plans that it has
        graphs for then."""
        ...

    def run(
        self,
        items: Sequence[Item],
        lora: LoraMeta | None,
        embedding: LoraMeta | None,
        rung: Rung | None = None,
    ) -> Tensor:
        """Hidden states (rows of all, hidden), with `rung` (its rows, hidden).  `lora` is the plan
        of the layers, `embedding` that of the rows whose adapters have a part ahead of them; None =
        nobody has any.  `rung` is what `padding` said."""
        ...


class PackedEncoder:
    """Sees both sides, and keeps nothing.  Steps of `max_rows` rows and `max_seqs` inputs have
    pinned memory of their own to go up from.  `ladder`: what small ones are padded to."""

    kv_bytes = 0

    def __init__(
        self, encoder: Encoder, *, max_rows: int, max_seqs: int, ladder: InputLadder | None = None
    ) -> None:
        self._encoder = encoder
        self.spec, self.head, self.layers = encoder.spec, encoder.head, encoder.layers
        self.weight_bytes = _bytes([*encoder.parameters(), *encoder.head.values()])
        words = 3 * (max_rows // 2 + 1) + max_seqs // 2 + 1  # two of what is sent in each
        self._parcel = Parcel(words, encoder.word.device)
        #: Padded steps; None where steps are not padded.
        self.graphs = EncoderGraphs(encoder, ladder) if ladder is not None else None

    def capture(self, progress: Callable[[float], None]) -> None:
        """See Backbone."""
        if self.graphs is not None and self.graphs.use_graphs:
            self.graphs.capture(progress)

    def padding(self, items: Sequence[Item]) -> tuple[Rung | None, Sequence[LoraClass]]:
        """See Backbone."""
        rung = self.graphs.find(items) if self.graphs is not None else None
        known = self.graphs.kinds(rung) if self.graphs is not None and rung is not None else ()
        return rung, known

    def run(
        self,
        items: Sequence[Item],
        lora: LoraMeta | None,
        embedding: LoraMeta | None,
        rung: Rung | None = None,
    ) -> Tensor:
        """See Backbone; no adapter has anything ahead of an encoder's layers."""
        if self.graphs is not None and rung is not None:
            return self.graphs.run(items, rung, lora)
        lengths = tuple(item.length for item in items)
        ids = np.concatenate([item.tokens for item in items])
        starts = np.array([0, *accumulate(lengths)])
        arrays = [starts, ids, self.spec.packed_positions(ids, lengths)]
        if any(item.types is not None for item in items):
            arrays.append(np.concatenate([_types(item) for item in items]))
        there, tokens, positions, *types = self._parcel.send([a.astype(np.int32) for a in arrays])
        unseen = [item.request.unseen for item in items]
        seen = tuple(n - m for n, m in zip(lengths, unseen, strict=True)) if any(unseen) else None
        ragged = Ragged(lengths, self._encoder.word.device, there, seen)
        hidden: Tensor = self._encoder(tokens, positions, types[0] if types else None, ragged, lora)
        return hidden


class PackedDecoder:
    """The decoder's own layers and kernels, over keys and values that live as long as a layer: all
    layers write theirs to the same place.  So there is room for those of one layer and of the
    largest step, of `max_rows` rows and `max_seqs` inputs, and none for what could be reused."""

    def __init__(self, decoder: Decoder, *, max_rows: int, max_seqs: int) -> None:
        self._decoder = decoder
        self.spec, self.head, self.layers = decoder.spec, decoder.classifier, decoder.layers
        self.weight_bytes = _bytes([*decoder.parameters(), *decoder.classifier.values()])
        weight, spec = decoder.embedding, decoder.spec
        self._device = weight.device
        blocks = max_rows // BLOCK_ROWS + max_seqs  # an input may end within a block
        self._frame = torch.zeros(
            (blocks, 2, BLOCK_ROWS, spec.num_kv_heads, spec.head_dim),
            dtype=weight.dtype,
            device=self._device,
        )
        self.kv_bytes = _bytes([self._frame])

    @property
    def embedding(self) -> Tensor:
        """(vocab, hidden), which is the head too where the two are tied."""
        return self._decoder.embedding.data

    def capture(self, progress: Callable[[float], None]) -> None:
        """See Backbone: it has no graphs."""

    def padding(self, items: Sequence[Item]) -> tuple[Rung | None, Sequence[LoraClass]]:
        """See Backbone."""
        return None, ()

    def run(
        self,
        items: Sequence[Item],
        lora: LoraMeta | None,
        embedding: LoraMeta | None,
        rung: Rung | None = None,
    ) -> Tensor:
        """See Backbone."""
        lengths = [item.length for item in items]
        tokens = np.concatenate([item.tokens for item in items])
        places, tables, slots = _lay_out(lengths)
        starts, ends = tuple(accumulate(lengths, initial=0)), tuple(lengths)
        if self.spec.sliding_windows and self._device.type == "cpu":
            starts, ends, whose = _strips(lengths)
            tables = tables[whose]
        there = torch.from_numpy(np.stack([tokens, places, slots])).to(self._device)  # one upload
        meta = AttentionMeta(
            query_starts=starts,
            seq_lens=ends,
            slot_mapping=there[2],
            block_tables=torch.from_numpy(tables).to(self._device),
            block_size=BLOCK_ROWS,
        )
        decoder = self._decoder
        embedded = None if embedding is None else decoder.embed(there[0], embedding)
        frames = [self._frame] * decoder.spec.num_layers
        hidden: Tensor = decoder(there[0], there[1], frames, meta, lora, embedded=embedded)
        return hidden


def load_backbone(
    folder: Path,
    spec: BaseSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    max_rows: int,
    max_seqs: int,
    ladder: InputLadder | None,
    progress: Callable[[float], None],
) -> PackedEncoder | PackedDecoder:
    """The model in `folder`, whose spec is known.  Raises as `load_encoder` and `load_model` do."""
    if isinstance(spec, EncoderSpec):
        encoder = load_encoder(
            folder, device=device, dtype=dtype, deterministic=deterministic, progress=progress
        )
        return PackedEncoder(encoder, max_rows=max_rows, max_seqs=max_seqs, ladder=ladder)
    decoder = load_model(
        folder,
        device=device,
        dtype=dtype,
        deterministic=deterministic,
        purpose="pool",
        progress=progress,
    )
    return PackedDecoder(decoder, max_rows=max_rows, max_seqs=max_seqs)


def _types(item: Item) -> Ids:
    return np.zeros(item.length, np.int64) if item.types is None else item.types


def _lay_out(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs behind each other, each from a block of its own on: every row's position (T,), the
    blocks of each input (inputs, most blocks), and every row's slot in them (T,)."""
    blocks = [-(-length // BLOCK_ROWS) for length in lengths]
    firsts = [0, *accumulate(blocks)][:-1]
    tables = np.zeros((len(lengths), max(blocks)), np.int32)
    for table, first, count in zip(tables, firsts, blocks, strict=True):
        table[:count] = np.arange(first, first + count)
    places = np.concatenate([np.arange(length) for length in lengths])
    slots = places + BLOCK_ROWS * np.repeat(firsts, lengths)
    return places, tables, slots


def _strips(lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    """The same rows as more and shorter runs: where each begins, and all end; how many tokens of
    its input there are up to its end; and which input it is of."""
    counts, ends, whose = [], [], []
    for number, length in enumerate(lengths):
        for first in range(0, length, STRIP_ROWS):
            ends.append(min(first + STRIP_ROWS, length))
            counts.append(ends[-1] - first)
            whose.append(number)
    return tuple(accumulate(counts, initial=0)), tuple(ends), whose


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
