"""What the routes need, handed to both apps by the composition root.

Goes in: the services.  Comes out: one frozen value that every request finds in its app.  The
protocols say what the routes use of each service.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from lorad import wire, wire_explain, wire_status
from lorad.api.sse import PING_SECONDS
from lorad.api.uploads import Stage, Staging, Uploads
from lorad.board.stream import Message
from lorad.config import Settings
from lorad.config_sections import Limits
from lorad.errors import LoradError
from lorad.metrics.http import UNMATCHED, HttpCounts
from lorad.registry.records import OperationRecord
from lorad.service.audit import Audit
from lorad.service.callers import Callers
from lorad.service.events import Level
from lorad.service.pool_ask import Answered, PoolAsk, ScoreAsk, Scored
from lorad.service.requests import RequestService
from lorad.service.tenancy import Tenancy
from lorad.service.tenants import Caller
from lorad.wire_operate import DrainAsk, Drained, Held, HoldAsk, LogLine, Reloaded, RunningConfig
from lorad.wire_operations import PullPlan, PullStart
from lorad.wire_registry import (
    RegistryCheck,
    RegistryExport,
    RegistryImport,
    RegistryImported,
)
from lorad.wire_stream import Board


class Wishes(Stage, Protocol):
    """Of AdapterService: what operators ask for."""

    async def add(
        self,
        staging: Staging,
        name: str,
        *,
        source: str,
        model: str,
        replace: bool,
        pin: bool | None,
        priority: int | None,
        labels: dict[str, str] | None,
        load: bool,
        dry_run: bool,
    ) -> wire.Added: ...
    async def load(self, names: wire.Names) -> wire.Results: ...
    async def evict(self, names: wire.Names) -> wire.Results: ...
    async def pin(self, names: wire.Names) -> wire.Results: ...
    async def unpin(self, names: wire.Names) -> wire.Results: ...
    async def patch(self, name: str, patch: wire.AdapterPatch) -> None: ...
    def hold(self, ask: HoldAsk) -> Held: ...
    async def remove(self, name: str, *, keep_files: bool = False) -> wire.Removed: ...


class Pooling(Protocol):
    """Of PoolingService."""

    async def run(self, ask: PoolAsk, caller: Caller) -> Answered: ...
    async def score(self, ask: ScoreAsk, caller: Caller) -> Scored: ...


class Named(Protocol):
    """Of Folders."""

    async def add(self, name: str, path: str, *, replace: bool) -> wire.Added: ...


class Verifying(Protocol):
    """Of Verification."""

    async def verify(self, wish: wire.Names) -> wire.Verifications: ...


class Keeping(Protocol):
    """Of Housekeeping."""

    async def gc(self, ask: wire.GcAsk) -> wire.Garbage: ...


class Exposing(Protocol):
    """Of Metrics."""

    async def scrape(self, accept: str) -> tuple[bytes, str]: ...


class Recording(Protocol):
    """Of Ledger: the registry as a whole."""

    async def check(self) -> RegistryCheck: ...
    async def backup(self) -> bytes: ...
    async def export(self) -> RegistryExport: ...
    async def take_in(self, ask: RegistryImport) -> RegistryImported: ...


class Explaining(Protocol):
    """Of Explaining."""

    async def explain(self, name: str) -> wire_explain.Explained: ...


class Pulling(Protocol):
    """Of Pulls."""

    async def plan(self, start: PullStart) -> PullPlan: ...
    async def begin(self, start: PullStart, *, actor: str) -> OperationRecord: ...


class Operating(Protocol):
    """Of Operations."""

    def get(self, id: str) -> OperationRecord: ...
    def list(self, *, live: bool = False, limit: int = 100) -> tuple[OperationRecord, ...]: ...
    async def wait(self, id: str, seconds: float | None = None) -> OperationRecord: ...
    async def cancel(self, id: str) -> OperationRecord: ...


class Listing(Protocol):
    """Read-only pictures.  `ready` is (yes or no, why not); `look` brings them up to date."""

    async def look(self) -> None: ...
    def ready(self, model: str | None = None) -> tuple[bool, str]: ...
    def waiting(self) -> str: ...
    def status(self) -> wire_status.Status: ...
    def page(
        self,
        *,
        state: str | None,
        tenant: str | None,
        model: str | None = None,
        q: str | None,
        sort: str,
        limit: int,
        cursor: str | None,
    ) -> wire.AdapterPage: ...
    def detail(self, name: str) -> wire.AdapterDetail: ...
    def slots(self) -> wire.SlotPage: ...


class Events(Protocol):
    """Of EventRing."""

    instance_id: str

    def since(self, after: int, limit: int = 0) -> tuple[tuple[wire.EventItem, ...], bool]: ...
    def newest(self, limit: int) -> tuple[wire.EventItem, ...]: ...
    def follow(self, after: int | None = None) -> AsyncIterator[wire.EventItem]: ...
    def publish(
        self, type: str, *, level: Level, name: str, cause: str, message: str
    ) -> wire.EventItem: ...


class LogLines(Protocol):
    """Of LogRing."""

    def since(self, after: int, limit: int = 0) -> tuple[LogLine, ...]: ...
    def newest(self, limit: int) -> tuple[LogLine, ...]: ...
    def follow(self, after: int | None = None) -> AsyncIterator[LogLine]: ...


class Watching(Protocol):
    """Of Boards."""

    async def once(self) -> Board: ...
    def follow(
        self, interval: float, after: int | None = None
    ) -> AsyncGenerator[Message, None]: ...


class Drain(Protocol):
    """Of Draining."""

    async def drain(self, ask: DrainAsk) -> Drained: ...
    def resume(self, ask: DrainAsk) -> Drained: ...


@dataclass(slots=True)
class Deps:
    """`started` is the daemon's start in seconds since the epoch: the base's `created`.  A reload
    replaces `settings`."""

    settings: Settings
    requests: RequestService
    pooling: Pooling
    adapters: Wishes
    verification: Verifying
    explaining: Explaining
    housekeeping: Keeping
    ledger: Recording
    pulls: Pulling
    operations: Operating
    audit: Audit
    callers: Callers
    tenancy: Tenancy
    listing: Listing
    board: Watching
    events: Events
    uploads: Uploads
    folders: Named
    metrics: Exposing
    http: HttpCounts
    log: LogLines
    draining: Drain
    reload: Callable[[], Awaitable[Reloaded]]
    config: Callable[[], RunningConfig]
    version: str
    started: float
    ping_seconds: float = field(default=PING_SECONDS)

    @property
    def limits(self) -> Limits:
        return self.settings.limits

    def note_refused(self, error: LoradError) -> None:
        """Count a connection that ended before it was a request."""
        self.http.refuse(UNMATCHED, "", error.status)
        if error.code == "request_timeout":
            self.note_aborted("receipt_timeout")

    def note_aborted(self, reason: str) -> None:
        """Count a request that ended because of its client."""
        self.requests.aborted[reason] += 1


def deps_of(request: Request) -> Deps:
    deps: Deps = request.app.state.deps
    return deps
