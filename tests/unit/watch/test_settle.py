"""The settle rules, without a disk or a clock."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lorad.watch.settle import GONE, Settler, Verdict, View

A, B = Path("/inbox/a"), Path("/inbox/b")


def whole(signature: str) -> View:
    return View(signature, True)


def test_a_folder_is_reported_when_it_was_quiet_for_the_settle_time() -> None:
    settler = Settler(2.0)
    settler.touch(A, 0.0)
    settler.touch(A, 1.5)
    assert settler.due(2.0) == []
    assert settler.due(3.4) == []
    assert settler.due(3.5) == [A]
    assert settler.judge(A, whole("1"), 3.5) is Verdict.REPORT
    assert settler.next_due() is None


def test_the_same_content_is_not_reported_twice() -> None:
    settler = Settler(1.0)
    settler.touch(A, 0.0)
    assert [settler.judge(f, whole("1"), 1.0) for f in settler.due(1.0)] == [Verdict.REPORT]
    settler.touch(A, 5.0)
    assert [settler.judge(f, whole("1"), 6.0) for f in settler.due(6.0)] == [Verdict.NOTHING]
    settler.look(A, "1", 7.0)
    assert settler.next_due() is None
    settler.look(A, "2", 8.0)
    assert [settler.judge(f, whole("2"), 9.0) for f in settler.due(9.0)] == [Verdict.REPORT]


def test_a_change_that_no_event_told_begins_the_quiet_anew() -> None:
    settler = Settler(1.0)
    settler.look(A, "1", 0.0)
    settler.look(A, "2", 0.9)
    assert settler.due(1.0) == []
    assert settler.due(1.9) == [A]
    assert settler.judge(A, whole("3"), 1.9) is Verdict.NOTHING
    assert settler.due(2.8) == []
    assert settler.due(2.9) == [A]
    assert settler.judge(A, whole("3"), 2.9) is Verdict.REPORT


def test_an_event_after_a_look_costs_one_settle_time_and_not_two() -> None:
    settler = Settler(1.0)
    settler.look(A, "1", 0.0)
    settler.touch(A, 0.5)
    assert settler.due(1.5) == [A]
    assert settler.judge(A, whole("2"), 1.5) is Verdict.REPORT


def test_an_inconsistent_folder_is_given_patience_and_then_reported() -> None:
    settler = Settler(1.0, patience=3.0)
    broken = View("1", False)
    settler.touch(A, 0.0)
    for at in (1.0, 2.0):
        assert settler.due(at) == [A]
        assert settler.judge(A, broken, at) is Verdict.NOTHING
    assert settler.due(3.0) == [A]
    assert settler.judge(A, broken, 3.0) is Verdict.REPORT


def test_a_stalled_writer_that_goes_on_is_waited_for() -> None:
    settler = Settler(1.0, patience=3.0)
    settler.touch(A, 0.0)
    reports = []
    for at, view in [(1.0, View("1", False)), (2.0, View("2", False)), (3.0, whole("3"))]:
        reports += [settler.judge(f, view, at) for f in settler.due(at)]
    assert reports == [Verdict.NOTHING] * 3
    assert [settler.judge(f, whole("3"), 4.0) for f in settler.due(4.0)] == [Verdict.REPORT]


def test_a_folder_is_gone_only_when_it_stays_away() -> None:
    settler = Settler(1.0)
    settler.remember(A, "1")
    settler.look(A, "", 0.0)
    settler.look(A, "2", 0.5)  # put back, with other content
    assert settler.due(1.0) == []
    assert [settler.judge(f, whole("2"), 1.5) for f in settler.due(1.5)] == [Verdict.REPORT]
    settler.look(A, "", 2.0)
    assert [settler.judge(f, GONE, 3.0) for f in settler.due(3.0)] == [Verdict.GONE]
    assert settler.reported() == []


def test_what_was_never_reported_goes_without_a_word() -> None:
    settler = Settler(1.0)
    settler.touch(A, 0.0)
    assert [settler.judge(f, GONE, 1.0) for f in settler.due(1.0)] == [Verdict.NOTHING]


def test_a_folder_of_an_earlier_run_is_reported_only_if_it_differs() -> None:
    settler = Settler(1.0)
    settler.remember(A, "1")
    settler.remember(B)
    settler.look(A, "1", 0.0)
    settler.look(B, "1", 0.0)
    assert settler.due(1.0) == [B]


def test_a_forgotten_folder_is_reported_again_unchanged() -> None:
    settler = Settler(1.0)
    settler.remember(A, "1")
    settler.forget(A)
    settler.forget(B)  # never known: nothing to repeat
    settler.look(A, "1", 0.0)
    assert settler.due(1.0) == [A]
    assert settler.judge(A, whole("1"), 1.0) is Verdict.REPORT
    assert settler.reported() == [A]


def test_a_folder_that_cannot_be_viewed_is_tried_again() -> None:
    settler = Settler(1.0, patience=3.0)
    settler.touch(A, 0.0)
    assert settler.due(1.0) == [A]
    settler.postpone(A, 1.0)
    assert settler.due(3.9) == []
    assert settler.due(4.0) == [A]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.sampled_from(["touch", "look"]),
            st.sampled_from(["", "1", "2"]),
            st.floats(0, 3),
        ),
        max_size=30,
    )
)
def test_whatever_happens_the_last_content_is_the_one_reported(
    steps: list[tuple[Path, str, str, float]],
) -> None:
    """A disk that changes at random, looked at as the watcher does; then it is left alone."""
    settler = Settler(1.0)
    disk: dict[Path, str] = {}
    told: dict[Path, str] = {}
    reports: list[tuple[Path, str]] = []
    now = 0.0

    def settle_until(end: float) -> None:
        nonlocal now
        while (at := settler.next_due()) is not None and at <= end:
            now = max(now, at)
            for folder in settler.due(now):
                verdict = settler.judge(folder, View(disk.get(folder, ""), True), now)
                if verdict is Verdict.REPORT:
                    assert told.get(folder) != disk[folder]
                    told[folder] = disk[folder]
                    reports.append((folder, disk[folder]))
                elif verdict is Verdict.GONE:
                    assert folder in told
                    del told[folder]
        now = end

    for folder, kind, content, pause in steps:
        disk[folder] = content
        if kind == "touch":
            settler.touch(folder, now)
        else:
            settler.look(folder, content, now)
        settle_until(now + pause)
    settle_until(now + 10)
    assert told == {folder: content for folder, content in disk.items() if content}
    assert settler.next_due() is None
