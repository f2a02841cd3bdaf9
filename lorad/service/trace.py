"""Trace: what is known of one request, from its receipt to its end, for whoever draws traces.

Goes in: the Ask, then whatever was found on the way.  Comes out: the Trace itself, told once when
the request has ended, however that was.  Only where traces are on: nothing is noted for a token
that the meter does not note anyway.  Knows no attribute's name, no parent's form and no exporter.
"""

from collections.abc import Callable

from lorad.errors import LoradError
from lorad.service.ask import Ask
from lorad.service.generation import Generation
from lorad.service.meter import Span
from lorad.service.pool_ask import Wish

#: The error of a request whose client was gone before its answer was whole.
CLIENT_GONE = "client_gone"


class Trace:
    """`received` and `ended` are of the meter's clock."""

    __slots__ = (
        *("_tell", "ask", "ended", "error", "generation", "model", "name", "received", "rev"),
        *("sequences", "tenant"),
    )

    def __init__(self, ask: Ask, received: float, tell: Callable[["Trace"], None]) -> None:
        self.ask, self.received, self._tell = ask, received, tell
        self.name: str | None = None  # of the adapter; None: the base, or it was never found
        self.rev: str | None = None
        self.tenant = self.model = ""
        self.sequences: list[Span] = []  # that were given to the engine
        self.generation: Generation | None = None  # None: it never began
        self.error: BaseException | None = None
        self.ended: float | None = None

    def end(self, now: float, error: BaseException | None) -> None:
        """It is over; whoever says so second is not heard."""
        if self.ended is None:
            self.ended, self.error = now, error
            self._tell(self)

    def close(self, now: float, generation: Generation) -> None:
        """The same, with what was answered."""
        self.generation = generation
        self.end(now, generation.error)

    @property
    def code(self) -> str:
        """What went wrong, as a client was or would have been told; "" = nothing."""
        if isinstance(self.error, LoradError):
            return self.error.code
        if isinstance(self.error, Exception):
            return "internal_error"
        whole = self.generation is not None and self.generation.over
        return "" if whole and self.error is None else CLIENT_GONE


class PoolTrace:
    """The same of a request for vectors or scores; made at its receipt, told at its end."""

    __slots__ = (
        *("ended", "error", "model", "name", "num_inputs", "num_tokens", "received", "rev"),
        *("tenant", "wish"),
    )

    def __init__(self, wish: Wish, received: float) -> None:
        self.wish, self.received, self.ended = wish, received, received
        self.name: str | None = None  # of the adapter; None: the base, or it was never found
        self.rev: str | None = None
        self.tenant = self.model = ""
        self.num_inputs = self.num_tokens = 0  # that were computed
        self.error: BaseException | None = None

    @property
    def code(self) -> str:
        """What went wrong, as a client was or would have been told; "" = nothing."""
        if isinstance(self.error, LoradError):
            return self.error.code
        if isinstance(self.error, Exception):
            return "internal_error"
        return "" if self.error is None else CLIENT_GONE
