"""How often an adapter is on the GPU when it is asked for, by eviction policy.  No card, no model.

    python benchmarks/policies.py [--cases zipf,sizes,shift,scan,cycle] [--seeds 0,1,2]
        [--policies cost,lru,fifo,lfu] [--requests 20000] [--window 60] [--turns 1,3,6]

Scheduler, memory and residency are the real ones; time is simulated, and reads, copies and steps
take what they are said to.  Cases, all with 200 adapters over room for 64 unless said:

    zipf    asked for by rank ** -1, of one size
    sizes   the same, of 10, 20, 40 and 80 blocks, room for 64 of the mean
    shift   zipf; half-way through, others are the popular ones
    scan    zipf; every tenth request is for the next of 2,000 that nobody asks for twice
    cycle   16 adapters in turn over room for 8

One JSON line a case, policy and seed on stdout: the share of requests that found their adapter on
the GPU and in host memory, loads, thrashes, and milliseconds until the first token.  `--window 0`:
thrash is neither counted nor damped.

`--turns`: instead of that, so many clients ask for the 16 adapters of `cycle` in turn, each as soon
as it is answered, for a minute; copies take 100 ms.  Lines say how many requests were served.
"""

import argparse
import json
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import checkout  # noqa: F401

from engine.adapters.residency import HostDone, Residency
from engine.adapters.slots import SlotTable
from engine.memory.pool import BlockPool
from engine.memory.prefix import PrefixIndex
from engine.memory.reclaim import Reclaimer
from engine.messages import AddRevision, PackedManifest, SamplingParams, Submit
from engine.scheduler import Sampled, Scheduler, SchedulerLimits

CASES = "zipf,sizes,shift,scan,cycle"
POLICIES = "cost,lru,fifo,lfu"
BLOCK_BYTES, BLOCKS = 2 << 20, 40
STEP_SECONDS, COPY_SECONDS, READ_SECONDS = 6e-3, 41e-6, 0.6e-3  # the last two: a block
KV_BLOCKS = 512
PROMPT, TOKENS = 32, 8


class Clock:
    """Simulated seconds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Queue:
    """Jobs one after the other, each taking its seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: deque[tuple[float, float, str]] = deque()  # end, seconds, revision
        self._free = 0.0

    def start(self, rev: str, seconds: float) -> None:
        self._free = max(self._free, self._clock()) + seconds
        self._jobs.append((self._free, seconds, rev))

    def ended(self) -> list[tuple[str, float]]:
        done = []
        while self._jobs and self._jobs[0][0] <= self._clock():
            _, seconds, rev = self._jobs.popleft()
            done.append((rev, seconds))
        return done


class Host:
    """Host memory for `limit` blocks, and a reader."""

    def __init__(self, clock: Clock, limit: int) -> None:
        self.limit_bytes = limit * BLOCK_BYTES
        self.used_bytes = 0
        self._reader = Queue(clock)
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._ready: set[str] = set()
        self._protected: set[str] = set()
        self._worth: dict[str, int] = {}
        self._lost: list[str] = []

    def want(self, rev: str, path: str, num_bytes: int) -> bool:
        while self.used_bytes + num_bytes > self.limit_bytes:
            free = [r for r in self._sizes if r in self._ready and r not in self._protected]
            if not free:
                return False
            self._lost.append(min(free, key=lambda r: self._worth.get(r, 50)))
            self.drop(self._lost[-1])
        self._sizes[rev] = num_bytes
        self.used_bytes += num_bytes
        self._reader.start(rev, READ_SECONDS * num_bytes / BLOCK_BYTES)
        return True

    def cancel(self, rev: str) -> None: ...

    def take_lost(self) -> list[str]:
        lost, self._lost = self._lost, []
        return lost

    def ready(self, rev: str) -> bool:
        return rev in self._ready

    def protect(self, rev: str, on: bool) -> None:
        (self._protected.add if on else self._protected.discard)(rev)

    def appraise(self, rev: str, worth: int) -> None:
        self._worth[rev] = worth

    def touch(self, rev: str) -> None:
        if rev in self._sizes:
            self._sizes.move_to_end(rev)

    def drop(self, rev: str) -> None:
        self._ready.discard(rev)
        self.used_bytes -= self._sizes.pop(rev, 0)

    def poll(self) -> list[HostDone]:
        done = self._reader.ended()
        self._ready.update(rev for rev, _ in done)
        return [HostDone(rev, seconds=seconds) for rev, seconds in done]


class Copier:
    """One copy stream."""

    def __init__(self, clock: Clock, host: Host, block_seconds: float) -> None:
        self._block_seconds = block_seconds
        self._stream = Queue(clock)
        self._host = host
        self._busy: set[str] = set()

    def start(self, rev: str, blocks: Sequence[int]) -> None:
        self._busy.add(rev)
        self._host.touch(rev)
        self._stream.start(rev, self._block_seconds * len(blocks))

    def poll(self) -> list[str]:
        done = [rev for rev, _ in self._stream.ended()]
        self._busy.difference_update(done)
        return done

    def busy(self, rev: str) -> bool:
        return rev in self._busy

    def cancel(self, rev: str) -> None: ...


@dataclass(frozen=True)
class Case:
    """`asked` gives adapters in the order in which they are asked for."""

    sizes: dict[str, int]
    room: int  # adapters, of the mean size
    asked: Iterator[str]
    rate: float = 100.0  # requests a second


def zipf(names: Sequence[str], draw: random.Random) -> Iterator[str]:
    weights = list(accumulate(1 / rank for rank in range(1, len(names) + 1)))
    while True:
        yield draw.choices(names, cum_weights=weights)[0]


def shifting(names: list[str], draw: random.Random, after: int) -> Iterator[str]:
    first = zipf(names, draw)
    for _ in range(after):
        yield next(first)
    yield from zipf(names[len(names) // 2 :] + names[: len(names) // 2], draw)


def scanning(names: list[str], scanned: list[str], draw: random.Random) -> Iterator[str]:
    popular, once = zipf(names, draw), iter(scanned)
    while True:
        for _ in range(9):
            yield next(popular)
        yield next(once, names[-1])


def cycling(names: Sequence[str]) -> Iterator[str]:
    while True:
        yield from names


def case_of(name: str, draw: random.Random, requests: int) -> Case:
    names = [f"a{n}" for n in range(200)]
    sizes = dict.fromkeys(names, BLOCKS)
    match name:
        case "sizes":
            draw.shuffle(names)
            sizes = {a: (10, 20, 40, 80)[n % 4] for n, a in enumerate(names)}
            return Case(sizes, 64, zipf(sorted(names), draw))
        case "shift":
            return Case(sizes, 64, shifting(names, draw, requests // 2))
        case "scan":
            scanned = [f"once{n}" for n in range(2000)]
            sizes |= dict.fromkeys(scanned, BLOCKS)
            return Case(sizes, 64, scanning(names, scanned, draw))
        case "cycle":
            few = names[:16]
            return Case(dict.fromkeys(few, BLOCKS), 8, cycling(few), rate=20.0)
        case "zipf":
            return Case(sizes, 64, zipf(names, draw))
    raise SystemExit(f"no case {name!r}; known: {CASES}")


class Rig:
    """An engine without a model, with host memory for twice what the GPU holds."""

    def __init__(
        self, case: Case, policy: str, window: float, copy_seconds: float = COPY_SECONDS
    ) -> None:
        self.clock = Clock()
        blocks = round(case.room * sum(case.sizes.values()) / len(case.sizes))
        pool = BlockPool(blocks + KV_BLOCKS)
        prefix = PrefixIndex(pool, 16, self.clock)
        memory = Reclaimer(pool, prefix, policy=policy, kv_floor=KV_BLOCKS)  # type: ignore[arg-type]
        self.host = Host(self.clock, 2 * blocks)
        self.residency = Residency(
            slots=SlotTable(1024),
            host=self.host,
            copier=Copier(self.clock, self.host, copy_seconds),
            room=memory,
            clock=self.clock,
            block_bytes=BLOCK_BYTES,
            bytes_in_flight=256 << 20,
            thrash_window=window,
        )
        limits = SchedulerLimits(
            block_size=16,
            max_num_seqs=64,
            max_batch_tokens=2048,
            mixed_tokens=192,
            max_model_len=4096,
        )
        self.scheduler = Scheduler(
            memory=memory, residency=self.residency, limits=limits, clock=self.clock
        )
        for n, (rev, size) in enumerate(case.sizes.items()):
            manifest = PackedManifest(
                rev=rev,
                path="",
                layout="",
                num_blocks=size,
                true_bytes=1,
                max_rank=16,
                changes_kv=True,
                modules=(),
            )
            self.residency.command(AddRevision(command_id=n, manifest=manifest))
        self.found = self.found_in_ram = 0
        self.waits: list[float] = []
        self._asked: dict[str, float] = {}

    def ask(self, number: int, rev: str, draw: random.Random) -> None:
        """A request whose prompt nobody else sends."""
        row = self.residency.slots.find(rev)
        resident = row is not None and row.ready
        self.found += resident
        self.found_in_ram += not resident and self.host.ready(rev)
        self._asked[f"r{number}"] = self.clock()
        self.scheduler.add(
            Submit(
                request_id=f"r{number}",
                prompt=[draw.randrange(50_000) for _ in range(PROMPT)],
                sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
                rev=rev,
            )
        )

    def step(self) -> list[str]:
        """Returns the requests that have ended."""
        work = self.scheduler.schedule()
        self.clock.now += STEP_SECONDS
        if work is None:
            return []
        drawn = {c.seq.request_id: Sampled(7) for c in work.chunks if c.samples}
        for request in drawn:
            if (asked := self._asked.pop(request, None)) is not None:
                self.waits.append(self.clock() - asked)
        deltas = self.scheduler.settle(work, drawn)
        return [delta.request_id for delta in deltas if delta.finish_reason]


def measure(
    name: str, policy: str, *, seed: int = 0, requests: int = 20_000, window: float = 60.0
) -> dict[str, object]:
    """One run; the first tenth of the requests fills the GPU and is not counted."""
    draw = random.Random(seed)
    case = case_of(name, draw, requests)
    rig = Rig(case, policy, window or 1e-9)
    due, warm = rig.clock(), requests // 10
    for number in range(requests):
        due += draw.expovariate(case.rate)
        while rig.clock() < due:
            rig.step()
        if number == warm:
            rig.found = rig.found_in_ram = 0
            rig.waits.clear()
            loads, thrashes = _loads(rig), rig.residency.num_thrashes
        rig.ask(number, next(case.asked), draw)
    while rig.scheduler.has_work:
        rig.step()
    counted, waits = requests - warm, sorted(rig.waits)
    return {
        "benchmark": "policies",
        "case": name,
        "policy": policy,
        "seed": seed,
        "requests": counted,
        "window_s": window,
        "gpu_rate": round(rig.found / counted, 4),
        "ram_rate": round(rig.found_in_ram / counted, 4),
        "loads": _loads(rig) - loads,
        "thrashes": rig.residency.num_thrashes - thrashes,
        "ttft_mean_ms": round(1e3 * sum(waits) / len(waits), 2),
        "ttft_p50_ms": round(1e3 * waits[len(waits) // 2], 1),
        "ttft_p99_ms": round(1e3 * waits[int(0.99 * len(waits))], 1),
    }


def take_turns(
    clients: int, policy: str, *, seconds: float = 60.0, window: float = 60.0, copy: float = 0.1
) -> dict[str, object]:
    """One run of `--turns`; `copy`: seconds of a load."""
    draw = random.Random(0)
    case = case_of("cycle", draw, 0)
    rig, names = Rig(case, policy, window or 1e-9, copy / BLOCKS), list(case.sizes)
    place = [len(names) * client // clients for client in range(clients)]
    of: dict[str, int] = {}  # request -> client

    def ask(client: int) -> None:
        of[f"r{len(of)}"] = client
        rig.ask(len(of) - 1, names[place[client] % len(names)], draw)

    for client in range(clients):
        ask(client)
    served, end = 0, rig.clock() + seconds
    while rig.clock() < end:
        for request in rig.step():
            served += 1
            place[of[request]] += 1
            ask(of[request])
    waits = sorted(rig.waits)
    return {
        "benchmark": "policies",
        "case": "turns",
        "policy": policy,
        "clients": clients,
        "window_s": window,
        "served": served,
        "loads": _loads(rig),
        "thrashes": rig.residency.num_thrashes,
        "ttft_p50_ms": round(1e3 * waits[len(waits) // 2], 1),
        "ttft_max_ms": round(1e3 * waits[-1], 1),
    }


def _loads(rig: Rig) -> int:
    return sum(revision.num_loads for revision in rig.residency.revisions())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--window", type=float, default=60.0, help="seconds; 0: no damping")
    parser.add_argument("--turns", default="", help="clients that take turns")
    options = parser.parse_args()
    for clients in filter(None, options.turns.split(",")):
        for policy in options.policies.split(","):
            told = take_turns(int(clients), policy, window=options.window)
            print(json.dumps(told), flush=True)
    if options.turns:
        return
    for name in options.cases.split(","):
        for policy in options.policies.split(","):
            for seed in map(int, options.seeds.split(",")):
                told = measure(
                    name, policy, seed=seed, requests=options.requests, window=options.window
                )
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
