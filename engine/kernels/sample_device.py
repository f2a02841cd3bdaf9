"""The sampling ops on a card: `sample_reference`'s, in a handful of launches and without a wait.

Goes in: logits, a SampleMeta.  Comes out: tokens and what is told, in tensors of the caller's.
`DeviceOps` owns the memory that the kernels need between them, for `rows` rows from the start.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kernels import sample_reference
from engine.kernels.sample_change import change, close
from engine.kernels.sample_filter import FilterScratch, FilterTile, filtered
from engine.kernels.sample_meta import SampleMeta
from engine.kernels.sample_race import RaceScratch, RaceTile, race
from engine.kernels.sample_tell import MOST, TellScratch, TellTile, tell


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the work of a row is cut."""

    race: RaceTile = field(default_factory=RaceTile)
    filter: FilterTile = field(default_factory=FilterTile)
    tell: TellTile = field(default_factory=TellTile)


class DeviceOps:
    """Draws by Triton kernels.  One draw at a time, all on one stream."""

    def __init__(
        self,
        device: torch.device,
        *,
        rows: int,
        vocab: int,
        width: int = 0,
        tiles: Tiles | None = None,
    ) -> None:
        """`vocab` and `width` as in `ReferenceOps`."""
        self._device = device
        self._vocab, self._width = vocab, max(vocab, width)
        self._tiles = tiles or Tiles()
        self._reserve(rows)

    def _reserve(self, rows: int) -> None:
        tiles = self._tiles
        race_splits, tell_splits = (-(-self._width // t.take) for t in (tiles.race, tiles.tell))
        self._rows = rows
        self._race = RaceScratch(rows, race_splits, self._device)
        self._filter = FilterScratch(rows, tiles.filter, self._device)
        self._tell = TellScratch(rows, tell_splits, self._device)

    def close(self, logits: Tensor, meta: SampleMeta) -> None:
        """As `ReferenceOps.close`: a launch in those draws alone that it concerns."""
        if meta.least:
            close(logits, meta, self._width)

    def draw(self, logits: Tensor, meta: SampleMeta, tokens: Tensor, told: Tensor) -> None:
        """Change logits (rows, width) in place as `meta` says, and draw a token a row.

        tokens (rows,) int64 receives ids that exist, told (rows,) fp64 NOTHING_LEFT and NOT_FINITE
        too.
        """
        if meta.num_rows > self._rows:
            self._reserve(meta.num_rows)
        vocab = self._columns(meta)
        change(logits, meta, vocab)
        if meta.num_filtered < meta.num_rows:
            race(logits, meta, vocab, tokens, told, self._race, self._tiles.race)
        if meta.num_filtered:
            filtered(logits, meta, vocab, tokens, told, self._filter, self._tiles.filter)

    def tell(self, raw: Tensor, tokens: Tensor, meta: SampleMeta, width: int, told: Tensor) -> None:
        """As `sample_reference.tell`; more alternatives than a request may ask for go to torch."""
        if meta.num_rows > self._rows:
            self._reserve(meta.num_rows)
        vocab = self._columns(meta)
        if width > MOST:
            sample_reference.tell(raw, tokens, meta, vocab, width, told)
        else:
            tell(raw, tokens, meta, vocab, width, told, self._tell, self._tiles.tell)

    def _columns(self, meta: SampleMeta) -> int:
        return self._width if meta.least else self._vocab
