"""A rehearsal: the largest steps that can come, run once before the engine is ready.

Goes in: a runner and the sizes that bound its steps.  Comes out: nothing, but the device allocator
then holds all that a step will ever ask it for, and every kernel has been compiled: those of each
kind of step, of each draw, and of adapters of low and of high ranks.  Writes rubbish into the
arena, which nobody has used yet, and takes rubbish from it for an adapter.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from engine.adapters.slots import SlotRow, SlotTable
from engine.config import EngineConfig
from engine.draft_model import DraftModel
from engine.drafting import Ask, pass_rows
from engine.kernels.attention_tiles import sdpa_lengths
from engine.kernels.tiles import FEW_ROWS, NARROW, PREFILL_ROWS, SOLO_ROWS
from engine.layout import MODULES, PAIRED_ENDS, BlockLayout, place
from engine.messages import PackedManifest, PackedModule, SamplingParams
from engine.runner import Runner
from engine.sequence import Chunk, Sequence, StepWork
from engine.speculation import ROWS, draft_rows

#: Slots, and what is in all of them.
Fleet = tuple[Mapping[int, SlotRow], PackedManifest]
#: A draw that needs everything at once, and those that take another way.
EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20, logit_bias={0: -1.0}, seed=0
)
OTHER_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.0, seed=0, min_tokens=2, stop_token_ids=(0,)),
    SamplingParams(temperature=0.0, allowed_token_ids=(0, 1)),
)
#: Lengths of prompt chunks: kernels are compiled for kinds of sizes, and not after the start.
CHUNKS = (16, 128, 512)


def rehearse(
    runner: Runner, config: EngineConfig, layout: BlockLayout, *, max_len: int, num_blocks: int
) -> None:
    """Run the largest prefill, the most demanding draw, and steps of every kind.  Waits.

    `max_len` is the longest sequence; `num_blocks` is the arena's, `layout` its blocks'.
    """
    cast = _Cast(config.block_size, max_len, num_blocks)
    decoders = [Chunk(seq, 1, 1, True) for seq in cast.sequences(config.max_num_seqs, 2)]
    largest = cast.prompts(config.max_batch_tokens, config.max_num_seqs)
    steps = [largest, decoders, decoders[:1]]
    drafts = draft_rows(config.max_num_seqs, config.draft_tokens)
    for draws in (*(runner.ladder.draws if runner.ladder else ()), config.max_num_seqs + drafts):
        if config.max_num_seqs < draws <= config.max_num_seqs + drafts:
            steps += cast.drafting(config, draws - config.max_num_seqs)
    for params in OTHER_WAYS:
        steps.append([Chunk(seq, 1, 1, True) for seq in cast.sequences(1, 2, params)])
    for params in (EVERYTHING, *OTHER_WAYS):  # and of ids behind the base's, if there are any
        [seq] = cast.sequences(1, 2, params)
        seq.num_tokens = layout.shapes.vocab
        steps.append([Chunk(seq, 1, 1, True)])
    for length in CHUNKS:
        size, first = min(length, config.max_batch_tokens // 2), config.block_size
        if size < 2 or first + size > max_len:
            continue
        [fresh, begun] = cast.sequences(1, size) + cast.sequences(1, first + size)
        beside = decoders[: config.max_num_seqs // 2]
        for chunk in (Chunk(fresh, 0, size, True), Chunk(begun, first, size, True)):
            steps += [[chunk], [*beside, chunk]]
    longest = min(config.max_batch_tokens, max_len)
    for length in sdpa_lengths(longest):
        steps.append(cast.prompts(length, 1))
    if (size := min(longest, max_len - config.block_size)) > 1:
        [begun] = cast.sequences(1, config.block_size + size)
        steps.append([Chunk(begun, config.block_size, size, True)])
    for chunks in steps:
        runner.run(StepWork(tuple(chunks)))
    for rank in ranks_of(config):
        for extras in (False, True):
            fleet = pretended(config, layout, rank, num_blocks, extras)
            _with_adapter(runner, fleet, _shapes(cast, config))
    if runner.room:
        for rank in sorted({*ranks_of(config), min(runner.room, config.max_rank)}):
            fleet = pretended(config, layout, rank, num_blocks)
            _with_adapter(runner, fleet, cast.long(config))
    # Once each: none of these steps is worth a graph that a request's step may want later.
    ends = _fleet(
        config, _manifest(layout, config.max_rank, _ends(layout, config.max_rank)), num_blocks
    )
    few = _fleet(config, _manifest(layout, 1, _own_rows(layout, 2)), num_blocks)
    largest = cast.prompts(config.max_batch_tokens, config.max_num_seqs, slot=0)
    for fleet in (ends, few):
        _with_adapter(runner, fleet, [cast.runs((config.max_num_seqs,)), largest])
    runner.start_over()


def rehearse_drafts(
    drafts: DraftModel, config: EngineConfig, *, max_len: int, num_blocks: int
) -> None:
    """The largest passes of the model that drafts, and those of every kind.  Waits."""
    cast = _Cast(config.block_size, max_len, num_blocks)
    rows = pass_rows(min(config.mixed_tokens, config.max_batch_tokens))
    count = min(config.draft_tokens, max(max_len - 3, 1))
    most = min(config.max_num_seqs, ROWS // 2)
    for seqs in (1, most):
        for first in (1, 2):  # rows of the first pass: the last draft's too if all were right
            asks = []
            for seq in cast.sequences(seqs, first + count):
                del seq.tokens[first:]  # it has blocks for its drafts
                asks.append(Ask(seq, 0, first, count))
            drafts.propose(asks)
    for length in (*CHUNKS, rows):
        size = min(length, rows, max_len - 1)
        [fresh] = cast.sequences(1, size)
        drafts.propose([Ask(fresh, 0, size, 0)])
        if config.block_size + size < max_len:
            [begun] = cast.sequences(1, config.block_size + size)
            drafts.propose([Ask(begun, config.block_size, size, 0)])
    drafts.start_over()


def _with_adapter(runner: Runner, fleet: Fleet, steps: Iterable[list[Chunk]]) -> None:
    """Steps on a slot full of rubbish."""
    rows, manifest = fleet
    with runner.pretending(rows, lambda rev: manifest):
        for chunks in steps:
            runner.run(StepWork(tuple(chunks)))


def pretended(
    config: EngineConfig, layout: BlockLayout, rank: int, num_blocks: int, extras: bool = False
) -> Fleet:
    """A slot table whose slot 0 is an adapter of `rank` on everything, made of any blocks.

    `extras`: with a bias and a gain on every module, for which kernels are compiled apart.
    """
    modules = (
        PackedModule(layer, module, rank, 1.0, bias=extras, gain=extras)
        for layer in range(layout.shapes.num_layers)
        for module in MODULES
    )
    return _fleet(config, _manifest(layout, rank, tuple(modules)), num_blocks)


def _fleet(config: EngineConfig, manifest: PackedManifest, num_blocks: int) -> Fleet:
    table = SlotTable(config.slots)
    blocks = [num_blocks - 1 - i % num_blocks for i in range(manifest.num_blocks)]
    table.claim(manifest.rev, blocks, pinned=False, priority=0, now=0.0).ready = True
    return table.rows, manifest


def ranks_of(config: EngineConfig) -> list[int]:
    """The ranks whose kernels differ."""
    return sorted({min(NARROW, config.max_rank), config.max_rank})


def _ends(layout: BlockLayout, rank: int) -> tuple[PackedModule, ...]:
    """Pairs, and about as many rows of its own as are in one piece."""
    last, row = layout.shapes.num_layers, layout.shapes.dims[0][0] * layout.itemsize
    own = min(-(-layout.block_bytes // row), layout.shapes.vocab)
    pairs = (PackedModule(last, end, rank, 1.0) for end in PAIRED_ENDS)
    return (*pairs, *_own_rows(layout, own))


def _own_rows(layout: BlockLayout, count: int) -> tuple[PackedModule, ...]:
    last, ids = layout.shapes.num_layers, tuple(range(count))
    return tuple(PackedModule(last, f"{end}.rows", count, 1.0, tokens=ids) for end in PAIRED_ENDS)


def _manifest(layout: BlockLayout, rank: int, modules: tuple[PackedModule, ...]) -> PackedManifest:
    placement = place(modules, layout)
    return PackedManifest(
        rev="rehearsal",
        path="",
        layout=layout.id,
        num_blocks=placement.num_blocks,
        true_bytes=placement.true_bytes,
        max_rank=rank,
        changes_kv=True,
        modules=modules,
    )


def _shapes(cast: "_Cast", config: EngineConfig) -> Iterator[list[Chunk]]:
    """Runs of one row, of a few and of many, alone and beside others; prompts that are tiled in one
    way or another.  What cannot come is left out."""
    few, many = 2, FEW_ROWS + 1
    for runs in ((1,), (few,), (many,), (many, 1)):
        if sum(runs) + len(runs) - 1 <= config.max_num_seqs:
            yield cast.runs(runs)
    borders = (config.graph_tokens, PREFILL_ROWS, config.max_batch_tokens)
    for rows in sorted({few, many, SOLO_ROWS + 1, *borders}):
        if few <= rows <= config.max_batch_tokens:
            yield cast.prompts(rows, config.max_num_seqs, slot=0)


class _Cast:
    """Sequences whose blocks follow each other through the arena, again and again if need be."""

    def __init__(self, block_size: int, max_len: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._max_len = max_len
        self._num_blocks = num_blocks
        self._block = 0
        self._names = count()

    def sequences(
        self, number: int, length: int, params: SamplingParams = EVERYTHING, slot: int = -1
    ) -> list[Sequence]:
        """`number` of them, of `length` tokens or the most that there may be."""
        length = min(length, self._max_len)
        return [self._sequence(length, params, slot) for _ in range(number)]

    def prompts(self, rows: int, most: int, slot: int = -1) -> list[Chunk]:
        """Whole prompts of `rows` rows together: as few as they fit in, and `most` at the most."""
        chunks: list[Chunk] = []
        while rows and len(chunks) < most:
            [seq] = self.sequences(1, rows, slot=slot)
            chunks.append(Chunk(seq, 0, len(seq.tokens), True))
            rows -= len(seq.tokens)
        return chunks

    def long(self, config: EngineConfig) -> list[list[Chunk]]:
        """The most rows of slot 0 by themselves, where its adapter may be a guest of the products,
        and beside a row of the base model, where none is."""
        rows, seqs = config.max_batch_tokens, config.max_num_seqs
        steps = [self.prompts(rows, seqs, slot=0)]
        if seqs > 1:
            [other] = self.sequences(1, 2)
            steps.append([*self.prompts(rows - 1, seqs - 1, slot=0), Chunk(other, 1, 1, True)])
        return steps

    def drafting(self, config: EngineConfig, rows: int) -> list[list[Chunk]]:
        """A step in which everybody decodes, and has drafts as long as there are `rows` for them;
        none if there is no room."""
        left = min(rows, config.max_batch_tokens - config.max_num_seqs)
        longest = min(config.draft_tokens, self._max_len - 2)
        chunks = []
        for seq in self.sequences(config.max_num_seqs, 2 + max(longest, 0)):
            count = max(min(longest, left), 0)
            left -= count
            del seq.tokens[2:]  # it has blocks for its drafts
            chunks.append(Chunk(seq, 1, 1 + count, True, drafts=(0,) * count))
        return [chunks] if any(chunk.drafts for chunk in chunks) else []

    def runs(self, lengths: tuple[int, ...]) -> list[Chunk]:
        """Decode rows of slot 0, so many at a time, with a row of the base model between."""
        seqs: list[Sequence] = []
        for length in lengths:
            seqs += self.sequences(1 if seqs else 0, 2)
            seqs += self.sequences(length, 2, slot=0)
        return [Chunk(seq, 1, 1, True) for seq in seqs]

    def _sequence(self, length: int, params: SamplingParams, slot: int) -> Sequence:
        blocks = -(-length // self._block_size)
        first, self._block = self._block, self._block + blocks
        return Sequence(
            request_id=f"rehearsal {next(self._names)}",
            tokens=[0] * length,
            num_prompt=length,
            sampling=params,
            rev=None,
            identity="base",
            salt="",
            priority=0,
            order=0,
            blocks=[(first + i) % self._num_blocks for i in range(blocks)],
            slot=slot,
        )
