"""What an encoder's small steps are padded to."""

import pytest

from engine.ladder import INPUTS, InputLadder, Rung


def test_a_step_takes_the_least_rung_that_holds_its_rows_and_then_its_inputs() -> None:
    ladder = InputLadder(rows=512, seqs=256)
    assert ladder.find(1, 1) == Rung(64, 8)
    assert ladder.find(64, 9) == Rung(64, 63)
    assert ladder.find(65, 8) == Rung(128, 8)
    assert ladder.find(300, 65) == Rung(384, 256)
    assert ladder.find(512, 2) == Rung(512, 8)


def test_what_no_rung_holds_is_not_padded() -> None:
    ladder = InputLadder(rows=100, seqs=1000)
    assert ladder.find(101, 1) is None
    assert ladder.find(100, INPUTS[-1]) is None
    assert ladder.find(100, 99) == Rung(100, 99)
    assert ladder.find(100, 100) is None, "a row an input: nobody's step"


@pytest.mark.parametrize("rows", [2, 3, 64, 100, 512, 1024])
@pytest.mark.parametrize("seqs", [1, 8, 20, 1000])
def test_rungs_are_few_and_hold_every_step_within_them(rows: int, seqs: int) -> None:
    ladder = InputLadder(rows=rows, seqs=seqs)
    assert len(ladder.all) <= 20 and ladder.all[-1].rows == rows
    assert list(ladder.all) == sorted(set(ladder.all))
    assert not any(rung.single for rung in ladder.all)
    for count in range(2, rows + 1, 7):
        for inputs in (1, min(count - 1, seqs, INPUTS[-1])):
            rung = ladder.find(count, inputs)
            assert rung is not None and rung.rows >= count and rung.seqs >= inputs
