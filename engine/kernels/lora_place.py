"""What the LoRA kernels share: where an adapter's rows lie.

A slot's row of the table is entries of ENTRY_WORDS words, one for each (layer, module), then the
ids of the adapter's blocks.  An entry: rank (0 = the adapter lacks the module), where its A rows
and its B rows start in the arena (units of 256 bytes), its scaling (the bits of an fp32), and the
places in the block list of the blocks in which A and B start, B's with the flags that say which
rows follow its own, and the ids of the blocks behind those two.

Ahead of their wait for earlier kernels (`dependent.py`) the kernels read work items, the table and
adapter rows, which no kernel of the step writes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

#: rank, A start, B start, scaling, A block, B block and flags, the block behind A's, and B's.
ENTRY_WORDS = 8
#: The bits of B's block; its flags are above.
FLAGS_AT = tl.constexpr(24)
BLOCK_BITS = tl.constexpr((1 << 24) - 1)
#: Flags: a row of bias, then two rows that add up to the gain.
HAS_BIAS = tl.constexpr(1)
HAS_GAIN = tl.constexpr(2)
RANK, A_START, B_START, SCALING, A_BLOCK, B_BLOCK, A_NEXT, B_NEXT = range(ENTRY_WORDS)
#: first row, rows (0 = padding), slot, first rank
ITEM_WORDS = 4


@triton.jit
def load_word(p):
    """A word of the items or of the table, from L2: ahead of the wait nobody promises that what a
    multiprocessor still has in L1 is not the step before's."""
    return tl.load(p, cache_modifier=".cg")


@triton.jit
def load_item(items, item):
    """first row, rows, slot, first rank."""
    p = items + item * 4
    return load_word(p), load_word(p + 1), load_word(p + 2), load_word(p + 3)


@triton.jit
def module_of(
    tile,
    W0: tl.constexpr,  # widths of up to three modules
    W1: tl.constexpr,
    W2: tl.constexpr,
    T0: tl.constexpr,  # tiles that the first two take
    T1: tl.constexpr,
):
    """Of a tile among those of all modules side by side: its module, that one's width and first
    column, and which of the module's tiles it is."""
    module, width, left, first = tile * 0, tile * 0 + W0, tile * 0, tile
    if W1 > 0:
        second = tile >= T0
        module = second.to(tl.int32)
        width = tl.where(second, W1, W0)
        left = tl.where(second, W0, 0)
        first = tl.where(second, tile - T0, tile)
    if W2 > 0:
        third = tile >= T0 + T1
        module += third.to(tl.int32)
        width = tl.where(third, W2, width)
        left = tl.where(third, W0 + W1, left)
        first = tl.where(third, tile - T0 - T1, first)
    return module, width, left, first


@triton.jit
def rows_in_first_block(start, stride, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Rows of a run that lie in the block in which it starts."""
    UNITS: tl.constexpr = BLOCK // UNIT
    return (UNITS - start % UNITS) * UNIT // stride


@triton.jit
def row_places(
    slot_row,
    start,
    block,
    r,
    live,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
):
    """Offsets in the arena, in elements (int64), of the rows r of a run; any where not `live`.

    The run starts at `start` (units), in the adapter's `block`-th block.  A row never straddles
    two blocks: what is left of the first one holds a whole number of rows, and so do the others.
    """
    PER_BLOCK: tl.constexpr = BLOCK // STRIDE
    later = r - rows_in_first_block(start, STRIDE, BLOCK, UNIT)
    number = later // PER_BLOCK
    there = tl.load(
        slot_row + BLOCKS_AT + 1 + block + number,
        mask=live & (later >= 0),
        other=0,
        cache_modifier=".cg",
    )
    here = start.to(tl.int64) * UNIT + r * STRIDE
    beyond = there.to(tl.int64) * BLOCK + (later - number * PER_BLOCK) * STRIDE
    return tl.where(later >= 0, beyond, here)


@triton.jit
def load_near(
    arena,
    start,
    r0,
    rank,
    c0,
    width,
    stride,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A tile of a run that lies in one block: ranks [r0, r0 + RANKS) below `rank`, columns
    [c0, c0 + COLUMNS) below `width` (all of them, if EVEN); zero elsewhere.

    Most tiles are so, and a row's address is then a constant away from the tile's: `row_places`
    would be worked out by every thread for each of its rows, which costs as much as the product.
    """
    i = tl.arange(0, RANKS)
    j = tl.arange(0, COLUMNS)
    mask = (i < rank - r0)[:, None]
    if not EVEN:
        mask = mask & (j < width - c0)[None, :]
    tile = arena + start.to(tl.int64) * UNIT + (r0 * stride + c0)
    return tl.load(
        tile + (i * stride)[:, None] + j[None, :], mask=mask, other=0.0, cache_modifier=".cg"
    )


@triton.jit
def first_rows(
    start,
    module,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """`rows_in_first_block` of the module's stride.  Dividing by constants is cheap, by a stride
    that the module decides it is not."""
    rows = rows_in_first_block(start, S0, BLOCK, UNIT)
    if S1 != S0:
        rows = tl.where(module == 0, rows, rows_in_first_block(start, S1, BLOCK, UNIT))
    if S2 != S1:
        rows = tl.where(module == 2, rows_in_first_block(start, S2, BLOCK, UNIT), rows)
    return rows


@triton.jit
def rows_of_block(
    module, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of the module that a whole block holds."""
    return tl.where(module == 0, BLOCK // S0, tl.where(module == 1, BLOCK // S1, BLOCK // S2))


@triton.jit
def two_places(
    slot_row,
    start,
    block,
    follows,  # the id of the block behind the one in which the run starts
    r0,
    rank,
    first,  # rows in that one
    each,  # rows of a whole block, at least RANKS
    stride,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RANKS: tl.constexpr,
    NEAR: tl.constexpr,  # r0 is 0
):
    """Of the tile of ranks [r0, r0 + RANKS): where its row 0 lies, where that would lie for the
    rows in the next block, and how many are in the first.  Most runs lie in two blocks, and then
    nothing is loaded."""
    left = first - r0
    here = start.to(tl.int64) * UNIT + r0 * stride
    there = follows.to(tl.int64) * BLOCK - left * stride
    if not NEAR:  # noqa: SIM102  # known to the compiler
        if tl.minimum(r0 + RANKS, rank) > first + each:  # a third block, or one further on
            within, number = (r0 - first) % each, (r0 - first) // each
            left = each - within
            ids = slot_row + (BLOCKS_AT + 1 + block)
            here = _load_id(ids + number, r0 < rank).to(tl.int64) * BLOCK + within * stride
            beyond = tl.minimum(rank - r0, RANKS) > left
            there = _load_id(ids + number + 1, beyond).to(tl.int64) * BLOCK - left * stride
    return here, there, left


@triton.jit
def load_two(
    arena,
    here,
    there,
    left,
    r0,
    rank,
    c0,
    width,
    stride,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A tile at such places.  A row's address is a constant away from one of two.

    A step reads its adapters once, more than L2 holds, so they leave it ahead of what it reads
    again: the table, h, x, y.  A load has that hint or `.cg`, not both, so L1 may answer.  What it
    has is not another owner's: the host has seen the end of an adapter's copy ahead of the launch,
    which promises its kernels all that was there by then; and a step begins with an upload, behind
    which a kernel is launched plainly, and the driver empties L1 for those.
    """
    i = tl.arange(0, RANKS)
    j = tl.arange(0, COLUMNS)
    mask = (i < rank - r0)[:, None]
    if not EVEN:
        mask = mask & (j < width - c0)[None, :]
    row = tl.where(i < left, here + c0, there + c0) + i * stride
    return tl.load(
        arena + row[:, None] + j[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _load_id(p, live):
    return tl.load(p, mask=live, other=0, cache_modifier=".cg")


@triton.jit
def load_far(
    arena,
    place,
    r,
    rank,
    c0,
    width,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The same for rows r at `place`, in whichever blocks."""
    j = tl.arange(0, COLUMNS)
    mask = (r < rank)[:, None]
    if not EVEN:
        mask = mask & (j < width - c0)[None, :]
    return tl.load(
        arena + c0 + place[:, None] + j[None, :], mask=mask, other=0.0, cache_modifier=".cg"
    )
