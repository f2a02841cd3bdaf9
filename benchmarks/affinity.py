"""How often a request meets its adapter, by how it is routed to a replica.  No engine, no card.

    python benchmarks/affinity.py [--policies affinity,consistent,round-robin,random]
        [--seeds 0,1,2] [--adapters 1000] [--replicas 8] [--seconds 300] [--slots 64] [--seats 32]
        [--use 0.7] [--zipf 1.0] [--base 0.1] [--load 0.05] [--service 1.0] [--churn 0.5]
        [--losses 1]

Events in simulated time; the router is lorad's own.  Adapters are asked for by rank ** -zipf, and
by a share `--base` of all requests none.  Every `--churn` seconds a new adapter takes the place of
another.  A replica has `--slots` for adapters, least recently used first out, loads one after the
other (`--load` seconds each), and has `--seats` for requests of `--service` seconds in the mean.
`--use`: how much of all seats is asked for.  From a third of the time on, until half of it, one
replica is lost (unless `--losses 0`): what had not begun there is routed anew, what had is cut off.
It comes back empty.

One JSON line a policy and seed: the share of adapters' requests that found theirs resident
(`hits`), the fullest replica's load by the mean one's (`max_to_mean`), `loads_a_minute`, and
seconds until requests began.  `moments` has the hits of every tenth of the time, the loss among
them.
"""

import argparse
import bisect
import heapq
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import accumulate, count
from typing import Protocol

import checkout  # noqa: F401

from lorad.routing.affinity import Replica, Router

POLICIES = "affinity,consistent,round-robin,random"
WARM_SHARE = 0.1  # of the time nothing is counted: every cache begins empty
MOMENTS = 10


@dataclass(frozen=True, kw_only=True)
class Case:
    adapters: int = 1000
    replicas: int = 8
    seconds: float = 300.0
    slots: int = 64
    seats: int = 32
    use: float = 0.7
    zipf: float = 1.0
    base: float = 0.1  # the share of requests that ask for no adapter
    load: float = 0.05  # seconds of one
    service: float = 1.0  # seconds of a request, in the mean
    churn: float = 0.5  # seconds between new adapters; 0: none
    losses: int = 1  # of a replica; or 0


class Policy(Protocol):
    def choose(self, rev: str | None, sites: "Sequence[Site]", now: float) -> "Site": ...


@dataclass
class Request:
    came: float
    rev: str | None
    seconds: float


@dataclass
class Site:
    """One replica: slots, a loader, seats, and who waits for which of them."""

    name: str
    case: Case
    at: Callable[[float, Callable[[], None]], None]  # seconds from now, what happens then
    began: Callable[[Request], None]
    alive: bool = True
    resident: OrderedDict[str, int] = field(default_factory=OrderedDict)  # requests on each
    loading: set[str] = field(default_factory=set)
    waiting: dict[str, int] = field(default_factory=dict)
    unloaded: deque[Request] = field(default_factory=deque)
    ready: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    loads: int = 0
    life: int = 0

    @property
    def load(self) -> int:
        return len(self.unloaded) + len(self.ready) + len(self.running)

    def seen(self) -> Replica:
        return Replica(
            name=self.name,
            alive=self.alive,
            resident=self.resident,
            loading=self.loading,
            waiting=self.waiting,
            num_waiting=len(self.unloaded) + len(self.ready),
            num_running=len(self.running),
            free_bytes=1,
        )

    def take(self, request: Request) -> None:
        rev = request.rev
        if rev is not None:
            self.waiting[rev] = self.waiting.get(rev, 0) + 1
        if rev is None or rev in self.resident:
            self._use(rev, 1)
            self.ready.append(request)
        else:
            self.unloaded.append(request)
        self._go()

    def lose(self) -> list[Request]:
        """What had not begun; all else is gone."""
        left = [*self.unloaded, *self.ready]
        self.life += 1
        self.alive = False
        for held in (self.resident, self.waiting, self.unloaded, self.ready, self.running):
            held.clear()
        self.loading.clear()
        return left

    def _use(self, rev: str | None, by: int) -> None:
        if rev is not None:
            self.resident[rev] += by
            self.resident.move_to_end(rev)

    def _go(self) -> None:
        self._load()
        while self.ready and len(self.running) < self.case.seats:
            request = self.ready.popleft()
            if request.rev is not None:
                self._begun(request.rev)
            self.running.append(request)
            self.began(request)
            self.at(request.seconds, self._mine(lambda r=request: self._end(r)))

    def _begun(self, rev: str) -> None:
        self.waiting[rev] -= 1
        if not self.waiting[rev]:
            del self.waiting[rev]

    def _end(self, request: Request) -> None:
        self.running.remove(request)
        self._use(request.rev, -1)
        self._go()

    def _load(self) -> None:
        """One at a time, the longest wanted first; an adapter without requests makes way."""
        if self.loading or not self.unloaded:
            return
        if len(self.resident) >= self.case.slots:
            idle = next((rev for rev, used in self.resident.items() if not used), None)
            if idle is None:
                return
            del self.resident[idle]
        rev = self.unloaded[0].rev
        assert rev is not None
        self.loading.add(rev)
        self.loads += 1
        self.at(self.case.load, self._mine(lambda: self._loaded(rev)))

    def _loaded(self, rev: str) -> None:
        self.loading.discard(rev)
        self.resident[rev] = 0
        its = [request for request in self.unloaded if request.rev == rev]
        self.unloaded = deque(request for request in self.unloaded if request.rev != rev)
        for request in its:
            self._use(rev, 1)
            self.ready.append(request)
        self._go()

    def _mine(self, act: Callable[[], None]) -> Callable[[], None]:
        """Not after it was lost."""
        life = self.life

        def still() -> None:
            if self.life == life:
                act()

        return still


# ----------------------------------------------------------------- how to choose
class Affinity:
    """lorad's."""

    def __init__(self) -> None:
        self._router = Router()

    def choose(self, rev: str | None, sites: Sequence[Site], now: float) -> Site:
        choice = self._router.choose(rev, [site.seen() for site in sites], now)
        assert choice is not None
        return next(site for site in sites if site.name == choice.name)


class Consistent:
    """A ring with 64 points a replica; the base's requests in turn."""

    def __init__(self, names: Sequence[str]) -> None:
        self._ring = sorted((_point(f"{name}#{i}"), name) for name in names for i in range(64))
        self._turns = RoundRobin()

    def choose(self, rev: str | None, sites: Sequence[Site], now: float) -> Site:
        if rev is None:
            return self._turns.choose(rev, sites, now)
        alive = {site.name: site for site in sites if site.alive}
        start = bisect.bisect(self._ring, (_point(rev), ""))
        for i in range(len(self._ring)):
            name = self._ring[(start + i) % len(self._ring)][1]
            if name in alive:
                return alive[name]
        raise AssertionError("no replica is there")


class RoundRobin:
    def __init__(self) -> None:
        self._turn = count()

    def choose(self, rev: str | None, sites: Sequence[Site], now: float) -> Site:
        alive = [site for site in sites if site.alive]
        return alive[next(self._turn) % len(alive)]


class Random:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, rev: str | None, sites: Sequence[Site], now: float) -> Site:
        return self._rng.choice([site for site in sites if site.alive])


def policy_of(name: str, names: Sequence[str], seed: int) -> Policy:
    match name:
        case "affinity":
            return Affinity()
        case "consistent":
            return Consistent(names)
        case "round-robin":
            return RoundRobin()
        case "random":
            return Random(seed)
    raise SystemExit(f"no policy {name!r}; there is {POLICIES}")


def _point(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


# ----------------------------------------------------------------- what happens
class Run:
    """One policy, one seed."""

    def __init__(self, case: Case, policy: str, seed: int) -> None:
        self.case, self.now, self._rng = case, 0.0, random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        names = [f"r{i}" for i in range(case.replicas)]
        self.sites = [Site(name, case, self._at, self._began) for name in names]
        self._policy = policy_of(policy, names, seed)
        self._ids = count(case.adapters)
        self._names = [f"a{i}" for i in range(case.adapters)]
        self._shares = list(accumulate((i + 1) ** -case.zipf for i in range(case.adapters)))
        self._waits: list[float] = []
        self._moments = [[0, 0] for _ in range(MOMENTS)]
        self._fullest = self._mean = 0.0
        self.rerouted = self.cut = self._warm_loads = 0

    def run(self) -> dict[str, object]:
        case = self.case
        self._at(0.0, self._arrive)
        if case.churn:
            self._at(case.churn, self._churn)
        self._at(case.seconds * WARM_SHARE, self._warmed)
        if case.losses:
            self._at(case.seconds / 3, self._lose)
            self._at(case.seconds / 2, self._return)
        while self._events and self._events[0][0] <= case.seconds:
            self.now, _, act = heapq.heappop(self._events)
            act()
        counted = self._moments[int(MOMENTS * WARM_SHARE) :]
        waits = sorted(self._waits)
        minutes = case.seconds * (1 - WARM_SHARE) / 60
        loads = sum(site.loads for site in self.sites) - self._warm_loads
        return {
            "hits": round(sum(h for h, _ in counted) / sum(n for _, n in counted), 4),
            "max_to_mean": round(self._fullest / self._mean, 3),
            "loads_a_minute": round(loads / minutes, 1),
            "wait_p50_seconds": round(waits[len(waits) // 2], 4),
            "wait_p99_seconds": round(waits[len(waits) * 99 // 100], 4),
            "rerouted": self.rerouted,
            "cut": self.cut,
            "moments": [round(h / max(n, 1), 4) for h, n in self._moments],
        }

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), act))

    def _arrive(self) -> None:
        case, rng = self.case, self._rng
        rate = case.use * case.replicas * case.seats / case.service
        rev = None if rng.random() < case.base else self._names[self._rank()]
        request = Request(self.now, rev, rng.expovariate(1 / case.service))
        site = self._policy.choose(rev, self.sites, self.now)
        if rev is not None:
            moment = self._moments[min(int(self.now / case.seconds * MOMENTS), MOMENTS - 1)]
            moment[0] += rev in site.resident
            moment[1] += 1
        site.take(request)
        self._look()
        self._at(rng.expovariate(rate), self._arrive)

    def _rank(self) -> int:
        return bisect.bisect(self._shares, self._rng.random() * self._shares[-1])

    def _look(self) -> None:
        if self.now >= self.case.seconds * WARM_SHARE:
            loads = [site.load for site in self.sites if site.alive]
            self._fullest += max(loads)
            self._mean += sum(loads) / len(loads)

    def _began(self, request: Request) -> None:
        if request.came >= self.case.seconds * WARM_SHARE:
            self._waits.append(self.now - request.came)

    def _warmed(self) -> None:
        self._warm_loads = sum(site.loads for site in self.sites)

    def _churn(self) -> None:
        """A new adapter is as popular as the one whose place it takes."""
        self._names[self._rng.randrange(self.case.adapters)] = f"a{next(self._ids)}"
        self._at(self.case.churn, self._churn)

    def _lose(self) -> None:
        lost = self.sites[len(self.sites) // 2]
        self.cut += len(lost.running)
        for request in lost.lose():
            self.rerouted += 1
            self._policy.choose(request.rev, self.sites, self.now).take(request)

    def _return(self) -> None:
        self.sites[len(self.sites) // 2].alive = True


def measure(
    case: Case, policies: Sequence[str], seeds: Sequence[int]
) -> Iterator[dict[str, object]]:
    for policy in policies:
        for seed in seeds:
            line = {"policy": policy, "seed": seed, **asdict(case)}
            yield line | Run(case, policy, seed).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--seeds", default="0,1,2")
    for name, value in asdict(Case()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    told = vars(parser.parse_args())
    policies, seeds = told.pop("policies").split(","), told.pop("seeds").split(",")
    for line in measure(Case(**told), policies, [int(seed) for seed in seeds]):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
