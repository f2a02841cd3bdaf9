"""Tenancy: an operator's wishes about tenants and their keys.

Goes in: wire bodies.  Comes out: wire bodies; a key is in the one answer that follows its making.
The registry is the truth; once a change is there, `Callers` follows before anybody is told.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import TypeVar

from msgspec import structs

from lorad.errors import LoradError
from lorad.registry.records import KeyRecord, TenantRecord
from lorad.registry.registry import Registry
from lorad.service import keys
from lorad.service.callers import Callers
from lorad.service.events import EventRing, rfc3339
from lorad.wire_tenants import (
    Key,
    Rotate,
    Tenant,
    TenantGone,
    TenantKey,
    TenantPage,
    TenantPatch,
    TenantStart,
)

T = TypeVar("T")

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MAX_GLOBS, MAX_GLOB_CHARACTERS, MAX_UIDS = 64, 256, 64
MAX_WEIGHT = 1000.0
MAX_GRACE_SECONDS = 30 * 86400.0
_MOST = 1 << 31


class Tenancy:
    """`on_change` hears which tenants there are."""

    def __init__(self, registry: Registry, callers: Callers, events: EventRing) -> None:
        self._registry, self._callers, self._events = registry, callers, events
        self.on_change: Callable[[set[str]], None] = lambda names: None

    def list(self) -> TenantPage:
        return TenantPage(items=tuple(map(_shown, self._registry.tenants.all())))

    def get(self, name: str) -> Tenant:
        """Raises not_found."""
        for record in self._registry.tenants.all():
            if record.name == name:
                return _shown(record)
        raise LoradError("not_found", f"no tenant {name[:80]!r}", hint="loractl tenant ls")

    async def add(self, start: TenantStart) -> TenantKey:
        """Raises invalid_value, name_taken, or conflict where a uid is another's."""
        if not NAME.fullmatch(start.name):
            raise _invalid("name", "a tenant's name is of a-z 0-9 . _ -, 63 at most")
        adapters = (f"{start.name}/*",) if start.adapters is None else start.adapters
        fields = structs.asdict(start) | {"adapters": adapters}
        made = keys.new_key() if fields.pop("key") else None
        _check(fields)
        key = None if made is None else KeyRecord(id=made.id, digest=made.digest)
        record = await self._write(self._registry.tenants.add(TenantRecord(**fields), key))
        self._events.publish("tenant.added", name=f"tenant:{record.name}")
        return TenantKey(tenant=_shown(record), key="" if made is None else made.text)

    async def set(self, name: str, patch: TenantPatch) -> Tenant:
        """Raises not_found, invalid_value, conflict."""
        values = {k: v for k, v in structs.asdict(patch).items() if v is not None}
        _check(values)
        changed = _shown(await self._write(self._registry.tenants.set(name, values)))
        words = ", ".join(sorted(values))
        self._events.publish("tenant.set", name=f"tenant:{name}", message=words)
        return changed

    async def remove(self, name: str) -> TenantGone:
        """Its requests in flight end as they are.  Raises not_found."""
        left = await self._write(self._registry.tenants.remove(name))
        self._events.publish("tenant.removed", name=f"tenant:{name}")
        if not left:
            text = "no tenant is left: whom the inference socket lets in may use everything"
            self._events.publish("config.warning", level="warn", message=text)
        return TenantGone(name=name, left=left)

    async def rotate_key(self, name: str, wish: Rotate) -> TenantKey:
        """Raises not_found, invalid_value."""
        grace = wish.grace_seconds
        if not 0 <= grace <= MAX_GRACE_SECONDS:
            raise _invalid("grace_seconds", f"0 to {MAX_GRACE_SECONDS:g} seconds")
        made = keys.new_key()
        key = KeyRecord(id=made.id, digest=made.digest)
        changed = self._registry.tenants.set_key(name, key, grace_seconds=grace)
        tenant = _shown(await self._write(changed))
        self._events.publish("tenant.key_rotated", name=f"tenant:{name}", message=f"key {key.id}")
        return TenantKey(tenant=tenant, key=made.text)

    async def flush(self) -> None:
        """Write the times of last use; losing some is fine."""
        names, used_keys = self._callers.take_used()
        if names:
            await asyncio.wrap_future(self._registry.touch_tenants(names, used_keys))

    async def _write(self, change: "Future[T]") -> T:
        """Wait until a change is on disk, then let the callers follow."""
        try:
            return await asyncio.wrap_future(change)
        finally:
            self._callers.replace(self._registry.tenants.all())
            self.on_change(self._callers.names)


def _check(fields: dict[str, object]) -> None:
    """Raises invalid_value for what no tenant can have."""
    for name in ("rpm", "tokens_per_minute", "queue"):
        _within(name, fields.get(name), 0, _MOST)
    _within("max_priority", fields.get("max_priority"), 0, 100)
    weight = fields.get("weight", 1.0)
    if not isinstance(weight, int | float) or not 0.001 <= weight <= MAX_WEIGHT:
        raise _invalid("weight", f"0.001 to {MAX_WEIGHT:g}")
    uids, globs = fields.get("uids", ()), fields.get("adapters", ())
    assert isinstance(uids, tuple) and isinstance(globs, tuple)
    if len(uids) > MAX_UIDS or not all(0 <= uid < 1 << 32 for uid in uids):
        raise _invalid("uids", f"up to {MAX_UIDS} user ids")
    if len(globs) > MAX_GLOBS:
        raise _invalid("adapters", f"up to {MAX_GLOBS} patterns")
    for glob in globs:
        if not 0 < len(glob) <= MAX_GLOB_CHARACTERS or not glob.isprintable():
            raise _invalid("adapters", f"{glob[:40]!r} is no pattern such as acme/*")


def _within(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, int) and not low <= value <= high:
        raise _invalid(name, f"{low} to {high}")


def _invalid(param: str, rule: str) -> LoradError:
    return LoradError("invalid_value", f"{param}: {rule}", param=param)


def _shown(record: TenantRecord) -> Tenant:
    known = tuple(
        Key(
            id=key.id,
            created_at=_time(key.created_at) or "",
            expires_at=_time(key.expires_at),
            last_used_at=_time(key.last_used_at),
        )
        for key in record.keys
    )
    return Tenant(
        name=record.name,
        adapters=record.adapters,
        base=record.base,
        uids=record.uids,
        rpm=record.rpm,
        tokens_per_minute=record.tokens_per_minute,
        queue=record.queue,
        max_priority=record.max_priority,
        weight=record.weight,
        keys=known,
        created_at=_time(record.created_at) or "",
        last_used_at=_time(record.last_used_at),
    )


def _time(seconds: float) -> str | None:
    """0 is never."""
    return rfc3339(datetime.fromtimestamp(seconds, UTC)) if seconds else None
