"""`--record` and `--replay`: what was seen is seen again, and a bad file is told of in one line."""

import errno
import gzip
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from lorad.board_apply import apply
from lorad.tui import record, replay
from lorad.tui.messages import Changed, Ended, Happened, Lost, Message, Whole
from lorad.tui.record import CannotRecord, Recorded
from lorad.tui.replay import BadRecording, Replay, last_board
from tests.fakes import boards

BEFORE = boards.small()
DELTAS = tuple(boards.deltas(BEFORE, 5))
EVENT = boards.event(7, "slot.load", "\x1b[31mred", "loaded \u202e")
SAID: tuple[Message, ...] = (
    Whole(BEFORE),
    *map(Changed, DELTAS[:2]),
    Happened(EVENT),
    Lost("ECONNREFUSED", 4.0),
    Whole(apply(apply(BEFORE, DELTAS[0]), DELTAS[1])),
    *map(Changed, DELTAS[2:]),
    Ended("gone"),
)


class Steady:
    """A source that says what it was given; each message takes a second of its clock."""

    title = "unix:///run/lorad/admin.sock"

    def __init__(self, *messages: Message) -> None:
        self._messages = messages
        self.now = 100.0
        self.paces: list[float] = []

    def clock(self) -> float:
        return self.now

    def pace(self, seconds: float) -> None:
        self.paces.append(seconds)

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        for message in self._messages:
            yield message
            self.now += 1.0


class Clock:
    """Time that passes when somebody waits; `at` calls what is to happen at a moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._due: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], object]) -> None:
        self._due.append((when, what))

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        for due in [due for due in self._due if due[0] <= self.now]:
            self._due.remove(due)
            due[1]()
        return stop.is_set()


def recorded(path: Path, *messages: Message) -> list[Message]:
    """Record them; what came out of the recorder."""
    source = Steady(*messages)
    recording = Recorded(source, path, source.clock)
    passed = list(recording.messages(threading.Event()))
    recording.close()
    return passed


def played(path: Path, **options: float) -> list[Message]:
    """All of a recording at once, up to and with what says that it is over."""
    clock = Clock()
    source = Replay(path, clock=clock, wait=clock.wait, **options)
    stop = threading.Event()
    said: list[Message] = []
    for message in source.messages(stop):
        said.append(message)
        if isinstance(message, Ended) and message.why != "gone":
            stop.set()
    return said


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    path = tmp_path / "churn.jsonl"
    recorded(path, *SAID)
    return path


# ----------------------------------------------------------------- there and back
@pytest.mark.parametrize("name", ["churn.jsonl", "churn.jsonl.gz"])
def test_what_was_recorded_is_played_as_it_was_said(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert recorded(path, *SAID) == list(SAID), "recording changes nothing"
    assert played(path) == [*SAID, Ended("the recording is over")]


def test_the_file_is_lines_of_json_for_its_owner_alone(tape: Path) -> None:
    header, *lines = map(json.loads, tape.read_text(encoding="utf-8").splitlines())
    assert header["schema"] == "lorad/recording.v1"
    assert header["source"] == Steady.title
    assert [line["at"] for line in lines] == [float(i) for i in range(len(SAID))]
    assert set(lines[3]) == {"at", "event"}
    assert stat.S_IMODE(tape.stat().st_mode) == 0o600
    assert b"\x1b" not in tape.read_bytes()


def test_every_message_is_in_the_file_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl.gz"
    source = Steady(*SAID)
    recording = Recorded(source, path, source.clock)
    for number, _ in enumerate(recording.messages(threading.Event()), 1):
        assert sum(1 for _ in replay.read(path)) == number, "gzip's own buffers are in the way"
    recording.close()


def test_a_recorded_source_is_asked_for_its_pace_and_its_title(tmp_path: Path) -> None:
    source = Steady()
    recording = Recorded(source, tmp_path / "a.jsonl")
    recording.pace(2.0)
    recording.close()
    assert (source.paces, recording.title) == ([2.0], source.title)


def test_a_file_that_is_there_is_not_overwritten_and_an_empty_one_is_used(tmp_path: Path) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.write_text("mine")
    empty.touch(0o644)
    with pytest.raises(CannotRecord, match="there already"):
        Recorded(Steady(), full)
    assert full.read_text() == "mine"
    recorded(empty, *SAID)
    assert stat.S_IMODE(empty.stat().st_mode) == 0o600
    with pytest.raises(NotADirectoryError):
        Recorded(Steady(), full / "x")


# ----------------------------------------------------------------- when it cannot go on
@pytest.mark.parametrize("name", ["full.jsonl", "full.jsonl.gz"])
def test_a_full_disk_stops_the_recording_and_not_the_dashboard(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, written = tmp_path / name, os.write, []

    def filling(descriptor: int, content: memoryview) -> int:
        written.append(len(content))
        if len(written) == 4:
            write(descriptor, content[:5])  # a piece of a line is the worst that can be left
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(record.os, "write", filling)
    passed = recorded(path, *SAID)
    notices = [m for m in passed if isinstance(m, Happened) and m.event.type == "record.stopped"]
    assert [m for m in passed if m not in notices] == list(SAID)
    assert len(notices) == 1
    assert notices[0].event.level == "warn"
    assert "No space left on device" in notices[0].event.message
    assert len(written) == 4, "it is not tried again"
    monkeypatch.undo()
    assert played(path) == [*SAID[:2], Ended("the recording is over")]


def test_a_file_that_vanishes_stops_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "churn.jsonl"
    source = Steady(*SAID)
    recording = Recorded(source, path, source.clock)
    messages = recording.messages(threading.Event())
    next(messages)
    path.unlink()
    rest = list(messages)
    assert "it was removed" in rest[1].event.message  # type: ignore[union-attr]
    assert len(rest) == len(SAID)
    assert not path.exists()


def test_messages_go_on_after_the_recording_was_closed(tmp_path: Path) -> None:
    source = Steady(*SAID)
    recording = Recorded(source, tmp_path / "churn.jsonl", source.clock)
    messages = recording.messages(threading.Event())
    assert next(messages) == SAID[0]
    recording.close()
    recording.close()
    assert list(messages) == list(SAID[1:])


# ----------------------------------------------------------------- time
def test_it_is_played_at_its_own_pace_or_faster(tape: Path) -> None:
    for speed in (1.0, 4.0):
        clock = Clock()
        source = Replay(tape, speed=speed, clock=clock, wait=clock.wait)
        came = [clock.now for _ in islice(source.messages(threading.Event()), len(SAID))]
        assert came == pytest.approx([i / speed for i in range(len(SAID))], abs=0.01)
        assert max(clock.waits) <= replay.SLICE_SECONDS
    assert source.title == "replay churn.jsonl x4"


def test_it_stands_still_steps_and_goes_on(tape: Path) -> None:
    clock = Clock()
    source = Replay(tape, clock=clock, wait=clock.wait)
    messages = source.messages(threading.Event())
    next(messages)
    source.pause()
    clock.at(50.0, source.step)
    assert next(messages) == SAID[1]
    assert clock.now == pytest.approx(50.0, abs=0.2)
    assert source.paused
    clock.at(60.0, source.pause)
    assert next(messages) == SAID[2]
    assert clock.now == pytest.approx(61.0, abs=0.3), "the second before it was still to pass"


def test_moving_gives_the_whole_board_of_that_moment_and_goes_on_from_there(tape: Path) -> None:
    clock = Clock()
    source = Replay(tape, clock=clock, wait=clock.wait)
    messages = source.messages(threading.Event())
    next(messages)
    clock.at(0.3, lambda: source.seek(2.5))
    moved = next(messages)
    assert isinstance(moved, Whole)
    assert moved.board == apply(apply(BEFORE, DELTAS[0]), DELTAS[1])
    assert next(messages) == SAID[3]
    assert clock.now == pytest.approx(0.9, abs=0.2)
    source.seek(0.0)
    assert [next(messages), next(messages)] == [SAID[0], SAID[1]], "and back"


@pytest.mark.parametrize(
    ("word", "rest", "said"),
    [
        ("speed", "4", "replay churn.jsonl x4"),
        ("speed", "0", "a speed is above 0, and 1000 at most"),
        ("speed", "nan", "speed takes a number"),
        ("seek", "", "seek takes a number"),
        ("seek", "2.5s", "at 2 s"),
        ("seek", "+2", "at 3 s"),
        ("seek", "-7", "at 0 s"),
        ("pause", "", "the recording stands still"),
        ("step", "", "one message on"),
        ("evict", "x", ""),
    ],
)
def test_it_obeys_words(tape: Path, word: str, rest: str, said: str) -> None:
    clock = Clock()
    source = Replay(tape, clock=clock, wait=clock.wait)
    messages = source.messages(threading.Event())
    list(islice(messages, 2))
    assert source.obey(word, rest) == said


def test_what_it_was_told_in_words_is_done(tape: Path) -> None:
    clock = Clock()
    source = Replay(tape, clock=clock, wait=clock.wait)
    messages = source.messages(threading.Event())
    list(islice(messages, 2))
    source.obey("seek", "+5")
    assert next(messages) == Whole(apply(SAID[5].board, DELTAS[2]))  # type: ignore[union-attr]
    source.obey("pause", "")
    clock.at(clock.now + 9.0, lambda: source.obey("pause", ""))
    began = clock.now
    assert next(messages) == SAID[7]
    assert clock.now - began == pytest.approx(10.0, abs=0.3)


def test_after_its_end_one_can_still_go_back(tape: Path) -> None:
    clock = Clock()
    source = Replay(tape, clock=clock, wait=clock.wait)
    messages = source.messages(threading.Event())
    assert list(islice(messages, len(SAID) + 1))[-1] == Ended("the recording is over")
    clock.at(clock.now + 5.0, lambda: source.seek(6.0))
    assert next(messages) == Whole(apply(SAID[5].board, DELTAS[2]))  # type: ignore[union-attr]


def test_it_ends_when_told_to_also_while_it_stands_still(tape: Path) -> None:
    clock, stop = Clock(), threading.Event()
    source = Replay(tape, clock=clock, wait=clock.wait)
    messages = source.messages(stop)
    next(messages)
    source.pause()
    clock.at(3.0, stop.set)
    assert list(messages) == []


# ----------------------------------------------------------------- files that are not as they were
def test_a_recording_that_was_cut_is_played_as_far_as_it_goes(tape: Path, tmp_path: Path) -> None:
    whole = tape.read_bytes()
    tape.write_bytes(whole[:-20])
    assert played(tape) == [*SAID[:-1], Ended("the recording is over")]
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(whole)[:-9])
    assert played(packed)[:2] == list(SAID[:2])


def test_a_damaged_recording_says_where_and_what_came_before_is_shown(tape: Path) -> None:
    lines = tape.read_bytes().splitlines(keepends=True)
    tape.write_bytes(b"".join([*lines[:3], b'{"at": 2.0, "delta": 3}\n', *lines[4:]]))
    *before, last = played(tape)
    assert before == list(SAID[:2])
    assert isinstance(last, Ended)
    assert "damaged at line 4" in last.why
    assert "\n" not in last.why
    with pytest.raises(BadRecording, match="line 4"):
        last_board(tape)


def test_a_packed_recording_that_is_damaged_says_so(tmp_path: Path) -> None:
    path = tmp_path / "churn.jsonl.gz"
    recorded(path, *SAID)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 40] = b"\xff" * 40
    path.write_bytes(content)
    last = played(path)[-1]
    assert isinstance(last, Ended)
    assert "damaged" in last.why


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no recording"),
        (b"\x00\xff\x00", "no recording"),
        (b'{"schema": "lorad/board.v1"}\n', "no recording"),
        (b'{"schema": "lorad/recording.vx"}\n', "no recording"),
        (b"[1, 2]\n", "no recording"),
        (b'{"schema": "lorad/recording.v2", "version": "0.9"}\n', "by loractl 0.9 in a newer form"),
    ],
)
def test_a_file_that_is_none_is_refused_at_once(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "odd"
    path.write_bytes(content)
    with pytest.raises(BadRecording, match=why):
        Replay(path)


def test_a_file_that_is_not_gzip_inside_is_refused(tmp_path: Path, tape: Path) -> None:
    path = tmp_path / "plain.gz"
    path.write_bytes(tape.read_bytes())
    with pytest.raises(BadRecording, match="damaged"):
        Replay(path)


def test_kinds_of_messages_that_came_later_are_passed_over(tape: Path) -> None:
    with tape.open("ab") as file:
        file.write(b'{"at": 99.0, "weather": "fine"}\n')
    assert played(tape) == [*SAID, Ended("the recording is over")]


# ----------------------------------------------------------------- the end of it
def test_the_last_board_has_all_that_happened(tape: Path) -> None:
    board = last_board(tape)
    assert board.sequence == BEFORE.sequence + len(DELTAS)
    assert board.slots == boards_after(DELTAS).slots


def test_a_recording_without_a_board_has_no_last_one(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    recorded(path, Lost("ENOENT", 1.0))
    with pytest.raises(BadRecording, match="before its first board"):
        last_board(path)


def boards_after(deltas: tuple[boards.Delta, ...]) -> boards.Board:
    board = BEFORE
    for delta in deltas:
        board = apply(board, delta)
    return board


def test_a_board_goes_through_the_file_unchanged() -> None:
    for board in (boards.hostile(), boards.empty(), boards.many(64)):
        line = msgspec.json.encode(record.as_line(0.0, Whole(board)))
        assert replay.as_message(msgspec.json.decode(line, type=record.Line)) == Whole(board)
