"""Work items of the LoRA kernels: a step's rows as runs of one slot, and runs cut to tiles.

Goes in: chunks with their slots; runs, and the size of a tile.  Comes out: numpy arrays in row
order.  A few numpy calls each, whatever the number of requests.  Knows no tiles by name, no graphs.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.sequence import Chunk

Ints = npt.NDArray[np.int64]
#: As in engine/kernels/lora_place.py: first row, rows, slot, first rank.
ITEM_WORDS = 4


def cut_runs(chunks: Sequence[Chunk]) -> tuple[Ints, int]:
    """Neighbouring rows of one slot as (3, n): first rows, rows, slots; and the step's rows.

    Rows of the base model are in no run.
    """
    count = len(chunks)
    slots = np.fromiter((c.seq.slot for c in chunks), dtype=np.int64, count=count)
    lengths = np.fromiter((c.length for c in chunks), dtype=np.int64, count=count)
    early = [i for i, c in enumerate(chunks) if c.start < c.seq.activation]
    if early:
        slots, lengths = _cut_early(slots, lengths, early, [chunks[i].inactive for i in early])
    ends = np.cumsum(lengths)
    last = np.append(np.flatnonzero(slots[1:] != slots[:-1]), len(slots) - 1)
    run_ends, run_slots = ends[last], slots[last]
    run_starts = np.append(0, run_ends[:-1])
    used = run_slots >= 0
    runs = np.stack((run_starts, run_ends - run_starts, run_slots))[:, used]
    return runs, int(ends[-1])


def _cut_early(
    slots: Ints, lengths: Ints, early: list[int], inactive: list[int]
) -> tuple[Ints, Ints]:
    """Chunks `early` begin with `inactive` rows of the base model: slots and lengths of the parts
    that have rows."""
    lengths[early] -= inactive
    lengths = np.insert(lengths, early, inactive)
    slots = np.insert(slots, early, -1)
    return slots[lengths > 0], lengths[lengths > 0]


def cut_rows(starts: Ints, rows: Ints, slots: Ints, height: int) -> npt.NDArray[np.int32]:
    """(n, 4) items of at most `height` rows, in the runs' order."""
    counts = -(-rows // height)
    run = np.repeat(np.arange(rows.size), counts)
    tile = np.arange(run.size) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.zeros((run.size, ITEM_WORDS), dtype=np.int32)
    items[:, 0] = starts[run] + tile * height
    items[:, 1] = np.minimum(rows[run] - tile * height, height)
    items[:, 2] = slots[run]
    return items


def rest_of(runs: Ints, total: int) -> Ints:
    """(3, n): the runs between `runs`, which are in row order, up to row `total`; of no slot."""
    ends = np.append(0, runs[0] + runs[1])
    lengths = np.append(runs[0], total) - ends
    there = lengths > 0
    return np.stack((ends, lengths, np.full_like(ends, -1)))[:, there]


def cut_ranks(items: npt.NDArray[np.int32], ranks: Ints, size: int) -> npt.NDArray[np.int32]:
    """Each item as often as its slot's highest rank needs tiles of `size`."""
    counts = -(-ranks // size)
    if counts.max() == 1:
        return items
    item = np.repeat(np.arange(len(items)), counts)
    tile = np.arange(item.size) - np.repeat(np.cumsum(counts) - counts, counts)
    cut = items[item]
    cut[:, 3] = tile * size
    return cut


def fill(region: npt.NDArray[np.int32], items: npt.NDArray[np.int32]) -> None:
    """Write the items, and then items of no rows."""
    region[: items.size] = items.ravel()
    region[items.size :] = 0
