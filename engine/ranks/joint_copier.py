"""The copy engine of all ranks together: a copy has ended when it has on every one of them.

Goes in and comes out what `tiers.CopyEngine` says.  The first rank's own copier takes the first
shard of what host memory holds, and the others are told where theirs are.
"""

from collections.abc import Sequence

from engine.adapters.copier import CudaCopier, ThreadCopier
from engine.adapters.host import HostCache
from engine.ranks.crew import Crew


class JointCopier:
    """Used from the step loop's thread only."""

    def __init__(self, own: CudaCopier | ThreadCopier, crew: Crew, host: HostCache) -> None:
        self._own = own
        self._crew = crew
        self._host = host
        self._owed: dict[str, int] = {}  # revision -> ranks on which its copy has not ended

    def start(self, rev: str, blocks: Sequence[int]) -> None:
        """Queue the copies of `rev` on all ranks.  Raises NoRoom if this one has none for it."""
        self._own.start(rev, blocks)
        self._host.hold(rev)  # until the last rank has read it
        self._owed[rev] = self._crew.size
        self._crew.copy(rev, self._host.place(rev), tuple(blocks))

    def poll(self) -> list[str]:
        """Revisions whose copies have ended everywhere, each reported once."""
        ended = []
        for rev in (*self._own.poll(), *self._crew.reports()):
            self._owed[rev] -= 1
            if not self._owed[rev]:
                del self._owed[rev]
                self._host.let_go(rev)
                ended.append(rev)
        return ended

    def busy(self, rev: str) -> bool:
        """Whether some rank may still write into blocks of `rev`."""
        return rev in self._owed

    def cancel(self, rev: str) -> None:
        """What was not copied yet need not be; `poll` still reports `rev`."""
        self._own.cancel(rev)
        if rev in self._owed:
            self._crew.cancel(rev)

    @property
    def in_flight(self) -> int:
        return len(self._owed)

    def close(self) -> None:
        self._own.close()
