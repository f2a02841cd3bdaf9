"""Log lines: text for people, JSON for machines, journald's priorities under systemd.

Goes in: the standard `logging`.  Comes out: one line a record on stderr; control characters of
foreign text are escaped.  Prompts and answers are never given to it.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

import msgspec

from lorad.redact import redact

#: Libraries that tell of every connection and statement, some with whole URLs and headers.
_CHATTY = (
    *("uvicorn", "sqlalchemy", "alembic", "watchdog", "asyncio"),
    *("httpx", "httpcore", "httpx2", "httpcore2", "filelock"),
    *("boto3", "botocore", "s3transfer", "urllib3"),
)
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
Format = Literal["text", "json"]
_PLAIN = logging.Formatter()


def setup(level: str, form: Format, env: Mapping[str, str], *more: logging.Handler) -> None:
    """Send everything to stderr, and to `more`; `env` tells whether that is the journal."""
    handler = logging.StreamHandler(sys.stderr)
    journal = is_journal(env.get("JOURNAL_STREAM", ""), sys.stderr)
    handler.setFormatter((JsonLines if form == "json" else TextLines)(journal=journal))
    root = logging.getLogger()
    root.handlers[:] = [handler, *more]
    logging.getLogger("asyncio").filters[:] = [Sparse()]
    set_level(level)


def is_journal(told: str, stream: TextIO) -> bool:
    """`told` is JOURNAL_STREAM, which children inherit, whatever their stderr is by then."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return told == f"{found.st_dev}:{found.st_ino}"


def error_mark(env: Mapping[str, str]) -> str:
    """In front of what is printed and not logged: its priority, if stderr is the journal."""
    return "<3>" if is_journal(env.get("JOURNAL_STREAM", ""), sys.stderr) else ""


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


class Sparse(logging.Filter):
    """One kind of line at most every `seconds`: what repeats without end says nothing new."""

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds, self._clock = seconds, clock
        self._told: dict[tuple[str, str], float] = {}  # kind of line -> when one was let through

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        now, kind = self._clock(), (record.getMessage()[:40], repr(error)[:200])
        if now - self._told.get(kind, -self._seconds) < self._seconds:
            return False
        if len(self._told) >= 100:
            self._told.clear()
        self._told[kind] = now
        return True


class TextLines(logging.Formatter):
    """`2025-03-01T09:30:00.125Z WARNING lorad.inbox: ...`; journald adds the time itself."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text, trace = message_of(record), traceback_of(record)
        text = f"{record.name}: {text}" + (f"\n{trace}" if trace else "")
        if self._journal:
            return _for_journal(record, text)
        return f"{time_of(record)} {record.levelname} {text}"


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, an event's fields, a traceback as error."""

    def __init__(self, *, journal: bool = False) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message_of(record),
        }
        known: Mapping[str, str] = getattr(record, "fields", {})
        fields |= {name: _one_line(redact(value)) for name, value in known.items() if value}
        if trace := traceback_of(record):
            fields["error"] = trace
        line = msgspec.json.encode(fields).decode()
        return _for_journal(record, line) if self._journal else line


def message_of(record: logging.LogRecord) -> str:
    """On one line, without secrets."""
    return _one_line(redact(record.getMessage()))


def traceback_of(record: logging.LogRecord) -> str:
    """ "" if there is none."""
    if not record.exc_info:
        return ""
    lines = redact(_PLAIN.formatException(record.exc_info)).split("\n")
    return "\n".join(map(_one_line, lines))


def time_of(record: logging.LogRecord) -> str:
    """RFC 3339, in UTC with milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _for_journal(record: logging.LogRecord, text: str) -> str:
    """journald takes each line as an entry, with a priority of its own."""
    mark = f"<{_PRIORITIES.get(record.levelname, 6)}>"
    return mark + text.replace("\n", f"\n{mark}")


def _one_line(text: str) -> str:
    """Foreign text can neither forge a line nor drive a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
