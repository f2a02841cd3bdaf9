"""Named places where a crash or a full disk would hurt most.

Goes in: a hook that a test sets.  Comes out: nothing; without a hook a `hit` is one comparison.
Knows neither what the places mean nor what the hook does (kill the process, raise ENOSPC).
"""

from collections.abc import Callable

Hook = Callable[[str], None]

_hook: Hook | None = None

#: Every place, in the order in which a registration passes it.
NAMES = (
    "store.file_synced",
    "store.before_rename",
    "store.renamed",
    "write.begun",
    "register.revision_inserted",
    "write.executed",
    "write.committed",
    "cards.written",
    "backup.copied",
    "migrate.backed_up",
    "migrate.executed",
    "recover.moved_aside",
    "recover.built",
    "gc.set_aside",
    "unpack.sums_gone",
    "remote.marked",
    "remote.filled",
)


def set_hook(hook: Hook | None) -> None:
    """Call `hook(name)` at every place from now on; None ends it."""
    global _hook
    _hook = hook


def hit(name: str) -> None:
    """The code is at place `name`."""
    if _hook is not None:
        _hook(name)
