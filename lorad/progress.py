"""Progress: one line of where the daemon is, told to systemd and the log.

Goes in: the link's state, and how far the engine's start is.  Comes out: STATUS= and log lines, no
more of them than somebody reads.  Decides nothing.
"""

import logging
import time

from lorad.service.engine_link import EngineLink
from lorad.systemd import Notifier

log = logging.getLogger("lorad")

#: systemd is asked for this much more time while the engine's start makes progress, so often.
EXTEND_SECONDS, EXTEND_EVERY = 120.0, 5.0


class Progress:
    """`model` is the name that the base is served by."""

    def __init__(self, notifier: Notifier, link: EngineLink, model: str) -> None:
        self._notifier, self._link, self._model = notifier, link, model
        self._told: tuple[str, int] | None = None  # what was reported last
        self._extended = 0.0  # when systemd was last asked for more time

    def state(self) -> str:
        """One line for `systemctl status`."""
        if self._link.state == "ready":
            return f"serving {self._model}"
        return f"{self._link.state}: {self._link.progress}"

    def say(self, text: str) -> None:
        """To both at once."""
        log.info("%s", text)
        self._notifier.status(text)

    def take(self, phase: str, fraction: float) -> None:
        """Weights report every tensor; systemd hears of it now and then, the log of each quarter.

        A quarter of a large model on a slow disk takes longer than systemd waits.
        """
        step, now = (phase, int(fraction * 4)), time.monotonic()
        if step == self._told and now - self._extended < EXTEND_EVERY:
            return
        text = f"loading the base model: {phase} {fraction:.0%}"
        self._notifier.status(text, extend_seconds=EXTEND_SECONDS)
        self._extended = now
        if step != self._told:
            self._told = step
            log.info("%s", text)
