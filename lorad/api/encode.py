"""Pieces of answers → the bytes of their events.

Goes in: a shape of `api/shapes.py`, then Pieces.  Comes out: SSE events.  Only the text differs
between an answer's events: the rest is encoded once, by the same Structs, and cut at the text.
Measured: 0.4 against 2.0 µs an event.  Knows no socket.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from lorad.api import sse
from lorad.api.respond import as_lorad_error, envelope
from lorad.service.ask import Count, Piece

#: Characters of one event.  Some clients read lines of 64 KiB at most, and text that has waited for
#: its reader comes all at once; JSON may make 12 bytes of a character.
MAX_TEXT = 4096
#: Stands for the text; no id, name or fingerprint holds it.
_MARK = "\ue000text\ue000"
_MARK_BYTES = sse.json_text(_MARK)


class Shape(Protocol):
    """Of ChatShape and CompletionShape; `framed`: chunks of text alone differ only in the text."""

    framed: bool

    def chunks(self, piece: Piece) -> list[Struct]: ...
    def usage_chunk(self, count: Count) -> Struct: ...


class EventEncoder:
    """`usage` gives the last chunk's numbers; None = nobody asked for them."""

    def __init__(self, shape: Shape, usage: Callable[[], Count] | None) -> None:
        self._shape, self._usage = shape, usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # around the text, by answer

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """In order; an answer's first piece brings its role with it, where there are roles."""
        if len(pieces) == 1:
            return self._events(pieces[0])
        return b"".join(map(self._events, pieces))

    def end(self, error: Exception | None) -> bytes:
        """An error is the last event; without one it is `[DONE]`."""
        if error is not None:
            return sse.event(envelope(as_lorad_error(error)))
        if self._usage is None:
            return sse.DONE
        return sse.event(self._shape.usage_chunk(self._usage())) + sse.DONE

    def _events(self, piece: Piece) -> bytes:
        if len(piece.text) > MAX_TEXT and not piece.tokens and not piece.prompt:
            return b"".join(map(self._events, _short(piece)))
        frame = self._frames.get(piece.index)
        if frame is None or piece.finish or piece.tokens or piece.prompt:
            events = b"".join(map(sse.event, self._shape.chunks(piece)))
            if frame is None and self._shape.framed:
                self._frames[piece.index] = self._frame(piece.index)
            return events
        return frame[0] + sse.json_text(piece.text) + frame[1]

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        [chunk] = self._shape.chunks(Piece(index=index, text=_MARK))
        head, tail = sse.event(chunk).split(_MARK_BYTES)
        return head, tail


def _short(piece: Piece) -> Iterator[Piece]:
    """The same in events that any client can read; the last one has the finish."""
    last = (len(piece.text) - 1) // MAX_TEXT
    for n in range(last + 1):
        text = piece.text[n * MAX_TEXT : (n + 1) * MAX_TEXT]
        yield Piece(index=piece.index, text=text, finish=piece.finish if n == last else None)
