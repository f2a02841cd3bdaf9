"""How many graphs a start captures, by the number of sequences, and how fine their grids are."""

import pytest

from engine.adapters.lora_classes import usual_classes
from engine.config import EngineConfig
from engine.graphs import START_GRAPHS
from engine.ladder import Ladder


def graphs(seqs: int, coarse: int) -> int:
    usual = EngineConfig(model="m")
    ladder = Ladder(max_seqs=seqs, mixed_rows=usual.graph_tokens, often=192)
    return sum(1 + len(usual_classes(rung, usual.max_rank, coarse)) for rung in ladder.all)


@pytest.mark.parametrize(("seqs", "coarse", "count"), [(64, 1, 234), (96, 1, 283), (128, 4, 301)])
def test_one_more_rung_of_rows_makes_no_grid_coarser(seqs: int, coarse: int, count: int) -> None:
    """With 272 at the most the rungs of 96 rows had made those of 96 and of 128 sequences so."""
    assert graphs(seqs, coarse) == count <= START_GRAPHS
    assert coarse == 1 or graphs(seqs, coarse // 2) > START_GRAPHS
