"""LoadChecks: what came to the GPU is held against its stored files, without anybody's asking.

Goes in: transitions, as the engine tells them.  Comes out: one verification after another: of every
load (`full`, the earliest first), or of one every ten minutes (`sample`, the latest first).  What a
verification finds is its own to tell.  Who has made way by then is passed over: no adapter is
brought back to be looked at.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from engine.config import VerifyOnLoad
from engine.messages import AdapterEvent
from lorad.service.tasks import Tasks

SAMPLE_SECONDS = 600.0


class LoadChecks:
    """`check` is Verification's; `resident`: is the revision on the GPU now?"""

    def __init__(
        self,
        mode: VerifyOnLoad,
        tasks: Tasks,
        *,
        check: Callable[[str], Coroutine[Any, Any, None]],
        resident: Callable[[str], bool],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._mode, self._tasks, self._sleep = mode, tasks, sleep
        self._check, self._resident = check, resident
        self._loaded: dict[str, None] = {}  # and not looked at since, the latest at the end
        self._more = asyncio.Event()

    def take_transition(self, event: AdapterEvent) -> None:
        """One with a `source` ends a load."""
        if self._mode != "off" and event.source:
            self._loaded.pop(event.rev, None)
            self._loaded[event.rev] = None
            self._more.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while self._mode != "off":
            if self._mode == "sample":
                await self._sleep(SAMPLE_SECONDS)
            await self._more.wait()
            if rev := self._next():
                await asyncio.wait({self._tasks.spawn(self._check(rev))})

    def _next(self) -> str:
        """ "" if none of them is there any more."""
        while self._loaded:
            rev = next(iter(self._loaded) if self._mode == "full" else reversed(self._loaded))
            del self._loaded[rev]
            if self._resident(rev):
                return rev
        self._more.clear()
        return ""
