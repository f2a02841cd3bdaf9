"""A standard error that cannot be written to."""

import io
import sys

from engine.last_words import Heedless, spare_stderr


class Full(io.StringIO):
    def write(self, text=""):
        raise OSError(28, "No space left on device")

    flush = write


def test_what_cannot_be_written_is_dropped(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Full())
    spare_stderr()
    print("words", file=sys.stderr, flush=True)
    assert isinstance(sys.stderr, Heedless)
    again = sys.stderr
    spare_stderr()
    assert sys.stderr is again


def test_what_can_be_written_is(monkeypatch):
    kept = io.StringIO()
    monkeypatch.setattr(sys, "stderr", kept)
    spare_stderr()
    print("words", file=sys.stderr)
    assert kept.getvalue() == "words\n"
    assert sys.stderr.getvalue() == "words\n", "and all else of it is there"
