"""Replicas: the engines of one model, and which of them serves each request.

Goes in: sequences and inputs, as an EngineLink takes them.  Comes out: what the chosen engine says
of each.  What an engine had not begun to answer when it died goes to another, and who waits goes to
one that joins; what was streaming ends with an error.  How full each engine is is counted here,
request by request: heartbeats would be late.  Starts no engine, and knows no names.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from msgspec import structs

from engine.messages import EngineInfo, SequenceDelta, Submit
from engine.pooling.requests import PoolRequest, PoolResult
from lorad.errors import LoradError
from lorad.routing import affinity
from lorad.routing.affinity import Router
from lorad.service.engine_face import LinkState
from lorad.service.flights import OnDelta
from lorad.service.replica import Replica

#: The engine went away, or is about to: another can do what it had not begun.
LOST = ("engine_restarting", "engine_stalled", "loading_base")
#: A request that an engine had at hand when it died may be why: it goes on this many times.
MOST_MOVES = 1
#: States of an engine, those first that are nearest to taking requests.
_NEAREST = ("ready", "engine_stalled", "loading_base", "starting", "engine_restarting", "stopped")


@runtime_checkable
class Anew(Protocol):
    """Who may be told that a sequence begins at its first token again; False: it may not."""

    def begin_anew(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Flight:
    submit: Submit
    on_delta: OnDelta
    due: float  # on the clock
    came: float  # on it
    given: float = 0.0  # to the engine that has it
    at: Replica | None = None
    began: bool = False  # there
    answered: bool = False  # there are tokens of it
    aborted: bool = False
    left: list[str] = field(default_factory=list)  # replicas that went away from under it
    been: set[str] = field(default_factory=set)  # where it was, or is
    offered: bool = False  # while it is given to an engine that joins
    #: Where it was taken from, and the last word of it, by the same id, is yet to come.
    leaving: set[str] = field(default_factory=set)


class Replicas:
    """At least two, each with a name of its own.  Has the face of an EngineLink towards requests;
    use it from the event loop.  `clock`: seconds."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        router: Router | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = tuple(replicas)
        self._by_name = {replica.name: replica for replica in replicas}
        self._router, self._clock = router or Router(), clock
        self._flights: dict[str, _Flight] = {}
        self._inputs: dict[str, Replica] = {}  # where those are that may go elsewhere yet

    def __getitem__(self, name: str) -> Replica:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    # ------------------------------------------------------------- how they are
    @property
    def info(self) -> EngineInfo | None:
        """Of one that is there: they have the same base, layout and kind of device."""
        infos = [replica.link.info for replica in self._alive() or self._replicas]
        return next((info for info in infos if info is not None), None)

    @property
    def state(self) -> LinkState:
        """That of the one which is ready, or will be first."""
        return self._foremost().link.state

    @property
    def progress(self) -> str:
        """Why those are not ready that are not."""
        away = [r for r in self._replicas if r.link.state != "ready"]
        return "; ".join(f"replica {r.name}: {r.link.progress}" for r in away) or "ready"

    @property
    def restarts(self) -> int:
        return sum(replica.link.restarts for replica in self._replicas)

    @property
    def last_step_at(self) -> float:
        """Of any."""
        return max(replica.link.last_step_at for replica in self._replicas)

    @property
    def pid(self) -> int | None:
        """Of the first that lives."""
        pids = (replica.link.pid for replica in self._replicas)
        return next((pid for pid in pids if pid is not None), None)

    @property
    def starts_per_second(self) -> float:
        """Of all together; 0.0 as soon as one lets nobody wait."""
        rates = [replica.link.starts_per_second for replica in self._alive()]
        return sum(rates) if all(rates) else 0.0

    def check(self) -> None:
        """Raise what a request is told while no engine can take it."""
        self._foremost().link.check()

    def choose(self, rev: str | None, without: Collection[str] = ()) -> Replica | None:
        """Where `rev` belongs now; None: nobody is ready."""
        found = self._router.look(rev, self._seen(without))
        return self._by_name[found.name] if found is not None else None

    def nearest(self, rev: str | None) -> str:
        """The same by name; while nobody is ready, one that will be."""
        chosen = self.choose(rev)
        return chosen.name if chosen is not None else self.rising()

    def rising(self, without: Collection[str] = ()) -> str:
        """While nobody is ready: one that takes commands, or will be the first to."""
        left = [replica for replica in self._replicas if replica.name not in without]
        there = (r.name for r in left if r.link.info is not None and r.link.pid is not None)
        return next(there, (left or self._replicas)[0].name)

    def keeper(self, rev: str) -> str:
        """The one that a pin of `rev` is for: the first of its order that is not lost.  One that
        starts for the first time will be there; one that stalls may be yet."""
        ranked = affinity.ranking(rev, tuple(self._by_name))
        gone = ("engine_restarting", "stopped")
        left = (name for name in ranked if self._by_name[name].link.state not in gone)
        return next(left, ranked[0])

    def where(self, request_id: str) -> str:
        """Which replica has a sequence, "" if none."""
        flight = self._flights.get(request_id)
        return flight.at.name if flight is not None and flight.at is not None else ""

    # ------------------------------------------------------------- requests
    def submit(self, submit: Submit, on_delta: OnDelta) -> None:
        """As EngineLink's.  If its engine dies before its client has seen anything, another one
        begins it anew: once, as it may be what the engine died of."""
        now = self._clock()
        due = now + (submit.deadline_seconds or float("inf"))
        flight = self._flights[submit.request_id] = _Flight(submit, on_delta, due, now)
        try:
            if not self._send(flight):
                self.check()
                raise LoradError("engine_restarting", "no engine is ready")
        except BaseException:
            self._flights.pop(submit.request_id, None)
            raise

    def abort(self, request_id: str) -> None:
        """End a sequence; its last delta follows.  Unknown ids are ignored."""
        flight = self._flights.get(request_id)
        if flight is not None and flight.at is not None:
            flight.aborted = True
            flight.at.link.abort(request_id)

    def leave(self, name: str) -> None:
        """That engine hangs: what it has not answered goes elsewhere, as when it dies.  If it goes
        on after all, it finds that taken back; what it has begun to answer waits for it."""
        replica = self._by_name[name]
        for flight in list(self._flights.values()):
            if flight.at is replica and not flight.answered:
                began = flight.began
                if self._go_on(flight):
                    replica.leave(flight.submit.rev, began=began)
                    self._take_from(replica, flight)
        if self._alive_but(replica):
            for id in [id for id, at in self._inputs.items() if at is replica]:
                replica.link.take_back(id)

    def join(self, name: str) -> None:
        """That engine takes requests now: who waits at others goes there, the newest first, if it
        would be sent there were it to come now, and was not there before.  Inputs that are pooled
        stay: they are short."""
        replica = self._by_name[name]
        queued = {other.name: other.num_queued for other in self._replicas}
        for flight in reversed(list(self._flights.values())):
            before = flight.at
            if before is None or name in flight.been or flight.began or flight.aborted:
                continue
            if queued[before.name] and self._moves(flight, before, replica):
                queued[before.name] -= 1
                self._take_from(before, flight)

    async def pool(self, request: PoolRequest) -> PoolResult:
        """As EngineLink's; nobody sees half a result, so that one loss is made good."""
        left: list[str] = []
        while True:
            chosen = self._route(request.rev, left)
            if chosen is None:
                self.check()
                raise LoradError("engine_restarting", "no engine is ready")
            chosen.enter(request.rev)
            if len(left) < MOST_MOVES:
                self._inputs[request.request_id] = chosen
            try:
                return await chosen.link.pool(request)
            except LoradError as error:
                if error.code not in LOST or len(left) >= MOST_MOVES:
                    raise
                left.append(chosen.name)
            finally:
                self._inputs.pop(request.request_id, None)
                chosen.leave(request.rev, began=False)

    # ------------------------------------------------------------- inside
    def _alive(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.link.state == "ready"]

    def _foremost(self) -> Replica:
        return min(self._replicas, key=lambda replica: _NEAREST.index(replica.link.state))

    def _alive_but(self, gone: Replica) -> bool:
        return any(replica is not gone for replica in self._alive())

    def _seen(self, without: Collection[str]) -> list[affinity.Replica]:
        return [replica.seen(without) for replica in self._replicas]

    def _route(self, rev: str | None, without: Collection[str]) -> Replica | None:
        """The same for a request, which is counted."""
        found = self._router.choose(rev, self._seen(without), self._clock())
        if found is None:
            return None
        replica = self._by_name[found.name]
        replica.routed[found.reason] += 1
        return replica

    def _send(self, flight: _Flight) -> bool:
        """To the engine that it belongs to; False: none is ready."""
        chosen = self._route(flight.submit.rev, {*flight.left, *flight.leaving})
        if chosen is not None:
            self._give(flight, chosen)
        return chosen is not None

    def _give(self, flight: _Flight, chosen: Replica) -> None:
        submit = flight.submit
        if flight.at is not None and submit.deadline_seconds is not None:  # not for the first time
            seconds = max(flight.due - self._clock(), 0.001)
            submit = structs.replace(submit, deadline_seconds=seconds)
        flight.at, flight.began, flight.given = chosen, False, self._clock()
        flight.been.add(chosen.name)
        chosen.enter(submit.rev)
        try:
            chosen.link.submit(submit, lambda delta: self._take(flight, chosen, delta))
        except BaseException:
            chosen.leave(submit.rev, began=False)
            raise

    def _take_from(self, before: Replica, flight: _Flight) -> None:
        flight.leaving.add(before.name)
        before.link.abort(flight.submit.request_id)

    def _moves(self, flight: _Flight, before: Replica, to: Replica) -> bool:
        """Send it there, if that is where it belongs by now."""
        rev = flight.submit.rev
        before.leave(rev, began=False)
        found = self._router.look(rev, self._seen(flight.left))
        if found is not None and found.name == to.name and self._took(flight, to):
            to.routed[found.reason] += 1
            return True
        flight.at = before
        before.enter(rev)
        return False

    def _took(self, flight: _Flight, to: Replica) -> bool:
        """Offer it there; False: that engine is gone again, and it goes on where it was."""
        given, flight.offered = flight.given, True
        with contextlib.suppress(LoradError):
            self._give(flight, to)
            if flight.offered:
                flight.offered = False
                return True
        flight.given, flight.offered = given, False
        flight.been.discard(to.name)
        return False

    def _take(self, flight: _Flight, replica: Replica, delta: SequenceDelta) -> None:
        """A delta of one sequence; from where it is no more, nobody wants any."""
        if flight.at is not replica:
            if delta.finish_reason is not None:
                flight.leaving.discard(replica.name)
            return
        if delta.queued_seconds is not None:  # there; where it was before it waited too
            waited = delta.queued_seconds + flight.given - flight.came
            delta = structs.replace(delta, queued_seconds=waited)
        ended = delta.finish_reason is not None
        if ended:
            replica.leave(flight.submit.rev, began=flight.began)
            if flight.offered:  # refused before it was there
                flight.offered = False
                return
            if delta.finish_reason == "error" and delta.code in LOST and self._go_on(flight):
                return
            self._flights.pop(flight.submit.request_id, None)
        elif not flight.began:
            flight.began = True
            replica.begin(flight.submit.rev)
        flight.answered |= bool(delta.tokens)
        flight.on_delta(delta)

    def _go_on(self, flight: _Flight) -> bool:
        """Somewhere else, if nobody has seen anything of it and it did not do so before."""
        assert flight.at is not None
        if flight.aborted or len(flight.left) >= MOST_MOVES or not self._alive_but(flight.at):
            return False
        if flight.answered:
            sink = flight.on_delta
            if not isinstance(sink, Anew) or not sink.begin_anew():
                return False
            flight.answered = False
        flight.left.append(flight.at.name)
        return self._send(flight)
