"""Affinity: which replica of a model serves a request, by where its adapter is.

Goes in: a revision (None: the base), every replica as it is now, the time.  Comes out: a `Choice`,
or None while no replica takes requests.  The same calls give the same choices.  Remembers nothing
but which adapters are hot, and knows no engine, no request and no name.

An adapter's replicas have a fixed order, by rendezvous hashing.  The first that takes requests is
its home; a hot adapter has more homes, the next ones in that order.  A lost replica moves its own
adapters alone, and they go back to it when it is there again.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

#: Why a replica was chosen: the base goes to the least loaded; an adapter to its home, to where it
#: is already, past a replica that is full, or to one of the several homes of a hot one.
Reason = Literal["base", "home", "holder", "spill", "spread"]


@dataclass(slots=True, kw_only=True)  # one a replica and request: frozen ones take twice as long
class Replica:
    """One engine as it is now.  All counts are of sequences."""

    name: str
    alive: bool  # it takes requests: neither lost nor draining nor starting
    resident: Container[str] = frozenset()  # revisions on its device
    loading: Container[str] = frozenset()  # and on their way to it
    waiting: Mapping[str, int]  # that have not begun, by revision
    num_waiting: int = 0  # the base's too
    num_running: int = 0
    free_bytes: int = 0  # room for what is loaded next, idle adapters and cached KV included

    @property
    def load(self) -> int:
        return self.num_waiting + self.num_running

    def holds(self, rev: str) -> bool:
        """It is there, or will be before a load that begins now."""
        return rev in self.resident or rev in self.loading or bool(self.waiting.get(rev))


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the router goes by; `spare` and the queues count sequences."""

    excess: float = 1.25  # a replica is full at so much of what all have on the average,
    spare: int = 8  # and at no less than this: a few more cost less than a load
    hot_queue: int = 8  # so many wait at each of its homes, and an adapter gets one more,
    settle_seconds: float = 1.0  # but not sooner than this after the last
    cool_queue: int = 2  # no more wait at each of them
    cool_seconds: float = 30.0  # for so long, and it has one home less


@dataclass(slots=True)
class _Hot:
    homes: int
    since: float  # of the last change
    busy: float  # when more than `cool_queue` waited last


class Router:
    """Call `choose` for each request, and `look` for whoever only asks."""

    def __init__(self, terms: Terms | None = None) -> None:
        self._terms = terms or Terms()
        self._hot: dict[str, _Hot] = {}

    def choose(self, rev: str | None, replicas: Sequence[Replica], now: float) -> Choice | None:
        """`now`: seconds of a clock that never goes back."""
        alive = [replica for replica in replicas if replica.alive]
        if not alive:
            return None
        self._cool(alive, now)
        if rev is not None:
            self._warm(rev, alive, now)
        return self.look(rev, alive)

    def look(self, rev: str | None, replicas: Sequence[Replica]) -> Choice | None:
        """What `choose` would say now; nothing is remembered."""
        alive = [replica for replica in replicas if replica.alive]
        if not alive:
            return None
        if rev is None:
            least = min(alive, key=lambda replica: (replica.load, -replica.free_bytes))
            return Choice(least.name, "base")
        by_name = {replica.name: replica for replica in alive}
        ranked = [by_name[name] for name in ranking(rev, tuple(by_name))]
        homes = ranked[: self.homes(rev)]
        home = min(homes, key=lambda replica: (replica.load, not replica.holds(rev)))
        full = self._full_at(alive)
        if home.load >= full or _has_no_room(rev, home, alive):
            return Choice(_past_the_full(rev, ranked, full).name, "spill")
        if len(homes) > 1:
            return Choice(home.name, "spread")
        holders = [replica for replica in ranked if replica.holds(rev)]
        if holders and home not in holders:  # after a loss, or while its home was full
            holder = min(holders, key=lambda replica: replica.load)
            if holder.load <= home.load:
                return Choice(holder.name, "holder")
        return Choice(home.name, "home")

    def homes(self, rev: str) -> int:
        """How many replicas share it now."""
        hot = self._hot.get(rev)
        return hot.homes if hot is not None else 1

    def _full_at(self, alive: Sequence[Replica]) -> int:
        """The load at which a replica gets no more while others have less.  One is always below."""
        total = sum(replica.load for replica in alive) + 1
        return max(self._terms.spare, math.ceil(self._terms.excess * total / len(alive)))

    def _warm(self, rev: str, alive: Sequence[Replica], now: float) -> None:
        """One home more if too many wait at those that it has."""
        terms, homes = self._terms, min(self.homes(rev), len(alive))
        queued = sum(replica.waiting.get(rev, 0) for replica in alive)
        if queued <= terms.hot_queue * homes or homes == len(alive):
            return
        hot = self._hot.get(rev)
        if hot is None or now - hot.since >= terms.settle_seconds:
            self._hot[rev] = _Hot(homes + 1, since=now, busy=now)

    def _cool(self, alive: Sequence[Replica], now: float) -> None:
        """Few are hot at once: all of them are looked at."""
        for rev, hot in list(self._hot.items()):
            queued = sum(replica.waiting.get(rev, 0) for replica in alive)
            if queued > self._terms.cool_queue * hot.homes:
                hot.busy = now
            elif now - max(hot.busy, hot.since) >= self._terms.cool_seconds:
                hot.homes, hot.since = hot.homes - 1, now
                if hot.homes == 1:
                    del self._hot[rev]


@lru_cache(maxsize=1 << 14)
def ranking(rev: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names` in the order in which they are asked to serve `rev`, the home first.

    Rendezvous hashing (Thaler and Ravishankar, 1998): without one of them the others keep their
    order.
    """

    def weight(name: str) -> bytes:
        return blake2b(f"{name}\0{rev}".encode(), digest_size=8).digest()

    return tuple(sorted(names, key=weight, reverse=True))


def _has_no_room(rev: str, home: Replica, alive: Sequence[Replica]) -> bool:
    """It would have to load it, and others have room for it."""
    lacks = home.free_bytes <= 0 and not home.holds(rev)
    return lacks and any(replica.free_bytes > 0 for replica in alive)


def _past_the_full(rev: str, ranked: Sequence[Replica], full: int) -> Replica:
    """Where it is already, the least loaded; or the next in its order that has room for it."""
    open = [replica for replica in ranked if replica.load < full]
    if holders := [replica for replica in open if replica.holds(rev)]:
        return min(holders, key=lambda replica: replica.load)
    return next((replica for replica in open if replica.free_bytes > 0), open[0])
