"""Pulse: the watchdog of systemd, fed while the daemon's loop runs and the engine is looked after.

Goes in: the loop, by running in it; whether the engine is tended, from EngineLink.  Comes out:
WATCHDOG=1 twice as often as asked for.  An engine that stalls or dies is replaced by the daemon
itself, which keeps HTTP answering; only when that does not happen either is systemd let to replace
the whole.
"""

import asyncio
import logging
from collections.abc import Callable

from lorad.systemd import Notifier

log = logging.getLogger("lorad.watchdog")


class Pulse:
    """`tended` says whether the engine moves, or is being replaced in time."""

    def __init__(self, notifier: Notifier, tended: Callable[[], bool]) -> None:
        self._notifier, self._tended = notifier, tended
        self._starving = False

    async def run(self) -> None:
        """For ever, or not at all where nobody watches."""
        while self._notifier.watchdog_seconds:
            self.beat()
            await asyncio.sleep(self._notifier.watchdog_seconds)

    def beat(self) -> None:
        """Feed it if there is reason to."""
        starving = not self._tended()
        if not starving:
            self._notifier.watchdog()
        elif not self._starving:
            text = "the engine neither moves nor is replaced; systemd's watchdog is not fed"
            log.critical("%s", text)
            self._notifier.status(text)
        self._starving = starving
