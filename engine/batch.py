"""One step's work as flat arrays: what the forward pass and the sampler read.

Goes in: the scheduler's chunks, in row order.  Comes out: a `Batch` of tensors on the device, all
cut from one upload.  Knows nothing of adapters (`adapters/plan.py`) or of how chunks were chosen.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.attention import AttentionMeta
from engine.sequence import Sequence, StepWork

#: Uploads in flight before a buffer is used again; each is guarded by its own event.
RING = 3


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows, S sequences, N of which are sampled."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    attn: AttentionMeta
    sample_rows: Tensor  # (N,) int64: the last row of each sampled sequence
    sampled: tuple[Sequence, ...]  # N


class Batcher:
    """Packs steps of at most `max_rows` rows and `max_seqs` sequences of `max_blocks` blocks."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        words = 3 * max_rows + max_seqs + (max_seqs * max_blocks + 1) // 2
        self._ring = _UploadRing(words, device)

    def pack(self, work: StepWork) -> Batch:
        """Lay `work` out in row order and start its one upload."""
        chunks = work.chunks
        lengths = np.array([c.length for c in chunks], dtype=np.int64)
        ends = np.cumsum(lengths)
        rows, seqs = int(ends[-1]), len(chunks)
        seq_lens = tuple(c.start + c.length for c in chunks)
        width = -(-max(seq_lens) // self._block_size)  # blocks of the longest sequence
        sampled = [i for i, c in enumerate(chunks) if c.samples]

        cut = np.cumsum([0, rows, rows, rows, len(sampled), (seqs * width + 1) // 2])
        host = self._ring.next()[: cut[-1]]
        tokens, positions, mapping, picks, words = (host[a:b] for a, b in pairwise(cut))
        tables = words.view(np.int32)[: seqs * width].reshape(seqs, width)
        tables[:] = 0
        for i, (chunk, end) in enumerate(zip(chunks, ends.tolist(), strict=True)):
            begin, stop = end - chunk.length, chunk.start + chunk.length
            tokens[begin:end] = chunk.seq.tokens[chunk.start : stop]
            positions[begin:end] = np.arange(chunk.start, stop)
            count = -(-stop // self._block_size)
            tables[i, :count] = chunk.seq.blocks[:count]
        owner = np.repeat(np.arange(seqs), lengths)
        block, offset = np.divmod(positions, self._block_size)
        mapping[:] = tables[owner, block].astype(np.int64) * self._block_size + offset
        picks[:] = ends[sampled] - 1

        device = self._ring.upload(int(cut[-1]))
        parts = [device[a:b] for a, b in pairwise(cut.tolist())]
        return Batch(
            tokens=parts[0],
            positions=parts[1],
            attn=AttentionMeta(
                query_starts=(0, *ends.tolist()),
                seq_lens=seq_lens,
                slot_mapping=parts[2],
                block_tables=parts[4].view(torch.int32)[: seqs * width].view(seqs, width),
                block_size=self._block_size,
            ),
            sample_rows=parts[3],
            sampled=tuple(chunks[i].seq for i in sampled),
        )


class _UploadRing:
    """Host buffers of `words` int64 each; on CUDA pinned, and used again only after their copy."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        count = RING if self._cuda else 1  # a CPU step has ended before the next one is packed
        self._hosts = [
            torch.empty(words, dtype=torch.int64, pin_memory=self._cuda) for _ in range(count)
        ]
        self._events = [_event() for _ in range(count)] if self._cuda else []
        self._turn = 0

    def next(self) -> npt.NDArray[np.int64]:
        """The buffer to fill."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._cuda:
            self._events[self._turn].synchronize()
        array: npt.NDArray[np.int64] = self._hosts[self._turn].numpy()
        return array

    def upload(self, words: int) -> Tensor:
        """The first `words` of the buffer that was filled, on the device."""
        host = self._hosts[self._turn][:words]
        if not self._cuda:
            return host
        copy = host.to(self._device, non_blocking=True)
        self._events[self._turn].record(torch.cuda.current_stream(self._device))
        return copy


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
