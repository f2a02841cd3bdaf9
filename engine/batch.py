"""One step's work as flat arrays: what the forward pass and the sampler read.

Goes in: the scheduler's chunks, in row order.  Comes out: a `Batch` of tensors on the device, all
views of one buffer that is filled by one upload and never moves: a CUDA graph reads the same
addresses in every step.  On a card a step is padded to a rung of `ladder.py`, with rows that write
nothing and sequences of no keys.  Knows nothing of adapters (`adapters/plan.py`, which gets a part
of the upload) or of how chunks were chosen.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.draws import NO_DRAWS, Draws, draws_of, nobodys
from engine.kernels.attention_meta import AttentionMeta
from engine.ladder import Ladder, Rung
from engine.sequence import Chunk, Sequence, StepWork
from engine.upload import UploadRing, Words


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of S sequences, N of which are sampled; T and S count padding, N does not."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    attn: AttentionMeta
    #: (N or more,) int64: the rows that are sampled, then row 0 if steps are padded.
    sample_rows: Tensor
    sampled: tuple[Sequence, ...]  # N: whose row each is; with drafts a sequence has several
    #: Sampled row -> drafts that it stands on, where it stands on any.
    ahead: Mapping[int, tuple[int, ...]]
    #: What the step is padded to; None = to nothing.
    rung: Rung | None
    #: Sampled row i is row i.
    samples_every_row: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """A step as it went up: enough for another Batcher, made alike, to lay it out again.

    `words` are what each field holds of it; of the plan, its last words.
    """

    seqs: int
    rows: int
    draws: int
    width: int  # of the block tables
    words: tuple[npt.NDArray[np.generic], ...]


@dataclass(frozen=True, slots=True)
class _Fields:
    """Views of one buffer of words, the host's or the device's."""

    plan: Words
    given: Words
    origins: Words
    positions: Words
    mapping: Words
    picks: Words
    lens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]


class Batcher:
    """Packs steps of at most `max_rows` rows and `max_seqs` sequences of `max_blocks` blocks, which
    draw at most `max_draws` times (0: once a sequence).

    `ladder`: what steps are padded to; None: they are not.  `lookahead`: a row may stand for a
    token that the step before is still drawing; the device finds it in `ids`.  `plan_words` int64
    of the upload are the step plan's.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_seqs: int,
        max_draws: int = 0,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        ladder: Ladder | None = None,
        lookahead: bool = False,
        plan_words: int = 0,
    ) -> None:
        self._block_size = block_size
        self.ladder = ladder
        self.lookahead = lookahead
        self._shape = max_seqs, max_blocks
        max_draws = max(max_draws, max_seqs)
        # A step fills the plan from its end and the tables from their start: one copy brings both.
        sizes = [
            plan_words,
            *(max_rows, max_rows * lookahead, max_rows, max_rows),  # given .. mapping
            max_draws,
            *(-(-max_seqs // 2), max_seqs // 2 + 1),  # two int32 to a word
            -(-max_seqs * max_blocks // 2),
            max_draws,  # ids: behind what is uploaded
        ]
        self._cuts = [0, *accumulate(sizes)]
        self._ring = UploadRing(self._cuts[-1], device)
        self._words = self._ring.device_words
        parts = [self._words[a:b] for a, b in pairwise(self._cuts)]
        #: (plan_words,) int64: the step plan's region on the device.
        self.plan = parts[0]
        self._given, self._origins, self._positions, self._mapping, self._picks = parts[1:6]
        self._lens, self._starts = (part.view(torch.int32) for part in parts[6:8])
        self._tables = parts[8].view(torch.int32)[: max_seqs * max_blocks].view(self._shape)
        #: (max_draws,) int64: where the sampler leaves what it draws, for the next step.
        self.ids = parts[9]
        self._own_words = np.arange(max_rows) + self._cuts[1]  # where the given tokens lie
        self._tokens = torch.zeros_like(self._given) if lookahead else self._given
        self._blocks = _BlockLists(max_seqs, max_blocks)
        #: Of the last step: its host buffer, sequences, rows, what it is padded to, draws, words
        #: of the plan.
        self._last: tuple[_Fields, int, int, Rung | None, int, int] | None = None

    def pack(
        self,
        work: StepWork,
        drawing: Mapping[Sequence, int] = MappingProxyType({}),
        plan: Callable[[Words, Rung | None], int] = lambda words, rung: 0,
    ) -> Batch:
        """Lay `work` out in row order and start its one upload.

        `drawing`: sequence -> place in `ids` of the token that follows its known ones.  `plan` is
        called with the step plan's region of the upload and with what the step is padded to, and
        says how many words it has filled, up to the region's end.
        """
        chunks = work.chunks
        host = self._host()
        ends = list(accumulate(c.length for c in chunks))
        rung = self.ladder.find(ends[-1], len(chunks)) if self.ladder else None
        if ends[-1] == len(chunks):
            self._fill_single(host, chunks)
        else:
            self._fill_mixed(host, chunks, ends)
        host.starts[0] = 0
        host.starts[1 : len(chunks) + 1] = ends
        if rung is not None:
            self._fill_padding(host, ends[-1], len(chunks), rung)
        if self.lookahead:
            self._fill_origins(host, chunks, ends, rung.rows if rung else ends[-1], drawing)
        self._fill_tables(host, chunks, ends[-1])
        draws = draws_of(chunks, ends)
        host.picks[: len(draws.rows)] = draws.rows
        host.picks[len(draws.rows) : self._num_picks(len(draws.rows))] = 0
        plan_words = plan(host.plan, rung)
        self._last = host, len(chunks), ends[-1], rung, len(draws.rows), plan_words
        self._send(len(chunks), plan_words)
        return self._batch([c.start + c.length for c in chunks], ends, rung, draws)

    def packed(self) -> Packed:
        """The last step that was packed.  Read it before the next one: it holds views."""
        assert self._last is not None
        host, seqs, rows, rung, draws, plan_words = self._last
        size = self._block_size
        width = -(-int(host.lens[:seqs].max()) // size)
        tables = np.ascontiguousarray(host.tables[:seqs, :width])
        parts = self._parts(host, seqs, rows, rung, draws, plan_words)
        return Packed(seqs, rows, draws, width, (*parts, tables))

    def lay(self, packed: Packed) -> Batch:
        """The batch of a step that another Batcher has packed, and its upload.  Nobody knows here
        whose the sampled rows are."""
        seqs, rows = packed.seqs, packed.rows
        rung = self.ladder.find(rows, seqs) if self.ladder else None
        host, plan_words = self._host(), len(packed.words[0])
        parts = self._parts(host, seqs, rows, rung, packed.draws, plan_words)
        for part, words in zip(parts, packed.words, strict=False):
            part[:] = words
        host.tables[:seqs, : packed.width] = packed.words[-1]
        self._send(seqs, plan_words)
        ends = host.starts[1 : seqs + 1].tolist()
        return self._batch(host.lens[:seqs].tolist(), ends, rung, nobodys(packed.draws))

    def blank(self, rung: Rung) -> Batch:
        """A batch of `rung` that is all padding, for a capture."""
        self._mapping[: rung.rows].fill_(-1)
        self._lens[: rung.seqs].zero_()
        starts = tuple(range(rung.seqs + 1)) if rung.single else (0,) * (rung.seqs + 1)
        self._starts[: rung.seqs + 1].copy_(torch.tensor(starts))
        return self._view((0,) * rung.seqs, starts, rung.rows, rung, NO_DRAWS)

    def forget(self) -> None:
        """Keep nothing of the sequences so far."""
        self._blocks = _BlockLists(*self._shape)

    # ------------------------------------------------------------- filling
    def _parts(
        self, host: _Fields, seqs: int, rows: int, rung: Rung | None, draws: int, plan_words: int
    ) -> tuple[npt.NDArray[Any], ...]:
        """Of each field but the tables what such a step fills."""
        padded, spread = (rung.rows, rung.seqs) if rung else (rows, seqs)
        return (
            host.plan[len(host.plan) - plan_words :],
            host.given[:padded],
            host.origins[: padded if self.lookahead else 0],
            host.positions[:padded],
            host.mapping[:padded],
            host.picks[: self._num_picks(draws)],
            host.lens[:spread],
            host.starts[: spread + 1],
        )

    def _host(self) -> _Fields:
        words = self._ring.next()
        plan, given, origins, positions, mapping, picks, lens, starts, tables, _ = (
            words[a:b] for a, b in pairwise(self._cuts)
        )
        seqs, blocks = self._shape
        return _Fields(
            plan=plan,
            given=given,
            origins=origins,
            positions=positions,
            mapping=mapping,
            picks=picks,
            lens=lens.view(np.int32),
            starts=starts.view(np.int32),
            tables=tables.view(np.int32)[: seqs * blocks].reshape(seqs, blocks),
        )

    def _num_picks(self, sampled: int) -> int:
        """Rows whose logits are computed; as many as there are to draw for, or a rung."""
        return self.ladder.samples(sampled) if self.ladder and sampled else sampled

    def _fill_padding(self, host: _Fields, rows: int, seqs: int, rung: Rung) -> None:
        """Rows that write nothing; sequences of no keys, with a row each in a step of single rows
        and else with none."""
        for region, value in ((host.given, 0), (host.positions, 0), (host.mapping, -1)):
            region[rows : rung.rows] = value
        host.lens[seqs : rung.seqs] = 0
        more = np.arange(1, rung.seqs - seqs + 1) if rung.single else 0
        host.starts[seqs + 1 : rung.seqs + 1] = rows + more

    def _fill_single(self, host: _Fields, chunks: tuple[Chunk, ...]) -> None:
        """One row a sequence: whole columns at once."""
        count = len(chunks)
        host.given[:count] = [
            c.seq.tokens[c.start] if c.start < len(c.seq.tokens) else 0 for c in chunks
        ]
        host.positions[:count] = [c.start for c in chunks]
        host.lens[:count] = [c.start + 1 for c in chunks]

    def _fill_mixed(self, host: _Fields, chunks: tuple[Chunk, ...], ends: list[int]) -> None:
        for i, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            begin, stop = end - chunk.length, chunk.start + chunk.length
            known = chunk.seq.tokens[chunk.start : stop]
            if chunk.drafts:
                known += chunk.drafts
            host.given[begin : begin + len(known)] = known
            host.given[begin + len(known) : end] = 0
            host.positions[begin:end] = np.arange(chunk.start, stop)
            host.lens[i] = stop

    def _fill_origins(
        self,
        host: _Fields,
        chunks: tuple[Chunk, ...],
        ends: list[int],
        padded: int,
        drawing: Mapping[Sequence, int],
    ) -> None:
        """Where in the words each row's token lies: among the given ones, or in `ids`."""
        host.origins[:padded] = self._own_words[:padded]
        for chunk, end in zip(chunks, ends, strict=True):
            missing = chunk.start + chunk.length - len(chunk.drafts) - len(chunk.seq.tokens)
            if missing > 0:  # a row of a draft may stand on others, which are no rows of this step
                is_drawn = missing == 1 or chunk.length == 1
                assert is_drawn, f"{chunk.seq.request_id}: rows of tokens that nobody draws"
                host.origins[end - 1] = self._cuts[-2] + drawing[chunk.seq]

    def _fill_tables(self, host: _Fields, chunks: tuple[Chunk, ...], rows: int) -> None:
        size = self._block_size
        counts = [-(-(c.start + c.length) // size) for c in chunks]
        width = max(counts)
        for i, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
            host.tables[i, :count] = self._blocks.of(chunk.seq, count)
            host.tables[i, count:width] = 0
        owner = np.repeat(np.arange(len(chunks)), [c.length for c in chunks])
        block, offset = np.divmod(host.positions[:rows], size)
        host.mapping[:rows] = host.tables[owner, block].astype(np.int64) * size + offset

    def _send(self, seqs: int, plan_words: int) -> None:
        """What is in use, from the plan's first item to the last table."""
        plan_end, tables = self._cuts[1], self._cuts[8]
        self._ring.send(tables + -(-seqs * self._shape[1] // 2), first=plan_end - plan_words)

    # ------------------------------------------------------------- showing
    def _batch(self, known: list[int], ends: list[int], rung: Rung | None, draws: Draws) -> Batch:
        """`known` are the sequences' lengths, their rows in this step included."""
        rows = rung.rows if rung else ends[-1]
        if self.lookahead:
            origins = self._origins[:rows]
            torch.index_select(self._words, 0, origins, out=self._tokens[:rows])
        more = rung.seqs - len(known) if rung else 0
        lens = (*known, *[0] * more)
        starts = (0, *ends, *range(ends[-1] + 1, ends[-1] + more + 1))  # of single rows
        return self._view(lens, starts, rows, rung, draws)

    def _view(
        self,
        lens: tuple[int, ...],
        starts: tuple[int, ...],
        rows: int,
        rung: Rung | None,
        draws: Draws,
    ) -> Batch:
        seqs, sampled = len(lens), draws.seqs
        single = rows == seqs
        known = rung is None or single  # a graph of mixed steps finds lengths and ranges by itself
        # A graph wants one shape; torch's own attention wants no more columns than it needs.
        width = self._shape[1] if self.ladder else -(-max(lens) // self._block_size)
        return Batch(
            tokens=self._tokens[:rows],
            positions=self._positions[:rows],
            attn=AttentionMeta(
                query_starts=starts if known else (),
                seq_lens=lens if known else (),
                slot_mapping=self._mapping[:rows],
                block_tables=self._tables[:seqs, :width],
                block_size=self._block_size,
                seq_lens_device=self._lens[:seqs],
                query_starts_device=self._starts[: seqs + 1],
                single_rows=single,
            ),
            sample_rows=self._picks[: self._num_picks(len(sampled))],
            sampled=sampled,
            ahead=draws.ahead,
            rung=rung,
            samples_every_row=single and len(sampled) == sum(length > 0 for length in lens),
        )


class _BlockLists:
    """Block lists of running sequences as arrays that grow with them: each is converted once."""

    def __init__(self, max_seqs: int, max_blocks: int) -> None:
        self._limit = 2 * max_seqs
        self._max_blocks = max_blocks
        self._known: dict[Sequence, tuple[list[int], npt.NDArray[np.int32], int]] = {}

    def of(self, seq: Sequence, count: int) -> npt.NDArray[np.int32]:
        """The first `count` blocks of `seq`.

        Its list grows in place while it runs, and is another one when it runs again.
        """
        blocks, array, filled = self._known.pop(seq, (None, None, 0))
        if blocks is not seq.blocks or array is None:
            array, filled = np.zeros(self._max_blocks, dtype=np.int32), 0
        if filled < count:
            array[filled:count] = seq.blocks[filled:count]
            filled = count
        self._known[seq] = (seq.blocks, array, filled)
        if len(self._known) > self._limit:  # the least recently run has ended
            del self._known[next(iter(self._known))]
        return array[:count]
