"""An event loop whose time passes only when nobody has anything to do.

Goes in: a coroutine without threads, sockets or processes.  Comes out: its result, the same for the
same random numbers, and an hour of waiting costs nothing.  `InlineExecutor` does a thread's work at
once; a loop that would wait for ever raises Stuck.
"""

import asyncio
import selectors
from concurrent.futures import Future, ThreadPoolExecutor


class Stuck(AssertionError):
    """Everybody waits, and nothing is left that could wake them."""


class _Selector(selectors.SelectSelector):
    """Never waits: tells the loop how long it would have."""

    def __init__(self, passes) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout=None):
        if timeout is None:
            raise Stuck("nothing is left to happen")
        self._passes(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 1000 s."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Selector(self._pass))

    def time(self) -> float:
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += max(seconds, 0.0)

    def call_soon_threadsafe(self, callback, *args, context=None):
        return self.call_soon(callback, *args, context=context)  # there is one thread


class InlineExecutor(ThreadPoolExecutor):
    """Work is done when it is submitted."""

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def run(main):
    """`asyncio.run` in virtual time."""

    def make() -> VirtualLoop:
        loop = VirtualLoop()
        loop.set_default_executor(InlineExecutor(1))
        return loop

    with asyncio.Runner(loop_factory=make) as runner:
        return runner.run(main)
