"""`lorad`, tied to whoever holds the other end of its stdin: `python -m lorad.ray.tied ...`.

Goes in: `lorad`'s own words, and a pipe.  When that closes, the daemon ends at once.
"""

import os
import signal
import threading
import time

from lorad.cli.serve import main as serve

#: Between the two signals.
PAUSE_SECONDS = 0.1


def main() -> None:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    serve()


def _end_with_stdin() -> None:
    """The first signal drains, the second aborts: nobody waits for anything.  Without a pause every
    eighth second one never came: what is under way already is not sent again."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PAUSE_SECONDS)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else it has ended, or not begun
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
