"""Deadlines: which live sequences are out of time.

Goes in: sequences as they arrive, the time.  Comes out: those whose deadline has passed, each once,
earliest first.  Ends nothing itself.
"""

import heapq
from collections.abc import Iterator, Mapping

from engine.sequence import Sequence, Status


class Deadlines:
    """`live` is by request id, everywhere here; an id may be another sequence's by now."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # time, arrival, request id

    def note(self, seq: Sequence, live: Mapping[str, Sequence]) -> None:
        """Those of requests that have ended go when they are most: they are minutes ahead."""
        if seq.deadline is None:
            return
        heapq.heappush(self._heap, (seq.deadline, seq.order, seq.request_id))
        if len(self._heap) > 2 * len(live) + 64:
            orders = {request_id: other.order for request_id, other in live.items()}
            self._heap = [d for d in self._heap if orders.get(d[2]) == d[1]]
            heapq.heapify(self._heap)

    def pass_by(self, now: float, live: Mapping[str, Sequence]) -> Iterator[Sequence]:
        """Take out what is due; those that are live still."""
        while self._heap and self._heap[0][0] <= now:
            _, order, request_id = heapq.heappop(self._heap)
            late = live.get(request_id)
            if late is not None and late.order == order:
                yield late


def lateness(seq: Sequence) -> str:
    """What its client is told."""
    if seq.num_generated:
        return f"its deadline came after {seq.num_generated} tokens"
    if seq.status is Status.RUNNING:
        return "its deadline came while its prompt was computed"
    return "its deadline came while it was queued"
