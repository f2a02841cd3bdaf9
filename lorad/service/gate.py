"""Gate: whose new requests are turned away, because an operator or the daemon's end says so.

Goes in: what is closed.  Comes out: `draining` for requests that come; those that run go on.
"""

from lorad.errors import LoradError

STOPPING = "lorad is shutting down"
HELD = "an operator drains the daemon: it takes no new requests"


class Gate:
    """`closed` is why nothing is let in; "" lets everything in but the names that are `held`."""

    def __init__(self) -> None:
        self.closed = ""
        self.held: set[str] = set()

    def holds(self, name: str) -> bool:
        """Is it turned away, by itself or with all others?"""
        return bool(self.closed) or name in self.held

    def check_open(self) -> None:
        """Raise draining while nothing is let in."""
        if self.closed:
            raise LoradError("draining", self.closed)

    def check(self, name: str | None) -> None:
        """The same for one adapter, None: the base model."""
        self.check_open()
        if name in self.held:
            raise LoradError("draining", f"{name!r} takes no new requests for now")
