"""Tally: what an ingress has sent to every replica, what each says of itself, and the choice.

Goes in: what the replicas publish; each request that is sent, begins and ends.  Comes out: the
replica that a revision belongs on, by lorad's own router.  Own requests are counted here, since
what is published is a second old; those of other ingresses are as published, which says whose each
is, so that none is counted twice.  Knows nothing of Ray; use it from one thread.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lorad.fleet.counting import Count
from lorad.fleet.members import Member
from lorad.ray.messages import Held, Told
from lorad.routing import affinity
from lorad.routing.affinity import Choice, Router

#: One that died is still told of for so long, unless another one has its place before.
LOST_SECONDS = 60.0


@dataclass(slots=True)
class _Place:
    told: Told
    mine: Count
    resident: Held
    loading: Held
    name: str  # as the router knows it


@dataclass(slots=True)
class _Sent:
    replica: str
    rev: str | None
    began: bool = False


class Tally:
    """Replicas go by Serve's id, which no other one ever has.  `origin`: which ingress this is."""

    def __init__(
        self,
        *,
        origin: str = "",
        router: Router | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.origin, self._router, self._clock = origin, router or Router(), clock
        self._places: dict[str, _Place] = {}
        self._sent: dict[str, _Sent] = {}
        self._lost: dict[str, tuple[Told, float]] = {}  # and when

    # ------------------------------------------------------------- how they are
    def update(self, told: Mapping[str, Told]) -> None:
        """These are there, and nobody else."""
        for gone in self._places.keys() - told.keys():
            del self._places[gone]
        for id, one in told.items():
            place = self._places.get(id)
            if place is None:
                place = self._places[id] = _Place(one, Count(id), Held(()), Held(()), id)
            place.told = one
            place.resident, place.loading = Held(one.resident), Held(one.loading)
        self._name()

    def lose(self, replica: str) -> None:
        """It died; what was sent there ends by itself."""
        if place := self._places.pop(replica, None):
            self._lost[replica] = place.told, self._clock()

    def seen(self) -> list[Member]:
        there = [
            Member(id, place.told.state, place.told.instance, self._look(id), place.told.reason)
            for id, place in self._places.items()
        ]
        self._forget()
        gone = [
            Member(id, "lost", told.instance, _nothing(id), "the replica died")
            for id, (told, _) in self._lost.items()
        ]
        return sorted([*there, *gone], key=lambda member: member.name)

    def choose(self, rev: str | None, without: Collection[str] = ()) -> Choice | None:
        """The replica, by Serve's id, and why; None: nobody takes requests."""
        by_name = {self._places[id].name: id for id in self._places}
        seen = [self._route(id, without) for id in self._places]
        found = self._router.choose(rev, seen, self._clock())
        return Choice(by_name[found.name], found.reason) if found is not None else None

    # ------------------------------------------------------------- requests
    def enter(self, request: str, replica: str, rev: str | None) -> None:
        """It is sent there; whoever was sent elsewhere before is there no more."""
        self.leave(request)
        place = self._places.get(replica)
        if place is not None:
            place.mine.enter(rev)
            self._sent[request] = _Sent(replica, rev)

    def move(self, request: str, replica: str) -> None:
        """It was taken there, and the one that was chosen had no place for it."""
        sent = self._sent.get(request)
        if sent is not None and sent.replica != replica:
            self.enter(request, replica, sent.rev)

    def begin(self, request: str) -> None:
        """Its answer has begun."""
        sent = self._sent.get(request)
        if sent is not None and not sent.began:
            sent.began = True
            if place := self._places.get(sent.replica):
                place.mine.begin(sent.rev)

    def leave(self, request: str) -> None:
        """Unknown ones are ignored."""
        sent = self._sent.pop(request, None)
        if sent is not None and (place := self._places.get(sent.replica)):
            place.mine.leave(sent.rev, began=sent.began)

    @property
    def under_way(self) -> int:
        return len(self._sent)

    # ------------------------------------------------------------- inside
    def _forget(self) -> None:
        ranks = {place.told.rank for place in self._places.values()}
        late = self._clock() - LOST_SECONDS
        for id, (told, when) in list(self._lost.items()):
            if when < late or told.rank in ranks or id in self._places:
                del self._lost[id]

    def _name(self) -> None:
        """A replica goes by its rank, so that whoever takes the place of a lost one gets its
        adapters.  Two may say the same for a moment, while one goes and another comes."""
        ranks = Counter(place.told.rank for place in self._places.values())
        for id, place in self._places.items():
            rank = place.told.rank
            place.name = rank if rank and ranks[rank] == 1 else id

    def _look(self, id: str) -> affinity.Replica:
        """A copy, for others to keep."""
        place = self._places[id]
        seen = self._as_seen(id, place.name, alive=place.told.state == "ready")
        seen.waiting = dict(seen.waiting)
        return seen

    def _route(self, id: str, without: Collection[str]) -> affinity.Replica:
        place = self._places[id]
        alive = place.told.state == "ready" and id not in without
        return self._as_seen(id, place.name, alive=alive)

    def _as_seen(self, id: str, name: str, *, alive: bool) -> affinity.Replica:
        place = self._places[id]
        told, mine = place.told, place.mine
        waiting: Mapping[str, int] = mine.waiting
        if others := [each for who, each in told.waiting.items() if who != self.origin]:
            waiting = Counter(mine.waiting)
            for each in others:
                waiting.update(each)
        return affinity.Replica(
            name=name,
            alive=alive,
            resident=place.resident,
            loading=place.loading,
            waiting=waiting,
            num_waiting=mine.num_waiting + self._others(told.num_waiting),
            num_running=mine.num_running + self._others(told.num_running),
            free_bytes=told.free_bytes,
        )

    def _others(self, by_origin: Mapping[str, int]) -> int:
        return sum(number for who, number in by_origin.items() if who != self.origin)


def _nothing(name: str) -> affinity.Replica:
    return affinity.Replica(name=name, alive=False, waiting={})
