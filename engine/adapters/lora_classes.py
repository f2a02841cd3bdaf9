"""Which grids of LoRA work items CUDA graphs are captured for, and which of them a step takes.

Goes in: a padded step's rung, and the class that its own items would be.  Comes out: the classes
that such steps usually meet, and the least of them that holds the items.  Knows no rows, no slots.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.kernels.lora_meta import LoraClass
from engine.kernels.tiles import (
    DOT_ROWS,
    GRAPHED,
    GRAPHED_MIXED,
    GRAPHED_SHORT,
    MANY_SHORT,
    NARROW,
    PREFILL_ROWS,
    Graphed,
    Tiles,
    for_prompts,
)
from engine.ladder import Rung

#: Items of the smallest grid: as many programs of the widest group still run at once.
LEAST_GRID = 4
#: Chunks of a mixed step whose last tile is not full.
CHUNKS = 4


def rung(count: int) -> int:
    """The power of two that holds `count` items."""
    return 1 << (count - 1).bit_length()


def usual_classes(step: Rung, max_rank: int, coarse: int = 1) -> list[LoraClass]:
    """What steps of `step` usually meet, ranks being at most `max_rank`; fewer if `coarse` is above
    1."""
    kinds: list[LoraClass] = []
    for usual in GRAPHED if step.single else GRAPHED_MIXED:
        if usual.tiles.expand.all_ranks and max_rank <= NARROW:
            continue  # no step is ever wide
        if usual.tiles in GRAPHED_SHORT and usual.least <= step.rows and not step.single:
            kinds += _split(usual, step, max_rank, coarse)
        kinds += _of_grids(usual, max_rank, _grids(usual, step, coarse))
    return kinds


def padded(kind: LoraClass, rows: int, known: Sequence[LoraClass]) -> LoraClass:
    """The least class of `known` that holds `kind`'s items, or one that holds steps like it."""
    fitting = [other for other in known if _holds(other, kind)]
    if fitting:
        return min(fitting, key=lambda other: other.num_items)
    expand = min(max(rung(kind.expand_items), LEAST_GRID), rows)
    return replace(
        kind,
        shrink_items=max(rung(kind.shrink_items), expand),
        expand_items=expand,
        short=padded(kind.short, rows, ()) if kind.short else None,
    )


def most_items(choices: Iterable[Tiles], max_rows: int, max_seqs: int, max_rank: int) -> int:
    """Most items, padding included, that a step of one of the `choices` has."""
    shrink = expand = rest = 0
    for tiles in choices:
        rows = min(max_rows, tiles.most_rows)
        alone = tiles.shrink.form == "vec" and tiles.most_rows <= PREFILL_ROWS  # one a segment
        rank_tiles = -(-max_rank // tiles.shrink.ranks)

        def most(height: int, rows: int = rows, alone: bool = alone) -> int:
            return max(min(rows, max_seqs if alone else rows // height + max_seqs), LEAST_GRID)

        shrink = max(shrink, rung(most(tiles.shrink.rows) * rank_tiles))
        expand = max(expand, rung(most(tiles.expand.rows)))
        if for_prompts(tiles):  # and the rows between the segments
            rest = max(rest, rows // tiles.expand.rows + max_seqs + 1)
    return shrink + expand + rest


def _of_grids(usual: Graphed, max_rank: int, grids: Iterable[int]) -> list[LoraClass]:
    tiles = -(-min(usual.rank, max_rank) // usual.tiles.shrink.ranks)
    return [LoraClass(usual.tiles, items * tiles, items) for items in grids]


def _split(usual: Graphed, step: Rung, max_rank: int, coarse: int) -> list[LoraClass]:
    """Of mixed steps whose decode rows have launches of their own, beside a few chunks or alone."""
    short = GRAPHED_SHORT[usual.tiles]
    most, grids = min(step.seqs, step.rows), []
    size = 2 * MANY_SHORT
    while size < most:
        grids.append(size)
        size *= short.growth * coarse
    [chunks] = _of_grids(usual, max_rank, [_items_of_chunks(step)])
    shorts = _of_grids(short, max_rank, [*grids, most])
    return [*shorts, *(replace(chunks, short=s) for s in shorts)]


def _items_of_chunks(step: Rung) -> int:
    """Items that a few chunks of a mixed step have: full tiles of its rows, and some others."""
    return step.rows // DOT_ROWS + CHUNKS


def _grids(usual: Graphed, step: Rung, coarse: int) -> list[int]:
    """Numbers of items that graphs of `step` are captured for; the last is the most there are."""
    rows, seqs = step
    if not usual.least <= rows <= usual.tiles.most_rows:
        return []
    most, size = -(-rows // usual.share), LEAST_GRID
    if not step.single:
        short = seqs
        if usual.tiles in GRAPHED_SHORT:  # with more of them, they have launches of their own
            short = min(seqs, MANY_SHORT)
        most, size = min(rows, _items_of_chunks(step) + short), 2 * LEAST_GRID
    grids = []
    while size < most:
        grids.append(size)
        size *= usual.growth * coarse
    return [*grids, most]


def _holds(other: LoraClass, kind: LoraClass) -> bool:
    if other.tiles is not kind.tiles or other.extras != kind.extras:
        return False
    if other.shrink_items < kind.shrink_items or other.expand_items < kind.expand_items:
        return False
    if other.short is None or kind.short is None:
        return other.short is kind.short
    return _holds(other.short, kind.short)
