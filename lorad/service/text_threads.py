"""Threads in which texts become ids, and large answers bytes: who brings little never waits for
who brings much.

Goes in: a function, and how many characters it reads.  Comes out: its result, on the event loop.
Knows no tokenizers.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

#: Threads for requests of fewer characters than `LONG`, and for others.  Four prompts of 3 MB, with
#: all threads for everybody, kept a request of 20 tokens waiting for 28 s.
THREADS, LONG_THREADS = 4, 2
#: A thread reads as much in a few tenths of a second.
LONG = 1 << 18


class TextThreads:
    """Both kinds, or `instead` of either.  A thread is made when it is first needed."""

    def __init__(self, instead: Executor | None = None) -> None:
        self._short = instead or ThreadPoolExecutor(THREADS, "lorad-text")
        self._long = instead or ThreadPoolExecutor(LONG_THREADS, "lorad-long-text")

    async def run(self, num_characters: int, work: Callable[[], T]) -> T:
        """Cancelling ends the waiting, and work that has not begun."""
        pool = self._long if num_characters >= LONG else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """What has not begun does not."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def num_characters(value: Any) -> int:
    """Of all texts in what was parsed: messages, prompts, tools.  Token ids have none."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + num_characters(each) for key, each in value.items())
    if isinstance(value, tuple | list) and not (value and isinstance(value[0], int)):
        return sum(map(num_characters, value))
    return 0
