"""Progress: one line of where the daemon is, told to systemd and the log.

Goes in: the links' states, and how far each engine's start is.  Comes out: STATUS= and log lines,
no more of them than somebody reads.  Decides nothing.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from lorad.service.engine_link import EngineLink
from lorad.systemd import Notifier

log = logging.getLogger("lorad")

#: systemd is asked for this much more time while the engine's start makes progress, so often.
EXTEND_SECONDS, EXTEND_EVERY = 120.0, 5.0


class Progress:
    """`links`: every engine, by its model's name, and its own where there are replicas; `models`
    are what is served."""

    def __init__(
        self, notifier: Notifier, links: Mapping[str, EngineLink], models: Sequence[str]
    ) -> None:
        self._notifier, self._links, self._models = notifier, links, models
        self._told: dict[str, tuple[str, int]] = {}  # what was reported last
        self._extended = 0.0  # when systemd was last asked for more time

    def state(self) -> str:
        """One line for `systemctl status`."""
        away = [
            f"{self._whose(model)}{link.state}: {link.progress}"
            for model, link in self._links.items()
            if link.state != "ready"
        ]
        return "; ".join(away) or f"serving {', '.join(self._models)}"

    def say(self, text: str) -> None:
        """To both at once."""
        log.info("%s", text)
        self._notifier.status(text)

    def take(self, model: str, phase: str, fraction: float) -> None:
        """Weights report every tensor; systemd hears of it now and then, the log of each quarter.

        A quarter of a large model on a slow disk takes longer than systemd waits.
        """
        step, now = (phase, int(fraction * 4)), time.monotonic()
        if step == self._told.get(model) and now - self._extended < EXTEND_EVERY:
            return
        text = f"{self._whose(model)}loading the base model: {phase} {fraction:.0%}"
        self._notifier.status(text, extend_seconds=EXTEND_SECONDS)
        self._extended = now
        if step != self._told.get(model):
            self._told[model] = step
            log.info("%s", text)

    def _whose(self, model: str) -> str:
        """Of several models, which."""
        return f"{model}: " if len(self._links) > 1 else ""
