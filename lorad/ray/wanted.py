"""Wanted: whether Serve still wants this ingress, which it tells nobody that it ends.

Goes in: its questions how the ingress is.  Comes out: that they have stopped.  Serve waits for all
that runs before it lets an ingress clean up, and kills it when that takes too long: streams of
events never end by themselves.  It asks every replica that it wants how it is, and none that it
ends.  Knows nothing of Ray.
"""

import asyncio
import time
from collections.abc import Callable

#: Serve asks so often, a tenth more or less; see lorad.ray.app.
ASK_SECONDS = 2.0
#: So long without a question, and streams end.  One that is wanted after all loses its streams,
#: which are begun anew by their clients.
SILENT_SECONDS = 4 * ASK_SECONDS
#: What ends then has time to, and what answers requests goes on for so long.
GRACE_SECONDS = 20.0


class Wanted:
    """`end_streams` is called once when questions stop, and `go_on` if they come again."""

    def __init__(
        self,
        end_streams: Callable[[], None],
        go_on: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end_streams, self._go_on, self._clock = end_streams, go_on, clock
        self._asked: float | None = None  # not before Serve calls it running
        self._ended = False

    def asked(self) -> None:
        self._asked = self._clock()
        if self._ended:
            self._ended = False
            self._go_on()

    def look(self) -> None:
        silent = self._asked is not None and self._clock() - self._asked > SILENT_SECONDS
        if silent and not self._ended:
            self._ended = True
            self._end_streams()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(ASK_SECONDS / 4)
            self.look()
