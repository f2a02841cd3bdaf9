"""The kernels on a group whose first module is 0 wide: an encoder's MLP without a gate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.kernels import tiles as choices
from engine.layout import MODULES

QUICK = (("picked", True), ("mixed", False))
TILES = {
    "picked": None,
    "alone": choices.ALONE_WIDE,
    "mixed": choices.MIXED_WIDE,
    "solo": choices.SOLO_WIDE,
    "prefill": choices.PREFILL_WIDE,
}


@pytest.mark.parametrize(
    ("tiles", "extras"),
    [
        pytest.param(name, extras, marks=[] if (name, extras) in QUICK else pytest.mark.slow)
        for name in TILES
        for extras in (False, True)
    ],
)
def test_the_other_half_is_corrected_as_ever(
    make_pool: Callable[..., Any], rows_of: Callable[..., Any], extras: bool, tiles: str
) -> None:
    pool = make_pool("ungated", torch.float32)
    there = [module for module in MODULES if module != "gate_proj"]
    for slot, rank in enumerate((4, 16, 33)):
        ranks = {(layer, module): rank for layer in range(2) for module in there}
        pool.add(slot, ranks, bias=extras and slot == 1, gain=extras and slot == 1)
    segments, total = rows_of([(0, 4), (-1, 3), (1, 1), (0, 2), (2, 4)])
    pool.check(segments, total, groups=["gate_up"], tiles=TILES[tiles])
