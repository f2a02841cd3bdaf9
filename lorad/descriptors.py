"""File descriptors: as many as the system grants, and never all of them for connections.

Goes in: the limits of this process.  Comes out: the number that may be open, and how many
connections a listener may hold so that files, engine and registry find theirs.  An accept that
finds none would be tried again and again, and nobody could be shed to make room.
"""

import contextlib
import logging
import resource

log = logging.getLogger("lorad")

#: More than anything here needs, and no burden on the kernel.
ENOUGH = 65536
#: For the registry, the inbox, the engine, the packers and adapters on their way in.
RESERVED = 64
#: Even under a limit that is far too small somebody must be able to ask what is wrong.
FEWEST = 8


def share(wanted: int, listeners: int) -> int:
    """Lift the limit; then how many connections of `wanted` each of `listeners` may hold."""
    limit = raise_limit()
    held = connections(wanted, limit, listeners)
    if held < wanted:
        words = "%d open files are allowed: each socket holds %d connections, not %d; "
        log.warning(words + "raise LimitNOFILE or ulimit -n", limit, held, wanted)
    return held


def raise_limit() -> int:
    """Lift the soft limit towards the hard one; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ENOUGH if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def connections(wanted: int, limit: int, listeners: int) -> int:
    """How many each of `listeners` may hold, of `wanted`, under `limit` open files."""
    return max(min(wanted, (limit - RESERVED) // listeners), FEWEST)
