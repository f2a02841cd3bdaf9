"""Going: orders that go on by themselves when their client has heard that they take longer.

Goes in: an order, and how long its client waits.  Comes out: what it came to, or what it still
waits for.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from lorad.errors import LoradError
from lorad.fleet.members import Lost
from lorad.fleet.presence import Presence

T = TypeVar("T")

log = logging.getLogger("lorad.fleet")

#: Less than a client waits that says nothing of it (lorad.caller.TIMEOUT_SECONDS).
ANSWER_SECONDS = 20.0


class Going:
    """Of one gateway; `close` ends what still goes on."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._orders: set[asyncio.Task[Any]] = set()

    async def within(self, what: str, order: Coroutine[Any, Any, T], seconds: float) -> T:
        """What it came to; deadline_exceeded after `seconds`, and it goes on.  So it does for a
        client that hangs up."""
        task = asyncio.create_task(order, name=what)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            if not task.done():
                task.add_done_callback(_tell)
        if task.done():
            return task.result()
        message = f"{what} is not done after {seconds:g} s; it goes on"
        hint = "loractl show NAME tells when it is done"
        if told := self._presence.waits_for():
            message += f", and waits for {told}"
            hint = "it is done when all gateways know of it or have stopped: loractl show NAME"
        raise LoradError("deadline_exceeded", message, hint=hint)

    async def close(self) -> None:
        orders = list(self._orders)
        for order in orders:
            order.cancel()
        await asyncio.gather(*orders, return_exceptions=True)


def _tell(task: asyncio.Task[Any]) -> None:
    """Nobody waits for it any more."""
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, LoradError | Lost):
        log.warning("%s went on, and failed: %s", task.get_name(), error)
    elif error is not None:
        log.error("%s went on, and failed", task.get_name(), exc_info=error)
    else:
        log.info("%s is done", task.get_name())
