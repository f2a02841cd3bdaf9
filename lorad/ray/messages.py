"""What ingress, router and replica tell each other.  Plain: all of it is pickled by Ray.

`Call` goes to a replica, `Head`, `bytes` and `Gone` come back; `Told` is what a replica publishes
of itself, which Serve carries as a dict of plain values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lorad.fleet.members import Ask, State

#: Digits of a revision's 64 that are published: of a thousand adapters, a second and a replica, all
#: of them would be 64 KiB through Serve's controller to every ingress.
SHORT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request on its way to a replica.  `origin`: the ingress that sends it.  `member`: the
    only replica that may answer it; "": any but those of `without`."""

    id: str
    origin: str
    ask: Ask
    rev: str | None = None
    member: str = ""
    without: tuple[str, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """In place of a Head, or behind it: the replica's daemon went away from under the request."""

    member: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A replica about itself.  Counts are of sequences, by the ingress that they are of."""

    rank: str = ""  # its place among the replicas: another one gets it when this one is lost
    state: State = "ready"
    reason: str = ""
    instance: str = ""
    resident: tuple[str, ...] = ()  # beginnings of revisions
    loading: tuple[str, ...] = ()
    free_bytes: int = 1  # before anything is known there is room
    num_waiting: Mapping[str, int] = field(default_factory=dict)
    num_running: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # then by revision

    def stats(self) -> dict[str, Any]:
        """As Serve carries it."""
        return asdict(self)


def told_of(stats: Mapping[str, Any]) -> Told:
    """Of what Serve carried; of a replica that has said nothing yet, that it is there."""
    return Told(**stats)


def shortened(revs: Iterable[str]) -> tuple[str, ...]:
    """As they are published, always in the same order."""
    return tuple(sorted(rev[:SHORT] for rev in revs))


class Held:
    """Revisions whose beginnings were published."""

    def __init__(self, beginnings: Iterable[str]) -> None:
        self._beginnings = frozenset(beginnings)

    def __contains__(self, rev: object) -> bool:
        return isinstance(rev, str) and rev[:SHORT] in self._beginnings
