"""Log lines: text for people, JSON for machines, journald's priorities under systemd.

Goes in: the standard `logging`.  Comes out: one line a record on stderr; control characters of
foreign text are escaped.  Prompts and answers are never given to it.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

#: Libraries that tell of every connection and statement, some with whole URLs and headers.
_CHATTY = (
    *("uvicorn", "sqlalchemy", "alembic", "watchdog", "asyncio"),
    *("httpx", "httpcore", "httpx2", "httpcore2", "filelock"),
    *("boto3", "botocore", "s3transfer", "urllib3"),
)
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
Format = Literal["text", "json"]


def setup(level: str, form: Format, env: Mapping[str, str]) -> None:
    """Send everything to stderr; `env` tells whether that is the journal."""
    handler = logging.StreamHandler(sys.stderr)
    journal = "JOURNAL_STREAM" in env and not sys.stderr.isatty()
    handler.setFormatter(JsonLines() if form == "json" else TextLines(journal=journal))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.getLogger("asyncio").filters[:] = [Sparse()]
    set_level(level)


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
        text = _one_line(record.getMessage())
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._journal:
            return f"<{_PRIORITIES.get(record.levelname, 6)}>{record.name}: {text}"
        return f"{_time(record)} {record.levelname} {record.name}: {text}"


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, and error with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _one_line(record.getMessage()),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _one_line(text: str) -> str:
    """Foreign text can neither forge a line nor drive a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
