"""What residency asks of its neighbours: host memory, the copy engine, and room in the pool.

Protocols only.  `adapters/host.py` and `adapters/copier.py` implement the first two,
`memory/reclaim.py` the third; tests bring small fakes of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.adapters.slots import SlotRow

#: Threads that read into host memory.  They wait for a disk, and take no processor meanwhile.
READERS = 6


@dataclass(frozen=True, slots=True)
class HostDone:
    """A read has ended; `error` "" means that the whole file is in host memory.

    `damaged`: the file has its length, and other bytes than were packed.  `cancelled`: nothing was
    read, and nothing is there.
    """

    rev: str
    error: str = ""
    damaged: bool = False
    seconds: float = 0.0  # of reading alone, not of waiting for others
    cancelled: bool = False


class HostTier(Protocol):
    """Packed revisions in host memory, under a byte budget.  No call blocks."""

    @property
    def used_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    def want(self, rev: str, path: str, num_bytes: int) -> bool:
        """Start a read, evicting unprotected others; False = no room now.  Harmless if repeated.

        Of those that may go, what is worth least goes first, of equals the least recently used.
        """
        ...

    def appraise(self, rev: str, worth: int) -> None: ...
    def touch(self, rev: str) -> None: ...

    def cancel(self, rev: str) -> None:
        """Nobody waits for it any more: a read that has not begun ends `cancelled` at once."""
        ...

    def ready(self, rev: str) -> bool: ...
    def protect(self, rev: str, on: bool) -> None: ...
    def drop(self, rev: str) -> None: ...
    def poll(self) -> list[HostDone]: ...


class CopyEngine(Protocol):
    """Copies from host memory to the arena.  No call blocks."""

    def start(self, rev: str, blocks: Sequence[int]) -> None:
        """Begin a copy.  NoRoom: the device has no memory for it, and `blocks` are as before."""
        ...

    def poll(self) -> list[str]:
        """Revisions whose copy has ended, cancelled ones included, each once."""
        ...

    def busy(self, rev: str) -> bool: ...
    def cancel(self, rev: str) -> None: ...


class AdapterSource(Protocol):
    """What `Room` asks back: residency itself."""

    def idle(self) -> Iterable[SlotRow]: ...
    def evict_idle(self, rev: str, cause: str) -> None: ...
    def priority_of(self, identity: str) -> int: ...
    def in_ram(self, rev: str) -> bool: ...


class Room(Protocol):
    """Blocks for adapters."""

    def bind(self, adapters: AdapterSource) -> None: ...
    @property
    def reserved_for(self) -> str | None: ...
    def reserve(self, rev: str | None, blocks: int = 0) -> None: ...
    def fits_adapter(self, count: int, beside: int) -> bool: ...
    def take_adapter(
        self, count: int, rev: str, *, need_slot: bool, now: float
    ) -> list[int] | None: ...
    def lacks_running_kv(self, count: int) -> bool: ...
    def give_back(self, blocks: Sequence[int]) -> None: ...
    def note_load(self, seconds: float, blocks: int) -> None: ...
    def note_read(self, seconds: float, blocks: int) -> None: ...
    def note_return(self, kept: bool) -> None: ...
    def forget(self, identity: str) -> None: ...
