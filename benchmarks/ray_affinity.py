"""How often a request meets its adapter on Ray Serve, beside the simulation of the same.

    python benchmarks/ray_affinity.py [--replicas 3] [--adapters 48] [--slots 12] [--rate 8]
        [--tokens 60] [--seconds 120] [--zipf 1.0] [--seeds 0] [--model DIR]

Needs `lorad[ray]`.  Starts Ray on this machine, deploys lorad with tiny replicas on its CPUs, and
asks for adapters from an open loop: Poisson arrivals, adapters by rank ** -zipf, answers of
`--tokens` in the mean.  Requests go through lorad's request router, in this process as in an
ingress, to whole daemons.  A request met its adapter if that was resident, by the daemon's own
events, on the replica that answered it when it was sent.

One JSON line a seed for the real run, then one for `benchmarks/affinity.py` with the same case:
service and load times are those that were measured.  The first tenth of the time is not counted.
`random` is the simulation's for a router that does not look.
"""

import argparse
import asyncio
import bisect
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import checkout
import msgspec
from affinity import WARM_SHARE, Case, Run
from daemon_rig import Noise
from random_model import SHAPES, write

from lorad import wire
from lorad.fleet.catalog import Catalog, open_catalog
from lorad.fleet.members import Ask, Head, Order
from lorad.fleet.table import Entry
from lorad.fleet.taking import order_for

#: Of the results alone: Ray prints what it has to say wherever stdout is.
OUT = sys.stdout
MODEL = "base"
SEATS = 8
EVENTS_SECONDS = 0.5
PATIENCE = 120.0
_JSON = (("content-type", "application/json"),)


@dataclass(frozen=True, kw_only=True)
class Asked:
    replicas: int = 3
    adapters: int = 48
    slots: int = 12
    rate: float = 8.0
    tokens: float = 60.0
    seconds: float = 120.0
    zipf: float = 1.0
    base: float = 0.1


@dataclass(slots=True)
class Sent:
    at: float  # of the clock that events go by
    rev: str | None
    member: str = ""
    seconds: float = 0.0


@dataclass
class Slots:
    """What was resident on one replica, and since or until when."""

    last: int = 0
    loading: dict[str, float] = field(default_factory=dict)
    changes: dict[str, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    loads: list[tuple[float, float]] = field(default_factory=list)  # when, how long

    def take(self, event: wire.EventItem) -> None:
        self.last = event.id
        when = datetime.fromisoformat(event.time).timestamp()
        match event.type:
            case "slot.loading":
                self.loading[event.rev] = when
            case "slot.load":
                self.changes[event.rev].append((when, True))
                self.loads.append((when, when - self.loading.pop(event.rev, when)))
            case "slot.evict":
                self.changes[event.rev].append((when, False))

    def had(self, rev: str, when: float) -> bool:
        before = [there for at, there in self.changes.get(rev, ()) if at <= when]
        return bool(before) and before[-1]


CONFIG = """
[[models]]
base = {base}
name = "{name}"
device = "cpu"
cpu_pool = "64MiB"
max_model_len = 4096
max_num_seqs = {seats}
threads = 1

[lora]
slots = {slots}
eviction = "lru"

[limits]
queue = 4096
queue_per_tenant = 4096

[log]
level = "warning"

[shutdown]
drain_timeout = "1s"
"""


@contextmanager
def deployed(asked: Asked, model: Path, folder: Path) -> Iterator[Any]:
    """A handle of the replicas; Ray ends with it."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(checkout.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    import ray
    from ray import serve

    from lorad.ray.app import build

    config = CONFIG.format(base=json.dumps(str(model)), name=MODEL, seats=SEATS, slots=asked.slots)
    told = {
        "config": config,
        "catalog": str(folder / "catalog"),
        "homes": str(folder / "homes"),
        "replicas": asked.replicas,
        "cpus": 0.1,
        "ingress_cpus": 0.1,
    }
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        namespace="serve",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        serve.start(proxy_location="Disabled")
        serve.run(build(told), name="lorad", route_prefix=None)
        yield serve.get_deployment_handle("replica", "lorad")
    finally:
        serve.shutdown()
        ray.shutdown()


class RealRun:
    """One seed."""

    def __init__(self, asked: Asked, members: Any, revs: list[tuple[str, str]], seed: int) -> None:
        self._asked, self._members, self._revs = asked, members, revs
        self._rng = random.Random(seed)
        shares = accumulate((i + 1) ** -asked.zipf for i in range(asked.adapters))
        self._shares = list(shares)
        self._sent: list[Sent] = []
        self._slots: dict[str, Slots] = {m.name: Slots() for m in members.seen()}

    async def run(self) -> dict[str, Any]:
        asked, rng = self._asked, self._rng
        await self._read_events()
        watching = asyncio.create_task(self._watch())
        start, due = time.time(), 0.0
        tasks = []
        while due < asked.seconds:
            await asyncio.sleep(max(0.0, start + due - time.time()))
            tasks.append(asyncio.create_task(self._ask()))
            due += rng.expovariate(asked.rate)
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
        watching.cancel()
        await asyncio.sleep(EVENTS_SECONDS)
        await self._read_events()
        return self._found(start)

    async def _ask(self) -> None:
        rng = self._rng
        name, rev = "", None
        if rng.random() >= self._asked.base:
            rank = bisect.bisect(self._shares, rng.random() * self._shares[-1])
            name, rev = self._revs[rank]
        tokens = max(1, round(rng.expovariate(1 / self._asked.tokens)))
        body = {"model": name or MODEL, "prompt": "abc", "max_tokens": tokens, "ignore_eos": True}
        model = f"{name}@{rev}" if rev else ""
        ask = Ask(
            "POST", "/v1/completions", headers=_JSON, body=json.dumps(body).encode(), model=model
        )
        sent = Sent(time.time(), rev)
        self._sent.append(sent)
        async for part in self._members.stream(ask, rev):
            if isinstance(part, Head):
                assert part.status == 200, part
                sent.member = part.member
        sent.seconds = time.time() - sent.at

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(EVENTS_SECONDS)
            await self._read_events()

    async def _read_events(self) -> None:
        for name, slots in self._slots.items():
            while True:
                query = f"limit=1000&since={slots.last}"
                ask = Ask("GET", "/admin/v1/events", query, face="admin")
                answer = await self._members.ask(name, ask, seconds=PATIENCE)
                page = msgspec.json.decode(answer.body, type=wire.EventPage)
                for event in page.items:
                    slots.take(event)
                if len(page.items) < 1000:
                    break

    def _found(self, start: float) -> dict[str, Any]:
        warm = start + self._asked.seconds * WARM_SHARE
        counted = [s for s in self._sent if s.rev is not None and s.at >= warm]
        hits = [self._slots[s.member].had(s.rev, s.at) for s in counted if s.rev is not None]
        loads = [each for slots in self._slots.values() for each in slots.loads if each[0] >= warm]
        minutes = self._asked.seconds * (1 - WARM_SHARE) / 60
        met = [s.seconds for s, hit in zip(counted, hits, strict=True) if hit]
        return {
            "requests": len(self._sent),
            "hits": round(sum(hits) / len(hits), 4),
            "loads_a_minute": round(len(loads) / minutes, 1),
            "service_mean_seconds": round(statistics.mean(met), 4),
            "load_mean_seconds": round(statistics.mean(s for _, s in loads), 4),
            "by_replica": sorted(sum(s.member == m for s in counted) for m in self._slots),
        }


async def measure(asked: Asked, handle: Any, model: Path, folder: Path, seeds: list[int]) -> None:
    from lorad.ray.members import RayMembers

    members = RayMembers(handle)
    members.start()
    while len(members.seen()) < asked.replicas:
        await asyncio.sleep(0.1)
    catalog = open_catalog(str(folder / "catalog"))
    revs = await _register(asked, members, catalog, model, folder)
    for seed in seeds:
        found = await RealRun(asked, members, revs, seed).run()
        tell({"case": "ray", "seed": seed, **asdict(asked), **found})
        case = Case(
            adapters=asked.adapters,
            replicas=asked.replicas,
            seconds=asked.seconds,
            slots=asked.slots,
            seats=SEATS,
            use=asked.rate * found["service_mean_seconds"] / (asked.replicas * SEATS),
            zipf=asked.zipf,
            base=asked.base,
            load=found["load_mean_seconds"],
            service=found["service_mean_seconds"],
            churn=0.0,
            losses=0,
        )
        for policy in ("affinity", "random"):
            line = {"case": "simulation", "policy": policy, "seed": seed, **asdict(case)}
            tell(line | Run(case, policy, seed).run())


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), file=OUT, flush=True)


async def _register(
    asked: Asked, members: Any, catalog: Catalog, model: Path, folder: Path
) -> list[tuple[str, str]]:
    """(name, revision) of each, on every replica."""
    noise, entries = Noise(model), {}
    names = [member.name for member in members.seen()]
    for number in range(asked.adapters):
        name, files = f"a{number}", folder / f"adapter-{number}"
        noise.write(files, number)
        content = await catalog.add(files)
        added = await members.take_in(names[0], Order(name=name, content=content, dry_run=True))
        entries[name] = Entry(name=name, content=content, rev=added.rev, model=MODEL)
    await catalog.change("benchmark", lambda table: entries)
    for entry in entries.values():
        await asyncio.gather(*(members.take_in(name, order_for(entry)) for name in names))
    return [(entry.name, entry.rev) for entry in entries.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seeds", default="0")
    for name, value in asdict(Asked()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    told = vars(parser.parse_args())
    model, seeds = told.pop("model"), [int(seed) for seed in told.pop("seeds").split(",")]
    with tempfile.TemporaryDirectory(prefix="lorad-bench-") as name:
        folder, asked = Path(name), Asked(**told)
        if model is None:
            model = folder / "model"
            write(model, SHAPES["tiny"])
        with redirect_stdout(sys.stderr), deployed(asked, model, folder) as handle:
            asyncio.run(measure(asked, handle, model, folder, seeds))


if __name__ == "__main__":
    main()
