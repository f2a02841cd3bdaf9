"""In a real terminal: whatever ends the dashboard, the terminal is as it was."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.tui.messages import Changed, Message, Whole
from lorad.tui.record import Recorded
from tests.fakes import boards
from tests.fakes.terminals import Terminal, loractl, modes

#: Something of the first picture.
SHOWN = "acme/sql-gen"
#: The other screen, on.
TAKEN = "\x1b[?1049h"
PATCH = """
import time
from lorad.tui.app import TopApp
paint = TopApp.paint
def broken(self, **how):
    paint(self, **how)
    if self.num_taken > 2:
        {deed}
TopApp.paint = broken
"""


class Minute:
    """A minute in which adapters come and go, as fast as it is read."""

    title = "unix:///run/lorad/admin.sock"

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def pace(self, seconds: float) -> None:
        raise AssertionError("it has its own")

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        before, deltas = boards.churny()
        yield Whole(before)
        for delta in deltas:
            self.now += 1.0
            yield Changed(delta)


@pytest.fixture
def minute(tmp_path: Path) -> Path:
    """Its recording."""
    path = tmp_path / "minute.jsonl.gz"
    source = Minute()
    recording = Recorded(source, path, source.clock)
    for _ in recording.messages(threading.Event()):
        continue
    recording.close()
    return path


def put_back(terminal: Terminal) -> bool:
    return not modes(terminal.read) and terminal.settings == terminal.before


def printed(terminal: Terminal) -> str:
    """What is to be read once the dashboard is gone."""
    return re.sub(r"\x1b\[[<?]?[\d;]*[a-z]", "", terminal.read.rpartition("\x1b[?1049l")[2])


def test_sigterm_ends_it_and_the_terminal_is_as_it_was(minute: Path) -> None:
    with loractl("top", "--replay", str(minute)) as terminal:
        terminal.wait_for(SHOWN)
        assert {"1049", "25"} <= modes(terminal.read)
        assert terminal.settings != terminal.before, "the terminal was never taken"
        terminal.program.send_signal(signal.SIGTERM)
        assert terminal.end() == 143
        assert put_back(terminal)
        assert printed(terminal) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_other_signals_end_it_as_well(minute: Path, number: int, status: int) -> None:
    with loractl("top", "--replay", str(minute)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.program.send_signal(number)
        assert terminal.end() == status
        assert put_back(terminal)
        assert printed(terminal) == ""


@pytest.mark.slow
@pytest.mark.parametrize("key", ["q", "\x11"], ids=["q", "ctrl-q"])
def test_a_key_ends_it_and_nothing_is_left_to_read(minute: Path, key: str) -> None:
    with loractl("top", "--replay", str(minute), width=80, height=24) as terminal:
        terminal.wait_for(SHOWN)
        terminal.type(key)
        assert terminal.end() == 0
        assert put_back(terminal)
        assert printed(terminal) == ""


@pytest.mark.slow
def test_a_crash_is_one_line_and_a_report(minute: Path, tmp_path: Path) -> None:
    deed = "secret = 'hunter2'; raise ValueError('[/x] boo')"
    with loractl(
        "top", "--replay", str(minute), before=PATCH.format(deed=deed), TMPDIR=str(tmp_path)
    ) as terminal:
        assert terminal.end() == 1
        assert put_back(terminal)
        first, second, *rest = printed(terminal).splitlines()
        assert first.startswith("error: the dashboard failed: ValueError: [/x] boo; the report is")
        assert (second.strip(), rest) == ("try: add -v for the traceback", [])
        report = Path(first.rpartition(" ")[2])
        assert report.parent == tmp_path
        assert report.stat().st_mode & 0o777 == 0o600
        text = report.read_text(encoding="utf-8")
        assert "ValueError: [/x] boo" in text
        assert "hunter2" not in text, "values of variables are nobody's business"


@pytest.mark.slow
def test_a_crash_told_verbosely_has_its_traceback(minute: Path) -> None:
    deed = "raise ValueError('boo')"
    with loractl("-v", "top", "--replay", str(minute), before=PATCH.format(deed=deed)) as terminal:
        assert terminal.end() == 1
        assert put_back(terminal)
        assert "Traceback (most recent call last)" in printed(terminal)
        assert "[dashboard_failed]" in printed(terminal)


@pytest.mark.slow
def test_one_that_is_stuck_is_ended_from_outside(minute: Path) -> None:
    before = PATCH.format(deed="time.sleep(1000)")
    with loractl("top", "--replay", str(minute), "--speed", "5", before=before) as terminal:
        terminal.wait_for(SHOWN)
        terminal.program.send_signal(signal.SIGTERM)
        assert terminal.end() == 143
        assert put_back(terminal)


@pytest.mark.slow
def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(minute: Path) -> None:
    with loractl("top", "--replay", str(minute)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.type("\x1a")
        wait_stopped(terminal)
        assert put_back(terminal)
        before = len(terminal.read)
        terminal.program.send_signal(signal.SIGCONT)
        terminal.wait_until(lambda read: SHOWN in read[before:].partition(TAKEN)[2], SHOWN)
        assert terminal.settings != terminal.before
        terminal.type("q")
        assert terminal.end() == 0
        assert put_back(terminal)


@pytest.mark.slow
def test_one_that_is_stopped_without_being_asked_goes_on(minute: Path) -> None:
    """As `kill -STOP` does, and whoever debugs it."""
    with loractl("top", "--replay", str(minute)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.program.send_signal(signal.SIGSTOP)
        wait_stopped(terminal)
        before = len(terminal.read)
        terminal.program.send_signal(signal.SIGCONT)
        terminal.wait_until(lambda read: SHOWN in read[before:].partition(TAKEN)[2], SHOWN)
        terminal.type("q")
        assert terminal.end() == 0
        assert put_back(terminal)


@pytest.mark.slow
def test_a_closed_window_leaves_no_process_behind(minute: Path) -> None:
    with loractl("top", "--replay", str(minute)) as terminal:
        terminal.wait_for(SHOWN)
        terminal.hang_up()
        assert terminal.program.wait(30) == 129


@pytest.mark.slow
def test_resizes_do_not_end_it_and_too_small_says_so(minute: Path) -> None:
    with loractl("top", "--replay", str(minute), "--ascii") as terminal:
        terminal.wait_for(SHOWN)
        for width, height in ((80, 24), (200, 60), (60, 16), (120, 36), (40, 10)):
            terminal.resize(width, height)
            terminal.program.send_signal(signal.SIGWINCH)
        terminal.wait_for("at least 60x16")
        terminal.type("q")
        assert terminal.end() == 0
        assert put_back(terminal)


def wait_stopped(terminal: Terminal) -> None:
    """Until the process is stopped, and all that it wrote before is read."""
    stat = Path(f"/proc/{terminal.program.pid}/stat")
    deadline = time.monotonic() + 30
    while re.search(r"\) T", stat.read_text()) is None:
        assert time.monotonic() < deadline, "it is not stopped"
        terminal.drain(0.05)
    while terminal.drain(0.0):
        continue
