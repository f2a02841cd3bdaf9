"""Crowd: the requests that have not ended, on whose account each runs, and what all have used.

Goes in: a Generation when it begins and when it ends.  Comes out: the running ones, the oldest
first, and counters by tenant that only grow.  A token costs nothing here: those of a running
request are counted when somebody asks, as in `rates.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lorad.service.generation import Generation
from lorad.service.tenants import Account


@dataclass(frozen=True, slots=True)
class Live:
    """`name` None: the base model.  `received`: seconds of the service's clock."""

    name: str | None
    account: Account
    received: float


@dataclass(slots=True)
class Used:
    """By one tenant; "" where there is none."""

    requests: int = 0
    refused: int = 0
    tokens: int = 0  # of requests that have ended


@dataclass(slots=True)
class Crowd:
    """`begun` counts all that were ever accepted."""

    begun: int = 0
    used: dict[str, Used] = field(default_factory=dict)
    _live: dict[Generation, Live] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[tuple[Generation, Live]]:
        return iter(tuple(self._live.items()))

    def enter(self, generation: Generation, live: Live) -> None:
        self.begun += 1
        self.of(live.account.tenant.name).requests += 1
        self._live[generation] = live

    def leave(self, generation: Generation) -> Live:
        live = self._live.pop(generation)
        self.of(live.account.tenant.name).tokens += generation.usage().total
        return live

    def of(self, tenant: str) -> Used:
        """What it has used; made when it is first asked for."""
        if (used := self.used.get(tenant)) is None:
            used = self.used[tenant] = Used()
        return used

    def tokens(self) -> dict[str, int]:
        """By tenant, those of running requests included.  It is looked at each of them."""
        counts = {name: used.tokens for name, used in self.used.items()}
        for generation, live in self._live.items():
            counts[live.account.tenant.name] += generation.usage().total
        return counts
