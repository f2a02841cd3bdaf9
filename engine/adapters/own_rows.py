"""Which of a step's rows have rows of their adapter's own at an end, as a table for the kernels.

Goes in: slots as they are planned for, then the owners of a step's rows.  Comes out: an `OwnRows`,
by one upload.  Only of slots without factors on that end, and of the head with few such rows: the
kernels compute each logit by itself.  Others are left to `lora_ends.py`.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.kernels.lora_meta import OWN_WORDS, LoraRows, OwnRows
from engine.upload import Parcel, UploadRing

#: Of a slot, on its head.  Of 1,024 rows of 4,096 numbers in bf16 64 decoding rows read 0.5 GB
#: together, whether they are one adapter's or 64.
MOST_ROWS = 1024

#: Ids' and places' address, and how many there are.
Entry = tuple[int, int, int]
#: First row, rows, and what they have.
Run = tuple[int, int, Entry]


class OwnTable:
    """Used from the step loop's thread.  `rows`: of a step, at the most; `arena` as one row of
    elements."""

    def __init__(self, arena: Tensor, rows: int) -> None:
        self._arena = arena
        self._parcel = Parcel(rows * OWN_WORDS, arena.device)
        self._entries: dict[tuple[int, str], Entry] = {}
        #: The last: a table is its runs' addresses and counts, whichever slots have these now.
        self._sent: tuple[list[Run], int, OwnRows] | None = None

    def note(self, slot: int, layer: int, pairs: Mapping[tuple[int, str], LoraRows]) -> None:
        """What is in a slot now, at the ends, which are `layer`; `pairs` stay until it changes."""
        for end in ("embed_tokens", "lm_head"):
            self._entries.pop((slot, end), None)
            own = pairs.get((layer, f"{end}.rows"))
            if own is None or (layer, end) in pairs:
                continue
            assert own.places is not None
            count = len(own.places)
            if end == "embed_tokens" or (own.ids is not None and count <= MOST_ROWS):
                ids = own.ids.data_ptr() if own.ids is not None else 0
                self._entries[slot, end] = ids, own.places.data_ptr(), count

    def find(self, slot: int, end: str) -> Entry | None:
        """What the kernels can do for rows of a slot."""
        return self._entries.get((slot, end))

    def forget(self) -> None:
        self._entries.clear()

    def send(self, runs: list[Run], rows: int) -> OwnRows:
        """Of a step's first `rows` rows; valid until the next one.  The same as of the last step is
        there."""
        if self._sent is not None and self._sent[:2] == (runs, rows):
            return self._sent[2]
        table: npt.NDArray[np.int64] = np.zeros((rows, OWN_WORDS), dtype=np.int64)
        for first, count, entry in runs:
            table[first : first + count] = entry
        [sent] = self._parcel.send([table.reshape(-1)])
        most = max(entry[2] for _, _, entry in runs)
        own = OwnRows(sent.view(rows, OWN_WORDS), most, self._arena)
        self._sent = runs, rows, own
        return own


class PlacedRows:
    """The same at one place, which every step reads, and whose graphs do: filled in those steps
    alone in which it changes.  `rows`: of a step, at the most."""

    def __init__(self, arena: Tensor, rows: int) -> None:
        self._ring = UploadRing(rows * OWN_WORDS, arena.device)
        self._filled = 0  # rows: behind them all is zeros
        self._runs: list[Run] = []  # all that the table says: addresses and counts, and no slots
        self.rows = OwnRows(self._ring.device_words.view(rows, OWN_WORDS), 0, arena)

    def fill(self, runs: list[Run], rows: int) -> None:
        """For the next step, of `rows` rows."""
        if runs == self._runs:
            return
        words = max(rows, self._filled) * OWN_WORDS
        table = self._ring.next()[:words].reshape(-1, OWN_WORDS)
        table[:] = 0
        for first, count, entry in runs:
            table[first : first + count] = entry
        self._ring.send(words)
        self._filled, self._runs = rows if runs else 0, runs
