"""Work that may wait for somebody else's machine, each on a thread of its own.

Goes in: a function.  Comes out: its result on the event loop.  Unlike those of the loop's pool,
these threads are as many as there is work (whoever calls bounds that), so that a slow source never
stands in the way of the disk; and they are daemons, so that one that waits for a silent server
does not hold up the end of the process.  The loop's pool itself has its size from here.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

#: Of the loop's own pool, for what waits for a disk.  Python's default follows the cores: 20
#: threads on 16, each with its pages of the registry and its corner of the allocator, and more and
#: more of them as the hours pass.
POOL_THREADS = 8

T = TypeVar("T")


def bound_pool(loop: asyncio.AbstractEventLoop) -> None:
    """`asyncio.to_thread` has so many threads from now on, on a machine of any size."""
    loop.set_default_executor(ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="lorad-work"))


async def on_thread(work: Callable[[], T], name: str = "lorad-source") -> T:
    """Run `work` and wait for it.  Cancelling ends the waiting, not the work."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(say: Callable[[], None]) -> None:
        if not future.done():
            say()

    def run() -> None:
        try:
            result = work()
        except BaseException as raised:
            error = raised
            answer: Callable[[], None] = lambda: future.set_exception(error)  # noqa: E731
        else:
            answer = lambda: future.set_result(result)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, answer)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


class Rooms:
    """At most `each` at work for one origin, and `total` in all.

    Whoever waits for its origin holds nobody else's place.
    """

    def __init__(self, each: int, total: int) -> None:
        self._each, self._all = each, asyncio.Semaphore(total)
        self._origins: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def at(self, origin: str) -> AsyncIterator[None]:
        """A place for work at `origin`, for as long as the block lasts."""
        room = self._origins.setdefault(origin, asyncio.Semaphore(self._each))
        self._users[origin] += 1
        try:
            async with room, self._all:
                yield
        finally:
            self._users[origin] -= 1
            if not self._users[origin]:
                del self._users[origin], self._origins[origin]
