"""HttpCounts: answers by route and status, as the guards of all listeners see them.

Goes in: each request when it is over.  Comes out: counters that only grow.  Labels are patterns of
our routes and methods that HTTP knows: nothing of what a client wrote becomes one.
"""

from collections import Counter

from engine.histogram import SECONDS, Histogram

#: Paths that no route has, and heads that are no request.
UNMATCHED = "unmatched"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: As nginx has it: the client left before there was an answer.
CLIENT_GONE = 499


class HttpCounts:
    """One a daemon; written on the event loop."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str, str]] = Counter()  # route, method, status
        self.seconds: dict[str, Histogram] = {}  # by route
        self.denied: Counter[str] = Counter()  # by listener: strangers

    def note(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request is over."""
        self.refuse(route, method, status)
        if (histogram := self.seconds.get(route)) is None:
            histogram = self.seconds[route] = Histogram(SECONDS)
        histogram.observe(seconds)

    def refuse(self, route: str, method: str, status: int) -> None:
        """A request that took no time worth counting."""
        self.answers[route, method if method in METHODS else "other", str(status)] += 1
