"""A yardstick of this machine at this moment, for bounds on processor time."""

import time


def million_additions() -> float:
    """Seconds of this thread that a plain loop takes: 0.034 to 0.042 on the two cores where a
    scrape of ten thousand adapters takes 0.045 to 0.049, and 0.065 to 0.071 an hour before, when
    others had a part of the same cores."""
    began, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return time.thread_time() - began
