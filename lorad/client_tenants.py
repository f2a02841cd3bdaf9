"""What a client asks about tenants and the audit, beside `client.py`, which asks all the rest.

Goes in: a LoradClient on the admin socket.  Comes out: wire Structs; the same errors.
"""

from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from lorad.wire_tenants import (
    AuditPage,
    Rotate,
    Tenant,
    TenantGone,
    TenantKey,
    TenantPage,
    TenantPatch,
    TenantStart,
)

if TYPE_CHECKING:
    from lorad.client import LoradClient

_TENANTS = "/admin/v1/tenants"


def every(client: "LoradClient") -> TenantPage:
    return client.get(_TENANTS, TenantPage)


def add(client: "LoradClient", start: TenantStart) -> TenantKey:
    """Its key is in the answer, and nowhere else ever again."""
    return client.post(_TENANTS, start, TenantKey)


def change(client: "LoradClient", name: str, patch: TenantPatch) -> Tenant:
    answer = client.request("PATCH", _path(name), body=patch)
    return msgspec.json.decode(answer, type=Tenant)


def remove(client: "LoradClient", name: str) -> TenantGone:
    return msgspec.json.decode(client.request("DELETE", _path(name)), type=TenantGone)


def rotate_key(client: "LoradClient", name: str, grace_seconds: float) -> TenantKey:
    return client.post(f"{_path(name)}/key", Rotate(grace_seconds=grace_seconds), TenantKey)


def audit(
    client: "LoradClient", *, limit: int, seconds: int, actor: str, action: str, name: str
) -> AuditPage:
    """The newest `limit` that fit, oldest first; "" is any, 0 seconds is of ever."""
    query: dict[str, str | int] = {"limit": limit, "seconds": seconds}
    query |= {k: v for k, v in (("actor", actor), ("action", action), ("name", name)) if v}
    return client.get("/admin/v1/audit", AuditPage, query)


def _path(name: str) -> str:
    return f"{_TENANTS}/{quote(name, safe='')}"
