"""Bodies of tenants and the audit, as `wire.py` has those of the rest of the admin socket."""

from msgspec import Struct

TENANTS_SCHEMA = "lorad/tenants.v1"
AUDIT_SCHEMA = "lorad/audit.v1"


class Key(Struct, frozen=True, kw_only=True):
    """What is known of a key: never the key."""

    id: str
    created_at: str
    expires_at: str | None = None
    last_used_at: str | None = None


class Tenant(Struct, frozen=True, kw_only=True):
    """Who it is, and what it may; 0 is no limit of its own."""

    schema: str = TENANTS_SCHEMA
    name: str
    adapters: tuple[str, ...]
    base: bool
    uids: tuple[int, ...]
    rpm: int
    tokens_per_minute: int
    queue: int
    max_priority: int
    weight: float
    keys: tuple[Key, ...]
    created_at: str
    last_used_at: str | None = None


class TenantPage(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/tenants`, by name."""

    schema: str = TENANTS_SCHEMA
    items: tuple[Tenant, ...]


class TenantStart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/tenants`.  `adapters` None: those whose names begin with the tenant's."""

    name: str
    adapters: tuple[str, ...] | None = None
    base: bool = True
    uids: tuple[int, ...] = ()
    rpm: int = 0
    tokens_per_minute: int = 0
    queue: int = 0
    max_priority: int = 100
    weight: float = 1.0
    key: bool = True  # make one


class TenantPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /admin/v1/tenants/{name}`; None leaves a field alone."""

    adapters: tuple[str, ...] | None = None
    base: bool | None = None
    uids: tuple[int, ...] | None = None
    rpm: int | None = None
    tokens_per_minute: int | None = None
    queue: int | None = None
    max_priority: int | None = None
    weight: float | None = None


class Rotate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/tenants/{name}/key`: older keys are good for so much longer."""

    grace_seconds: float = 0.0


class TenantKey(Struct, frozen=True, kw_only=True):
    """A tenant with the key that was just made for it: "" if none was.  It is told this once."""

    schema: str = "lorad/tenant-key.v1"
    tenant: Tenant
    key: str

    def __repr__(self) -> str:
        return f"TenantKey({self.tenant.name!r})"


class TenantGone(Struct, frozen=True, kw_only=True):
    """`DELETE /admin/v1/tenants/{name}`.  Without any tenant everybody may use everything."""

    schema: str = "lorad/tenant-gone.v1"
    name: str
    left: int


class AuditItem(Struct, frozen=True, kw_only=True):
    """One line of `loractl audit`: who did what, and what came of it."""

    id: int
    time: str
    actor: str  # uid 1000 pid 7 key ab12cd34, or a part of the daemon
    action: str
    name: str = ""
    rev: str = ""
    result: str = "ok"  # ok, unchanged, or an error code
    message: str = ""


class AuditPage(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/audit`, oldest first."""

    schema: str = AUDIT_SCHEMA
    items: tuple[AuditItem, ...]
