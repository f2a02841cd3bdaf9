"""Crowd: the requests that have not ended, on whose account each runs, and what all have used.

Goes in: whatever runs, when it begins and when it ends.  Comes out: the running ones, the oldest
first, and counters by tenant that only grow.  A token costs nothing here: those of a running
request are counted when somebody asks, as in `rates.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from lorad.errors import LoradError
from lorad.service.ask import Count
from lorad.service.tenants import Account


class Running(Protocol):
    """Of Generation, and of a Unit that pools."""

    @property
    def id(self) -> str: ...
    @property
    def rev(self) -> str | None: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def begun(self) -> bool:
        """Has the engine answered anything of it?"""

    @property
    def most_tokens(self) -> int | None:
        """Of all its answers together; None: what the context has room for."""

    @property
    def over(self) -> bool:
        """Nothing more will come; only its reader has still to take what there is."""

    def usage(self) -> Count: ...
    def fail(self, error: LoradError) -> None:
        """End it now; its client is told."""


@dataclass(frozen=True, slots=True)
class Live:
    """`name` None: the base model itself, `model`.  `received`: seconds of the service's clock.
    `where`: the replica that has it, "" where its model has one engine."""

    name: str | None
    account: Account
    received: float
    model: str = ""
    where: Callable[[], str] = lambda: ""


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
    _live: dict[Running, Live] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[tuple[Running, Live]]:
        return iter(tuple(self._live.items()))

    def get(self, id: str) -> tuple[Running, Live] | None:
        """The one of that id, if it has not ended.  It looks at all of them: nobody asks often."""
        return next((both for both in self._live.items() if both[0].id == id), None)

    def enter(self, running: Running, live: Live) -> None:
        self.begun += 1
        self.of(live.account.tenant.name).requests += 1
        self._live[running] = live

    def leave(self, running: Running) -> Live:
        live = self._live.pop(running)
        self.of(live.account.tenant.name).tokens += running.usage().total
        return live

    def of(self, tenant: str) -> Used:
        """What it has used; made when it is first asked for."""
        if (used := self.used.get(tenant)) is None:
            used = self.used[tenant] = Used()
        return used

    def tokens(self) -> dict[str, int]:
        """By tenant, those of running requests included.  It is looked at each of them."""
        counts = {name: used.tokens for name, used in self.used.items()}
        for running, live in self._live.items():
            counts[live.account.tenant.name] += running.usage().total
        return counts
