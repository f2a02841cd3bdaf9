"""What a source of the dashboard's data says, as typed messages.

A source yields them in order, in a thread of its own; the model takes them.  No Textual, no HTTP.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lorad.wire import EventItem
from lorad.wire_stream import Board, Delta


@dataclass(frozen=True, slots=True)
class Whole:
    """Everything anew: at first, and after whatever was missed."""

    board: Board


@dataclass(frozen=True, slots=True)
class Changed:
    """What differs from the board as it was by then."""

    delta: Delta


@dataclass(frozen=True, slots=True)
class Happened:
    """One event."""

    event: EventItem


@dataclass(frozen=True, slots=True)
class Lost:
    """The link broke, or could not be made; another attempt follows in `retry_seconds`."""

    why: str  # ECONNREFUSED, or a few words
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing will follow: a recording is over, or asking again is of no use."""

    why: str


Message = Whole | Changed | Happened | Lost | Ended


class Source(Protocol):
    """Where messages come from: a daemon, a recording, a test."""

    @property
    def title(self) -> str:
        """For the header: `unix:///run/lorad/admin.sock`, `replay churn.jsonl`."""
        ...

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        """Until `stop` is set.  May block; runs in a thread that nobody waits for."""
        ...

    def pace(self, seconds: float) -> None:
        """The dashboard shows something new this often.  From another thread."""
        ...
