"""Tasks: background work that nobody awaits, kept alive and never silent.

Goes in: coroutines.  Comes out: nothing; a failure is logged with its traceback and counted.  One
of the three borders where every exception is caught.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("lorad.tasks")


class Tasks:
    """The set of running background tasks of one owner."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self.failures = 0

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` now."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def settle(self) -> None:
        """Wait until nothing runs, work that running work spawns included."""
        while self._running:
            await asyncio.wait(set(self._running))

    async def cancel(self) -> None:
        """End everything, at once."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
            log.error("background work failed: %s", error, exc_info=error)
