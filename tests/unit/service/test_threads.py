"""The loop's own pool of threads."""

import asyncio
import threading

from lorad.service.threads import POOL_THREADS, bound_pool


def test_the_pool_grows_no_further_on_a_machine_of_many_cores() -> None:
    async def crowd() -> set[str]:
        bound_pool(asyncio.get_running_loop())
        full = threading.Barrier(POOL_THREADS)

        def work(turn: int) -> str:
            if turn < POOL_THREADS:  # so many are at work at once
                full.wait(5)
            return threading.current_thread().name

        return set(await asyncio.gather(*(asyncio.to_thread(work, n) for n in range(64))))

    assert len(asyncio.run(crowd())) == POOL_THREADS
