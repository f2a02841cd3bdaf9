"""`--replay FILE`: a recording, played as it happened, or faster.

Goes in: a file that `record` made.  Comes out: a source of its messages.  It can be paused, stepped
and moved in; moving gives the whole board of that moment.  A file that was cut short, as by a kill
or a full disk, is played as far as it goes.  Knows no daemon.
"""

import gzip
import math
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from lorad.board_apply import apply, with_event
from lorad.tui.messages import Changed, Ended, Happened, Lost, Message, Whole
from lorad.tui.record import RECORDING_SCHEMA, Header, Line
from lorad.wire_stream import Board

#: So soon it is seen that somebody paused, stepped or moved.
SLICE_SECONDS = 0.1
MAX_SPEED = 1000.0
#: A board of 256 slots and 500 requests is well below; what is longer is no line of ours.
MAX_LINE_BYTES = 16 << 20

_FAMILY, _, _VERSION = RECORDING_SCHEMA.rpartition(".v")
_line: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class BadRecording(Exception):
    """It cannot be played, or not further; one line, and what to do."""

    hint = "loractl top --record FILE makes a recording"


class _TooNew(BadRecording):
    hint = "install a loractl that is as new, or newer"


class Replay:
    """A recording as a source.  Its controls may be used from another thread.

    `wait(stop, seconds)` sleeps, and is true once `stop` is set.
    """

    def __init__(
        self,
        path: Path,
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """BadRecording or OSError: the file is none, or cannot be read."""
        self.path, self.speed = path, speed
        self._clock, self._wait = clock, wait
        self._control = threading.Lock()
        self._paused, self._steps = False, 0
        self._target: float | None = None
        self.position = 0.0  # seconds of the recording that were played
        with _opened(path) as file:
            self.header = _header(path, file)

    @property
    def title(self) -> str:
        times = "" if self.speed == 1 else f" x{self.speed:g}"
        return f"replay {self.path.name}{times}"

    @property
    def paused(self) -> bool:
        return self._paused

    def pace(self, seconds: float) -> None:
        """A recording has its own."""

    def pause(self, paused: bool | None = None) -> bool:
        """Stand still or go on, or the other way round than now; True if it stands still."""
        with self._control:
            self._paused = not self._paused if paused is None else paused
            self._steps = 0
            return self._paused

    def step(self) -> None:
        """One message more; stands still then."""
        with self._control:
            self._paused = True
            self._steps += 1

    def seek(self, seconds: float) -> None:
        """To this many seconds from its beginning; the end if that is further."""
        with self._control:
            self._target = max(0.0, seconds)

    def obey(self, word: str, rest: str) -> str:
        """`pause`, `step`, `seek 90`, `seek +10`, `speed 4`: what came of it; "": no such word."""
        if word == "pause":
            return "the recording stands still" if self.pause() else "it goes on"
        if word == "step":
            self.step()
            return "one message on"
        if word not in ("seek", "speed"):
            return ""
        number = _number(rest)
        if number is None:
            return f"{word} takes a number"
        if word == "seek":
            target = max(0.0, number + (self.position if rest[0] in "+-" else 0.0))
            self.seek(target)
            return f"at {target:.0f} s"
        if not 0 < number <= MAX_SPEED:
            return f"a speed is above 0, and {MAX_SPEED:.0f} at most"
        self.speed = number
        return self.title

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        """Until the end of the recording, then `Ended`, and again after a `seek` from there."""
        lines, why = self._play(stop), ""
        while not stop.is_set():
            try:
                yield from lines
                why = "the recording is over"
            except BadRecording as error:
                why = str(error)
            if stop.is_set():
                return
            yield Ended(why)
            while self._target is None:
                if self._wait(stop, SLICE_SECONDS):
                    return
            lines = self._play(stop)

    # ----------------------------------------------------------------- playing
    def _play(self, stop: threading.Event) -> Iterator[Message]:
        """From the beginning, or from where `seek` said, to the end or to the next `seek`."""
        while True:
            target = self._taken_target()
            lines = read(self.path)
            if target is not None:
                board, lines = _moved(lines, target)
                if board is not None:
                    yield Whole(board)
            if not (yield from self._play_on(lines, target or 0.0, stop)):
                return

    def _play_on(
        self, lines: Iterator[Line], begin: float, stop: threading.Event
    ) -> Generator[Message, None, bool]:
        """True, as the generator's value, if somebody moved meanwhile."""
        self.position, before = begin, self._clock()
        for line in lines:
            while (left := line.at - self.position) > 0 or self._paused:
                if self._target is not None:
                    return True
                if self._stepped():
                    break
                slice_seconds = SLICE_SECONDS if self._paused else left / self.speed
                if self._wait(stop, min(slice_seconds, SLICE_SECONDS)):
                    return False
                now = self._clock()
                if not self._paused:
                    self.position = min(line.at, self.position + (now - before) * self.speed)
                before = now
            self.position = max(self.position, line.at)
            yield as_message(line)
        return False

    def _stepped(self) -> bool:
        with self._control:
            if not self._steps:
                return False
            self._steps -= 1
            return True

    def _taken_target(self) -> float | None:
        with self._control:
            target, self._target = self._target, None
            return target


def _number(text: str) -> float | None:
    try:
        number = float(text.removesuffix("s"))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# ----------------------------------------------------------------- reading
def read(path: Path) -> Iterator[Line]:
    """Every line but the header; BadRecording at one that is damaged, OSError."""
    with _opened(path) as file:
        _header(path, file)
        for number, text in enumerate(_lines(path, file), 2):
            if not text.endswith(b"\n") and len(text) < MAX_LINE_BYTES:
                return  # cut short in the midst of a line
            line = _decoded(path, number, text)
            if any(part is not UNSET for part in _parts(line)):  # else of a later lorad's kind
                yield line


def last_board(path: Path) -> Board:
    """As it was at the end; BadRecording if there is none."""
    board, _ = _moved(read(path), float("inf"))
    if board is None:
        raise BadRecording(f"{path} ends before its first board")
    return board


def as_message(line: Line) -> Message:
    """What a line says."""
    if line.board is not UNSET:
        return Whole(line.board)
    if line.delta is not UNSET:
        return Changed(line.delta)
    if line.event is not UNSET:
        return Happened(line.event)
    if line.lost is not UNSET:
        return Lost(line.lost, line.retry)
    return Ended(line.ended if line.ended is not UNSET else "")


def _moved(lines: Iterator[Line], target: float) -> tuple[Board | None, Iterator[Line]]:
    """The board at `target` seconds, and the lines after it."""
    board: Board | None = None
    for line in lines:
        if line.at > target:
            return board, _again(line, lines)
        if line.board is not UNSET:
            board = line.board
        elif board is not None and line.delta is not UNSET:
            try:
                board = apply(board, line.delta)
            except ValueError as error:
                raise BadRecording(f"{error}: a message is missing at {line.at:.0f} s") from None
        elif board is not None and line.event is not UNSET:
            board = with_event(board, line.event)
    return board, iter(())


def _again(line: Line, lines: Iterator[Line]) -> Iterator[Line]:
    yield line
    yield from lines


def _opened(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path, file: Any) -> Iterator[bytes]:
    """With their ends; a gzip that was cut short ends where it was cut."""
    while True:
        try:
            text: bytes = file.readline(MAX_LINE_BYTES)
        except EOFError:
            return
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadRecording(f"{path} is damaged: {error}") from None
        if not text:
            return
        yield text


def _header(path: Path, file: Any) -> Header:
    text = next(_lines(path, file), b"")
    try:
        header = msgspec.json.decode(text, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRecording(f"{path} is no recording of loractl top") from None
    family, _, version = header.schema.rpartition(".v")
    if family != _FAMILY or not version.isdecimal():
        raise BadRecording(f"{path} is no recording of loractl top")
    if int(version) > int(_VERSION):
        by = f" by loractl {header.version}" if header.version else ""
        raise _TooNew(f"{path} was recorded{by} in a newer form ({header.schema})")
    return header


def _decoded(path: Path, number: int, text: bytes) -> Line:
    try:
        return _line.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRecording(f"{path} is damaged at line {number}: {error}") from None


def _parts(line: Line) -> tuple[object, ...]:
    return line.board, line.delta, line.event, line.lost, line.ended
