"""Tile sizes of the LoRA kernels, and which step takes which: choices as data.

Goes in: what a step's segments look like.  Comes out: `Tiles`, small integers that become constants
of the kernels.  `benchmarks/lora_kernels.py` measures the entries beside their rivals.

Measured on an H200 (docs/bench-log.md): no rival beat an entry by more than 7%.
"""

from typing import Literal, NamedTuple

#: "vec": few rows one after the other, a tile of weights in registers.  "dot": tensor cores.
#: "both": an item takes the one that suits its number of rows.
Form = Literal["vec", "both", "dot"]

#: Rows that the matrix-vector form takes; more go to the tensor cores.
FEW_ROWS = 4
#: Inputs wider than this are summed in `wide_chunk`s, so that expand has fewer partials to add.
WIDE = 8192
#: Steps whose ranks are all at most this have tiles of their own, without a loop over ranks.
NARROW = 16
#: The tensor cores' smallest side.
DOT_ROWS = 16


class ShrinkTile(NamedTuple):
    """h = x Aᵀ: an item is up to `rows` rows and `ranks` ranks."""

    form: Form
    rows: int
    ranks: int
    chunk: int  # inputs that one program sums
    wide_chunk: int
    step: int = 256  # inputs of one product ("dot")
    side: int = 1  # modules of the group side by side in one program, which read x once ("dot")
    warps: int = 4
    stages: int = 2
    streamed: bool = False  # A is placed by its entry alone, and leaves L2 first ("vec")

    def chunk_of(self, d_in: int) -> int:
        """Inputs that one program sums of a row of `d_in`."""
        widest = max(self.step if self.form == "dot" else 16, 1 << (d_in - 1).bit_length())
        return min(self.wide_chunk if d_in > WIDE else self.chunk, widest)

    def splits(self, d_in: int) -> int:
        """Partial sums of a row of h."""
        return -(-d_in // self.chunk_of(d_in))


class ExpandTile(NamedTuple):
    """y += scaling h B: an item is up to `rows` rows and all ranks of its slot."""

    form: Form
    rows: int
    ranks: int  # of one tile of B
    columns: int  # of one tile of B
    runs: int = 1  # tiles side by side in one program, which loads h once
    warps: int = 4
    stages: int = 1
    late: bool = False  # y is read after the product: fewer registers
    all_ranks: bool = True  # False: no rank of the step exceeds `ranks`
    streamed: bool = False  # as shrink's A


#: Shrink and expand are one launch beside the base's product, where that one is our own.  On an
#: H200 one adapter adds 0.32 ms to a step of 64 sequences, and 0.74 as two launches, one ahead of
#: the product and one behind it; eight add 0.46 ms, and 0.65.
JOINED = True

#: Steps of more rows are tiled as prefill, whatever their segments.
PREFILL_ROWS = 1024
#: Mixed steps of up to so many rows have one launch beside each product (`JOINED`).
SMALL_ROWS = 64
#: A step that one adapter owns is tiled for itself up to this many rows.
SOLO_ROWS = 128


class Tiles(NamedTuple):
    """Both kernels' choices; hashable, part of what a graph is captured for."""

    name: str
    shrink: ShrinkTile
    expand: ExpandTile
    most_rows: int = PREFILL_ROWS  # of a step that takes them: bounds the workspace


class Shape(NamedTuple):
    """What a step's segments look like."""

    rows: int  # of the step, base rows included
    segments: int
    longest: int  # rows of the longest segment
    max_rank: int
    mixed: bool = False  # prompt chunks beside decode rows, padded for a graph


def pick(shape: Shape) -> Tiles:
    """The tiles of a step.

    Padded mixed steps have one choice, which takes runs of any length: fewer graphs hold them all.
    """
    wide = shape.max_rank > NARROW
    if shape.rows > PREFILL_ROWS:
        return PREFILL_WIDE if wide else PREFILL
    if shape.mixed and shape.rows <= SMALL_ROWS:
        return MIXED_SMALL_WIDE if wide else MIXED_SMALL
    if shape.mixed:
        return MIXED_WIDE if wide else MIXED
    if shape.longest == 1:
        return ALONE_WIDE if wide else ALONE
    if shape.longest <= FEW_ROWS:
        return FEW_WIDE if wide else FEW
    if shape.segments == 1 and shape.rows <= SOLO_ROWS:
        return SOLO_WIDE if wide else SOLO
    return MIXED_WIDE if wide else MIXED


def _vec(name: str, rows: int, chunk: int, *, all_ranks: bool, streamed: bool = False) -> Tiles:
    """Both halves on 4 warps: in one launch they have one number, and others change the bits.  Each
    warp then has all ranks of its columns; with 512 columns two shared them, and their sums met in
    shared memory, which made 64 adapters add 2.1 ms to a step."""
    return Tiles(
        name,
        ShrinkTile("vec", rows, 8, chunk, chunk, streamed=streamed),
        ExpandTile("vec", rows, 16, 1024, all_ranks=all_ranks, streamed=streamed),
    )


#: Every segment is one row.  64 adapters of rank 16 take 1.49 ms by themselves; 1.68 where weights
#: stay in L2 as long as all else, in one of the kernels or in both.
ALONE = _vec("alone", 1, 2048, all_ranks=False, streamed=True)
#: 64 adapters of ranks 8 to 64 take 2.75 ms by themselves and add 2.88 to the products; 2.98 and
#: 3.07 without that.  With it, 4,096 inputs a program take 2.85, 2 warps with half of all 2.86, and
#: pieces of one block each 2.88.  Without it, 1,024 inputs added 3.47, and ranks of a tile that are
#: shared out among warps were far worse: 4.1 with 512 columns, 4.2 with 32 ranks as well, 6.2 to
#: 7.2 with 256; 3.1 to 3.6 alone where only slots of high ranks have such tiles, all on their way
#: at once.  Two tiles on their way took 3.5 to 3.7, later ones asked of L2 beforehand 3.1 to 3.2.
ALONE_WIDE = _vec("alone wide", 1, 2048, all_ranks=True, streamed=True)
#: No segment is longer than FEW_ROWS.  64 rows on 32 adapters of rank 16 take 1.12 ms so, and of
#: ranks 8 to 64 2.22; 1.28 and 2.38 with 1,024 inputs a program, 1.41 and 2.67 where weights stay
#: in L2 besides; 1.99 and 3.91 with 512 columns.
FEW = _vec("few", FEW_ROWS, 2048, all_ranks=False, streamed=True)
FEW_WIDE = _vec("few wide", FEW_ROWS, 2048, all_ranks=True, streamed=True)

_MIXED_SHRINK = ShrinkTile("both", DOT_ROWS, 16, chunk=512, wide_chunk=512, step=512)
#: Long segments beside short ones: decode rows of hot adapters, small prefill chunks.
MIXED = Tiles("mixed", _MIXED_SHRINK, ExpandTile("both", DOT_ROWS, 16, 256, all_ranks=False))
MIXED_WIDE = Tiles("mixed wide", _MIXED_SHRINK, ExpandTile("both", DOT_ROWS, 32, 256))

#: The same beside the products of a small mixed step.  There the form for few rows costs 16
#: sequences on 4 adapters and a chunk of 16 rows 2.05 ms, and this one 0.42.
MIXED_SMALL = Tiles(
    "small mixed",
    _MIXED_SHRINK._replace(form="dot"),
    ExpandTile("dot", DOT_ROWS, 16, 256, all_ranks=False),
    SMALL_ROWS,
)
MIXED_SMALL_WIDE = Tiles(
    "small mixed wide", MIXED_SMALL.shrink, ExpandTile("dot", DOT_ROWS, 32, 256), SMALL_ROWS
)

_SOLO_SHRINK = ShrinkTile("dot", DOT_ROWS, 16, chunk=256, wide_chunk=512, step=512)
#: One adapter owns a decode batch.
SOLO = Tiles("solo", _SOLO_SHRINK, ExpandTile("dot", DOT_ROWS, 16, 256, all_ranks=False), SOLO_ROWS)
SOLO_WIDE = Tiles("solo wide", _SOLO_SHRINK, ExpandTile("dot", DOT_ROWS, 64, 128), SOLO_ROWS)

_ANY_ROWS = 1 << 30
#: Prompts.
PREFILL = Tiles(
    "prefill",
    ShrinkTile("dot", 64, 16, chunk=1024, wide_chunk=2048, step=64, side=4, stages=4),
    ExpandTile("dot", 32, 16, 256, runs=4, late=True, all_ranks=False),
    _ANY_ROWS,
)
PREFILL_WIDE = Tiles(
    "prefill wide",
    ShrinkTile("dot", 64, 64, chunk=1024, wide_chunk=2048, step=64, side=2, stages=4),
    ExpandTile("dot", 32, 32, 128, runs=2, late=True),
    _ANY_ROWS,
)


class GateTile(NamedTuple):
    """Expand and the MLP's gate in one pass: as much of gate and of up.  Rows and ranks are those
    of the step's tiles for expand, which are `for_prompts`."""

    columns: int
    runs: int
    warps: int


#: Beside the products of 2,048 rows one adapter of rank 16 adds 4.39 ms so, one of rank 64 9.6;
#: with 2 to 4 runs 4.71 and 10.3, with 256 columns 4.77 to 5.5.  Without the gate 4.61 and 10.5.
GATE = GateTile(128, 1, 4)


#: A prompt's adapters are guests of the base's products, where there is room (`lora_augment.py`).
AUGMENTED = True
#: The columns that a guest takes are a multiple of that.
GUEST_RANKS = 16


def for_prompts(tiles: Tiles) -> bool:
    """Whether they are for steps beyond PREFILL_ROWS.  No kernel of ours leads beside those steps'
    products, and what adapters add to gate and up is the gate's to add (`lora_gate.py`)."""
    return tiles.expand.form == "dot" and tiles.most_rows > PREFILL_ROWS


#: Same bits for a row in any batch: one row an item, one choice for every step.
DETERMINISTIC = Tiles(
    "deterministic",
    ShrinkTile("vec", 1, 8, 2048, 2048),
    ExpandTile("vec", 1, 32, 512),
    _ANY_ROWS,
)


class Graphed(NamedTuple):
    """Steps that graphs are captured for at start.  Others are as right, and are met later."""

    tiles: Tiles
    rank: int  # items have ranks up to this, on average
    share: int  # rows that an item stands for at least; 1 where each may be a row of its own
    least: int  # rows of the smallest step that takes these tiles
    growth: int  # from one number of items to the next: a step takes the graph that holds it


#: Of decode steps: adapters of rank 16, and fleets of ranks up to 64.
GRAPHED = (
    Graphed(ALONE, 16, 1, 1, 2),
    Graphed(FEW, 16, 1, 2, 2),
    Graphed(MIXED, 16, 1, FEW_ROWS + 2, 2),
    Graphed(SOLO, 16, DOT_ROWS, FEW_ROWS + 1, 2),
    Graphed(ALONE_WIDE, 64, 1, 1, 4),
    Graphed(FEW_WIDE, 64, 1, 2, 4),
    Graphed(MIXED_WIDE, 64, 1, FEW_ROWS + 2, 4),
    Graphed(SOLO_WIDE, 64, DOT_ROWS, FEW_ROWS + 1, 4),
)
#: So many short segments of a padded mixed step have launches of their own.  On an H200 64 decode
#: rows of as many adapters cost 1.6 ms a step alone, and 6.5 as items of MIXED beside 128 others.
MANY_SHORT = 8


def pick_short(max_rank: int) -> Tiles:
    """The tiles of a mixed step's short segments, whether of one row or of more: fewer graphs."""
    return FEW_WIDE if max_rank > NARROW else FEW


#: Of mixed steps.  Their items are those of full tiles of rows, and one more for every sequence.
GRAPHED_MIXED = (
    Graphed(MIXED_SMALL, 16, DOT_ROWS, 2, 2),
    Graphed(MIXED_SMALL_WIDE, 64, DOT_ROWS, 2, 4),
    Graphed(MIXED, 16, DOT_ROWS, SMALL_ROWS + 1, 2),
    Graphed(MIXED_WIDE, 64, DOT_ROWS, SMALL_ROWS + 1, 4),
)
#: Of the short segments of mixed steps that have launches of their own.
GRAPHED_SHORT = {MIXED: Graphed(FEW, 16, 1, 2, 4), MIXED_WIDE: Graphed(FEW_WIDE, 64, 1, 2, 8)}

#: Every choice that `pick` makes.
ALL = (
    ALONE,
    ALONE_WIDE,
    FEW,
    FEW_WIDE,
    MIXED,
    MIXED_WIDE,
    MIXED_SMALL,
    MIXED_SMALL_WIDE,
    SOLO,
    SOLO_WIDE,
    PREFILL,
    PREFILL_WIDE,
)
