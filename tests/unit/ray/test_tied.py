"""A daemon that ends when nobody holds its stdin any more."""

import subprocess
import sys

#: Counts the signals of each of many ends.
MANY = """
import asyncio, os, signal, threading
from lorad.ray import tied

heard = []

async def ends():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.append, 1)
    for _ in range(12):
        here, there = os.pipe()
        os.dup2(here, 0)
        thread = threading.Thread(target=tied._end_with_stdin)
        thread.start()
        os.close(there)
        while thread.is_alive():
            await asyncio.sleep(0.001)
        os.close(here)
    await asyncio.sleep(0.05)

asyncio.run(ends())
print(len(heard))
"""


def test_it_is_told_twice_so_that_it_waits_for_nobody() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "24\n", done.stderr
