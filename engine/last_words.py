"""Standard error that ends nobody: what cannot be written is dropped.

Goes in: a text stream, whose disk may be full and whose reader may be gone.  Comes out: one to
which writing never fails, so that a line of log costs no process its life or its exit status.
"""

import contextlib
import sys
from typing import Any, TextIO


class Heedless:
    """All of `stream`, but that `write` and `flush` let no OSError out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tell(text: str) -> None:
    """Whole lines at once.  print() of several lines writes the last end of line by itself, and
    other processes write to the same file in between."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def spare_stderr() -> None:
    """From now on sys.stderr is such a one; again is no harm."""
    if not isinstance(sys.stderr, Heedless):
        sys.stderr = Heedless(sys.stderr)
