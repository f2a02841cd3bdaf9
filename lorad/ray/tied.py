"""`lorad`, tied to whoever holds the other end of its stdin: `python -m lorad.ray.tied ...`.

Goes in: `lorad`'s own words, and a pipe.  When that closes, the daemon ends at once.
"""

import os
import signal
import threading

from lorad.cli.serve import main as serve


def main() -> None:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    serve()


def _end_with_stdin() -> None:
    """The first signal drains, the second aborts: nobody waits for anything."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
