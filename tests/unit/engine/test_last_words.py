"""A standard error that cannot be written to."""

import io
import sys

from engine.last_words import Heedless, spare_stderr, tell


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


def test_lines_that_several_processes_write_at_once_are_not_glued(monkeypatch):
    """The table of one engine, and a daemon's line behind its last word."""

    class Writes(io.RawIOBase):
        def __init__(self):
            self.each = []

        def writable(self):
            return True

        def write(self, data):
            self.each.append(bytes(data))
            return len(data)

    raw = Writes()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", Heedless(stream))
    tell("weights 1\narena 2")
    assert raw.each == [b"weights 1\narena 2\n"]
    stream.detach()
