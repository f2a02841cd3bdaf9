"""A fleet of adapters on an engine in this process, with more of them than there is room for.

Goes in: an OfflineDriver.  Comes out: the same, with how many adapters its pool may hold and the
eviction policy set anew between runs, so that all cases share one start.  Room is bounded by bytes,
through the floor that KV has, and never by slots.  Knows no workload.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import checkout  # noqa: F401
from offline import OfflineDriver
from streams import Failed, Move, Stream, spread

from engine.config import EvictionPolicy
from engine.memory.budget import usual_adapter_blocks


class Fleet:
    """`driver` with `ram` adapters in host memory at the most."""

    def __init__(self, driver: OfflineDriver, ram: int) -> None:
        self.driver, self.ram = driver, ram
        self.core = driver.rig.core
        self.blocks = usual_adapter_blocks(self.core.machine.layout)  # of one adapter
        self.known = 0  # adapters 0..known - 1 were registered here

    @property
    def resident(self) -> int:
        """Adapters that are on the GPU, whole."""
        return sum(row.ready for row in self.core.slots.rows.values())

    @property
    def most(self) -> int:
        """Adapters that the pool holds beside the KV floor."""
        memory = self.core.reclaimer
        return (memory.pool.num_blocks - memory.kv_floor) // self.blocks

    @contextmanager
    def room_for(self, adapters: int, policy: EvictionPolicy = "cost") -> Iterator[None]:
        """All adapters leave, and then only so many at a time find room."""
        if adapters > self.most:
            raise Failed(f"the pool holds {self.most} adapters, not {adapters}")
        self.clear()
        memory = self.core.reclaimer
        before = memory.kv_floor, memory.policy
        memory.kv_floor = memory.pool.num_blocks - adapters * self.blocks
        memory.policy = policy
        try:
            yield
        finally:
            self.clear()
            memory.kv_floor, memory.policy = before

    def settle(self, adapters: Sequence[int], tier: str) -> None:
        """Bring adapters to "gpu", "ram" or "disk"."""
        self.known = max(self.known, *adapters, -1) if adapters else self.known
        self.driver.settle(adapters, tier)

    def clear(self) -> None:
        """Every adapter to disk, which is the page cache; and nothing is left in the prefix cache:
        what earlier cases left there is dearer than an adapter, and would take its room."""
        self.driver.settle(range(self.known + 1), "disk")
        prefix = self.core.prefix
        for identity in sorted(prefix.identities(), key="base".__eq__):  # others continue the base
            prefix.drop(identity)


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of time, sorted and apart from each other."""

    spans: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, moves: Sequence[Move]) -> "Spans":
        """When anything was on its way."""
        joined: list[tuple[float, float]] = []
        for start, end in sorted((move.start, move.end) for move in moves):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        return cls(tuple(joined))

    def split(self, streams: Sequence[Stream]) -> tuple[list[float], list[float]]:
        """Seconds between tokens: those that a span reaches into, and the others."""
        within: list[float] = []
        beside: list[float] = []
        for stream in streams:
            at = 0
            for before, after in zip(stream.times, stream.times[1:], strict=False):
                while at < len(self.spans) and self.spans[at][1] <= before:
                    at += 1
                touched = at < len(self.spans) and self.spans[at][0] < after
                (within if touched else beside).append(after - before)
        return within, beside


def copied(moves: Sequence[Move], seconds: float) -> dict[str, object]:
    """What went to the GPU in `seconds`; a copy's own time ends when the step loop saw its end."""
    told: dict[str, object] = {}
    for kind, name in (("copy", "h2d"), ("read", "read")):
        mine = [move for move in moves if move.kind == kind]
        if not mine:
            continue
        num_bytes = sum(move.num_bytes for move in mine)
        told[f"{name}s"] = len(mine)
        told[f"{name}_gb_s"] = round(num_bytes / seconds / 1e9, 3)
        busy = sum(end - start for start, end in Spans.of(mine).spans)
        told[f"{name}_busy_gb_s"] = round(num_bytes / busy / 1e9, 3)
        told |= spread([move.end - move.start for move in mine], name)
    return told
