"""Become a command that ends when the process which started it does, whatever that ends of.

Goes in: the starter's pid, and the command.  Comes out: that command, in this process; it is sent
SIGTERM when its starter is gone, kill -9 included.  A process of its own says so for itself: code
between a fork and an exec is not to be had beside threads (Python 3.12 warns of it).
"""

import ctypes
import os
import signal
import sys

#: prctl's: a signal for a process whose parent ends.
PR_SET_PDEATHSIG = 1


def main() -> None:
    """`python -m lorad.demo_leash PID COMMAND...`"""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it has ended already
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
