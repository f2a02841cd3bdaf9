"""When an engine that hangs is told of, given up, or told to move again."""

from lorad.service.stalls import Look, Stalls


def test_a_stall_is_told_once_and_given_up_once_its_patience_is_over() -> None:
    now = [0.0]
    stalls = Stalls(lambda: now[0], 60.0)
    assert stalls.look(False) is Look.AS_BEFORE
    assert stalls.look(True) is Look.STALLED
    now[0] = 60.0
    assert stalls.look(True) is Look.AS_BEFORE
    now[0] = 60.5
    assert stalls.look(True) is Look.HOPELESS
    assert stalls.look(True) is Look.STALLED, "of another process, or of one that would not die"


def test_one_that_goes_on_is_told_to_and_has_all_of_the_patience_again() -> None:
    now = [0.0]
    stalls = Stalls(lambda: now[0], 60.0)
    assert stalls.look(True) is Look.STALLED
    now[0] = 50.0
    assert stalls.look(False) is Look.MOVES
    assert stalls.look(False) is Look.AS_BEFORE
    assert stalls.look(True) is Look.STALLED
    now[0] = 100.0
    assert stalls.look(True) is Look.AS_BEFORE
