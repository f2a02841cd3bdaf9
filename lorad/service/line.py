"""Line: a few places, for which those go first that somebody waits for.

Goes in: keys of work that queues, and word of who is waited for.  Comes out: the turn of each; the
others keep their order.  Knows nothing of the work.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Line:
    """`places` at work at once.  Used on one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # key -> turns, in order
        self._wanted: Counter[str] = Counter()

    @contextmanager
    def wanted(self, key: str) -> Iterator[None]:
        """Meanwhile work of `key` goes before what nobody waits for, queued already or not."""
        self._wanted[key] += 1
        try:
            yield
        finally:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """A place, for as long as the block lasts."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(key)
        try:
            yield
        finally:
            self._pass_on()

    async def _turn(self, key: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it had come
            else:
                self._leave(key, turn)
            raise

    def _pass_on(self) -> None:
        """To the first that somebody waits for, or to the first."""
        wanted = (key for key in self._wanted if key in self._waiting)
        key = next(wanted, next(iter(self._waiting), None))
        if key is None:
            self._free += 1
            return
        turn = self._waiting[key][0]
        self._leave(key, turn)
        turn.set_result(None)

    def _leave(self, key: str, turn: "asyncio.Future[None]") -> None:
        self._waiting[key].remove(turn)
        if not self._waiting[key]:
            del self._waiting[key]
