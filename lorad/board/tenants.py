"""Tenants: a row for each that is set up, or that has used something within the minute.

Goes in: the tenants as the registry has them, what the crowd of requests has used, a tick a second.
Comes out: `TenantRow`s by name.  Where nobody has set up tenants, an adapter's name says whose
account it is, and the limits are none.
"""

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from lorad.board.windows import Window
from lorad.service.live import Crowd
from lorad.wire_stream import TenantRow
from lorad.wire_tenants import Tenant

_MINUTE = 60.0


class TenantRows:
    """`crowd` is looked at, on the event loop."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._windows: dict[str, Window] = {}
        self._known: dict[str, Tenant] = {}

    def know(self, tenants: Iterable[Tenant]) -> None:
        """These are set up now."""
        self._known = {tenant.name: tenant for tenant in tenants}

    def tick(self, now: float) -> None:
        """`now` in seconds of a monotonic clock."""
        tokens = self._crowd.tokens()
        for name, used in self._crowd.used.items():
            window = self._windows.get(name)
            if window is None:
                window = self._windows[name] = Window()
                window.add(now - 1.0, (0, 0, 0))  # it began since the last tick
            window.add(now, (used.requests, used.refused, tokens[name]))

    def look(self) -> dict[str, TenantRow]:
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for one, live in self._crowd:
            (running if one.begun else waiting)[live.account.tenant.name] += 1
        active = {name for name, window in self._windows.items() if any(window.grown())}
        names = active | running.keys() | waiting.keys() | self._known.keys()
        return {
            name: self._row(name, running[name], waiting[name])
            for name in sorted(names)
            if name or not self._known
        }

    def _row(self, name: str, running: int, waiting: int) -> TenantRow:
        window, known = self._windows.get(name), self._known.get(name)
        requests, refused, tokens = window.rates() if window else (0.0, 0.0, 0.0)
        row = TenantRow(
            name=name,
            running=running,
            waiting=waiting,
            requests_per_minute=round(requests * _MINUTE, 2),
            refused_per_minute=round(refused * _MINUTE, 2),
            tokens_per_minute=round(tokens * _MINUTE, 1),
        )
        if known is None:
            return row
        return replace(
            row,
            rpm=known.rpm,
            tpm=known.tokens_per_minute,
            queue=known.queue,
            weight=known.weight,
            max_priority=known.max_priority,
            adapters=known.adapters,
            keys=tuple(key.id for key in known.keys),
            last_used_at=known.last_used_at,
        )
