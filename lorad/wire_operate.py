"""Wire types of operating the daemon: reload, drain, resume, log lines.

The same rules as in `wire`: fields are only added, JSON has seconds, bytes and RFC 3339.
"""

from typing import Any

from msgspec import Struct

CONFIG_SCHEMA = "lorad/config.v1"
RELOAD_SCHEMA = "lorad/reload.v1"
DRAIN_SCHEMA = "lorad/drain.v1"
LOGS_SCHEMA = "lorad/logs.v1"


class Reloaded(Struct, frozen=True, kw_only=True):
    """`POST /admin/v1/reload`: keys that differ from what was in effect."""

    schema: str = RELOAD_SCHEMA
    changed: tuple[str, ...] = ()  # in effect now
    needs_restart: tuple[str, ...] = ()  # only read at a start


class RunningConfig(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/config`: what is in effect.  Sizes are bytes, durations seconds, 0 is auto
    where there is an auto; `origins` has what is no default.  Secrets are no settings: their files'
    paths are."""

    schema: str = CONFIG_SCHEMA
    settings: dict[str, Any]  # section -> key -> value; `models` is a list of such
    origins: dict[str, str]  # section.key -> file and line, variable, or flag
    needs_restart: dict[str, Any] = {}  # section.key -> the value that the last reload found


class DrainAsk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/drain` and `/resume`; `name` None: the daemon.  `cancel`: what still runs
    after `timeout_s` ends with an error."""

    name: str | None = None
    timeout_s: float = 30.0
    wait: bool = True
    cancel: bool = False


class Drained(Struct, frozen=True, kw_only=True):
    """What became of it; `running` requests are left."""

    schema: str = DRAIN_SCHEMA
    name: str | None
    draining: bool
    running: int = 0
    cancelled: int = 0
    changed: bool = True  # False: it was so already
    still: tuple[str, ...] = ()  # drained names, besides


class HoldAsk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/hold`: what `name` serves now stays to be had as name@digest for so long,
    though the name moves; 0: what was held is not any more."""

    name: str
    seconds: float


class Held(Struct, frozen=True, kw_only=True):
    """What is held under a name now."""

    schema: str = "lorad/held.v1"
    name: str
    revs: tuple[str, ...]


class ShedAsk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/shed`, of a gateway when another member joins: send on who waits here, the
    newest first, until no more than `load` sequences run and wait."""

    load: int


class Shed(Struct, frozen=True, kw_only=True):
    """So many requests were sent on: those that a gateway sends elsewhere, and have got nothing."""

    schema: str = "lorad/shed.v1"
    requests: int


class RollbackAsk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/rollback` of a gateway, answered with `Added`: `name` means an earlier
    revision again; "" is the one before.  A digest may be cut off after 8 digits.  It goes on if
    it is not done in time."""

    name: str
    rev: str = ""
    timeout_s: float = 20.0  # clients that say nothing of it wait for 30


class RequestCancelled(Struct, frozen=True, kw_only=True):
    """What became of `DELETE /admin/v1/requests/{id}`: its client gets an error event."""

    schema: str = "lorad/request-cancelled.v1"
    id: str
    adapter: str  # "" is the base model
    rev: str
    generated_tokens: int
    changed: bool = True  # False: it was over already, and its client had still to read the end


class LogLine(Struct, frozen=True, kw_only=True):
    """One line of the daemon's log."""

    id: int
    time: str
    level: str
    logger: str
    message: str
    error: str = ""  # a traceback


class LogPage(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/logs`, oldest first."""

    schema: str = LOGS_SCHEMA
    instance_id: str
    items: tuple[LogLine, ...]
