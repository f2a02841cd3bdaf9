"""How slow this machine is, so that a bound on work in seconds means the same work everywhere."""

import time

#: Of the loop below with Python 3.11 on a server's core of 3 GHz that is nobody else's.
_REFERENCE_SECONDS = 0.04


def slowness() -> float:
    """So many times as long as there a plain loop takes now; 1 where it is quicker.  Multiply a
    bound by it: a shared machine at a third of its speed is no mistake of the code."""
    return max(1.0, min(_loop() for _ in range(5)) / _REFERENCE_SECONDS)


def _loop() -> float:
    began, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return time.thread_time() - began
