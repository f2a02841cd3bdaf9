"""`--record FILE`: what a source says, kept as JSON lines while it goes by.

Goes in: a source.  Comes out: the same messages, and a file: a header, then one message a line with
the seconds since the recording began; through gzip if its name ends in `.gz`.  Every line is in the
file before the next message comes, so a recording that was cut short is whole up to there.  When
the file cannot be written any more, recording stops, says so once, and the messages go on.  There
are no prompts, answers or keys in it: the stream has none.
"""

import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType

from lorad import __version__
from lorad.tui.messages import Changed, Ended, Happened, Lost, Message, Source, Whole
from lorad.wire import EventItem
from lorad.wire_stream import Board, Delta

RECORDING_SCHEMA = "lorad/recording.v1"
#: The type of the event that says that recording stopped.
STOPPED = "record.stopped"
_GZIP = 31  # of zlib's window bits: with gzip's header


class Header(Struct, frozen=True, kw_only=True):
    """The first line."""

    schema: str
    version: str = ""  # of the loractl that recorded
    began: str = ""  # RFC 3339
    source: str = ""


class Line(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Every other line: when, and the one thing that came then."""

    at: float  # seconds since the recording began
    board: Board | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    event: EventItem | UnsetType = UNSET
    lost: str | UnsetType = UNSET  # why
    retry: float = 0.0  # seconds
    ended: str | UnsetType = UNSET  # why


class CannotRecord(Exception):
    """The file cannot be begun; one line."""


class File:
    """The file of a recording: owner's alone, grown line by line, always whole lines."""

    def __init__(self, path: Path) -> None:
        """OSError or CannotRecord; nothing that was there is overwritten."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        try:
            info = os.fstat(self._fd)
            self._regular = stat.S_ISREG(info.st_mode)
            if self._regular and info.st_size:
                raise CannotRecord(f"{path} is there already: name another file, or remove it")
            if self._regular:
                os.fchmod(self._fd, 0o600)
        except BaseException:
            os.close(self._fd)
            raise
        self._size = 0
        self._gzip = zlib.compressobj(wbits=_GZIP) if path.suffix == ".gz" else None

    def add(self, line: bytes) -> None:
        """OSError: the line is not in the file, and all before it are."""
        if self._regular and not os.fstat(self._fd).st_nlink:
            raise FileNotFoundError("it was removed")
        content = line + b"\n"
        if self._gzip:
            content = self._gzip.compress(content) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        try:
            self._write(content)
        except OSError:
            if self._regular:
                with suppress(OSError):
                    os.ftruncate(self._fd, self._size)
            raise
        self._size += len(content)

    def close(self, *, whole: bool) -> None:
        """`whole`: nothing went wrong, so that gzip gets its proper end."""
        with suppress(OSError):
            if self._gzip and whole:
                self._write(self._gzip.flush())
        os.close(self._fd)

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._fd, rest) :]


class Recorded:
    """A source, recorded.  `close` ends the file, from any thread."""

    def __init__(
        self, source: Source, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """OSError or CannotRecord if the file cannot be begun."""
        self._source, self._path, self._clock = source, path, clock
        self._lock = threading.Lock()  # `close` comes from the thread that shows things
        self._began = clock()
        self._file: File | None = File(path)
        began = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        header = Header(
            schema=RECORDING_SCHEMA, version=__version__, began=began, source=source.title
        )
        try:
            self._file.add(msgspec.json.encode(header))
        except BaseException:
            self.close()
            raise

    @property
    def title(self) -> str:
        return self._source.title

    def pace(self, seconds: float) -> None:
        self._source.pace(seconds)

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        """The source's, and an event `record.stopped` if recording stops before it does."""
        for message in self._source.messages(stop):
            trouble = self._keep(message)
            yield message
            if trouble:
                yield Happened(_notice(self._path, trouble))

    def close(self, *, whole: bool = True) -> None:
        with self._lock:
            file, self._file = self._file, None
        if file:
            file.close(whole=whole)

    def _keep(self, message: Message) -> str:
        """Write it down; why that cannot be, the first time."""
        try:
            with self._lock:
                if self._file:
                    line = as_line(self._clock() - self._began, message)
                    self._file.add(msgspec.json.encode(line))
        except OSError as error:
            self.close(whole=False)
            return error.strerror or str(error)
        return ""


def as_line(at: float, message: Message) -> Line:
    """A message as it stands in the file."""
    at = round(at, 3)
    match message:
        case Whole(board):
            return Line(at=at, board=board)
        case Changed(delta):
            return Line(at=at, delta=delta)
        case Happened(event):
            return Line(at=at, event=event)
        case Lost(why, retry_seconds):
            return Line(at=at, lost=why, retry=retry_seconds)
        case Ended(why):
            return Line(at=at, ended=why)


def _notice(path: Path, why: str) -> EventItem:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    message = f"recording to {path} stopped: {why}; what is in it can be replayed"
    return EventItem(id=0, time=now, level="warn", type=STOPPED, message=message)
