"""Bodies of pulls and operations, as `wire.py` has those of everything else on the admin socket.

A pull is an operation: it has an id, and outlives its client and the daemon's restart.
"""

from typing import Literal

from msgspec import Struct

OPERATIONS_SCHEMA = "lorad/operations.v1"


class PullStart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/pulls`: answered 202 with an Operation, or with a PullPlan by `dry_run`.

    `name` "" is the last word of the reference.  `token` is for the source; it is used for this
    one pull, and neither stored nor logged.
    """

    reference: str
    revision: str = ""
    name: str = ""
    model: str = ""  # the base that it is for; "" = the one that it fits
    replace: bool = False
    pin: bool = False
    load: bool = False
    offline: bool = False
    dry_run: bool = False
    token: str = ""

    def __repr__(self) -> str:
        return f"PullStart({self.name!r})"


class PulledFile(Struct, frozen=True, kw_only=True):
    name: str
    num_bytes: int | None  # None: its source does not tell


class PullPlan(Struct, frozen=True, kw_only=True):
    """What a pull would fetch, and as what."""

    schema: str = "lorad/pull-plan.v1"
    reference: str  # pinned
    commit: str
    name: str
    files: tuple[PulledFile, ...]
    total_bytes: int | None


class Operation(Struct, frozen=True, kw_only=True):
    """Something that goes on when its client leaves, and after a restart of the daemon."""

    schema: str = OPERATIONS_SCHEMA
    id: str
    kind: str  # pull, load
    target: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    done_bytes: int = 0
    total_bytes: int | None = None
    name: str = ""  # of the adapter
    rev: str = ""
    commit: str = ""
    code: str = ""  # why it failed, as of an error; and its reason E_...
    reason: str = ""
    message: str = ""
    hint: str = ""
    actor: str = ""
    created_at: str = ""
    updated_at: str = ""


class OperationPage(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/operations`, newest first."""

    schema: str = OPERATIONS_SCHEMA
    items: tuple[Operation, ...]
