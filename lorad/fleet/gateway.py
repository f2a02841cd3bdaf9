"""Gateway: one API and one operator's face over all members.

Goes in: members and a catalog.  Comes out: ASGI apps, and tasks that keep them informed between
`start` and `stop`.  The composition root of a cluster's front; several gateways may stand beside
each other over the same catalog.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from lorad import __version__
from lorad.api import missing
from lorad.api.app import INFERENCE, OPEN, Route
from lorad.api.deps import Deps
from lorad.api.guard import Bounds, Guard, admin_uids
from lorad.api.identity import key_of
from lorad.api.mounted import AtRoot
from lorad.api.respond import json
from lorad.api.tcp import KnownHost, TcpKeys, admit_operator
from lorad.api.uploads import Uploads
from lorad.config import Settings
from lorad.errors import LoradError
from lorad.fleet import admin, admin_routes, models, upload_routes
from lorad.fleet.admin_routes import methods_of
from lorad.fleet.asking import V1, alive, each, given
from lorad.fleet.catalog import Catalog
from lorad.fleet.going import Going
from lorad.fleet.inference import KNOWN, UNKNOWN, Inference, ask_of, response_of
from lorad.fleet.listing import Listing, own_status
from lorad.fleet.members import Answer, Ask, Member, Members
from lorad.fleet.presence import LEASE_SECONDS, Presence
from lorad.fleet.pulls import Pulls
from lorad.fleet.relief import Relief
from lorad.fleet.shared_uploads import SharedUploads
from lorad.fleet.staging import Stage
from lorad.fleet.taking import read
from lorad.fleet.watch import Boards, Events
from lorad.fleet.wishes import Wishes
from lorad.metrics.http import HttpCounts
from lorad.service.events import EventRing
from lorad.wire_openai import ModelList
from lorad.wire_status import Version
from lorad.wire_tenants import TenantPage

log = logging.getLogger("lorad.fleet")

LOOK_SECONDS = 5.0
FIRST_LOOK_SECONDS = 0.1


class Gateway:
    """`folder`: of its own, for uploads.  `several`: others stand behind the same address, and a
    client's next request may be theirs.  `keys`: of whoever comes over TCP, see `app`; `sockets`
    are shown by `loractl status`."""

    def __init__(
        self,
        members: Members,
        catalog: Catalog,
        folder: Path,
        *,
        settings: Settings | None = None,
        keys: TcpKeys | None = None,
        lease_seconds: float = LEASE_SECONDS,
        several: bool = False,
        sockets: tuple[str, str] = ("", ""),
    ) -> None:
        self.settings = settings or Settings()
        self._members, self._catalog = members, catalog
        self._version = Version(version=__version__)
        self._bases: frozenset[str] = frozenset()
        self._mixed: list[str] = []  # see merge
        self._private = True  # until a member has said that it has no tenants
        self._tasks: list[asyncio.Task[Any]] = []
        self._began = time.monotonic()
        self._counts = HttpCounts()
        self._gone: Counter[str] = Counter()
        self.ring = EventRing(instance_id=secrets.token_hex(8))
        self.presence = Presence(catalog, lease_seconds=lease_seconds)
        limits = self.settings.limits
        self.inference = Inference(
            members,
            catalog,
            self.presence,
            lambda: self._bases,
            stall_seconds=limits.stall_write,
            on_gone=self._note_gone,
        )
        stage = Stage(folder / "uploads")
        self.wishes = Wishes(members, catalog, self.presence, stage, self._tell)
        where = (*sockets, str(folder))
        self.listing = Listing(
            members,
            catalog,
            lambda: own_status(__version__, self.ring.instance_id, where, self._began),
        )
        blobs = catalog.store.blobs
        self.pulls = Pulls(self.settings, stage, self.wishes.add, blobs if several else None)
        self._events = Events(members, self.ring)
        self.boards = Boards(members, catalog, self.listing, self.ring)
        most = self.settings.watch.max_adapter_bytes
        uploads = Uploads(cast(Any, stage), max_bytes=most)
        shared = upload_routes.handlers(SharedUploads(blobs, stage, most)) if several else {}
        self._admin_routes = admin_routes.routes(shared)
        self._deps = self._make_deps(uploads)
        self._keys = keys or TcpKeys()
        self._going = Going(self.presence)
        self._desk = admin.Desk(
            members, catalog, self.listing, self.wishes, self.pulls, self.inference, self._going
        )

    # ------------------------------------------------------------- begin and end
    async def start(self) -> None:
        """Raises LoradError if the catalog cannot be read."""
        await self.presence.beat()
        await self.look()
        loops: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self.presence.run,
            self._events.run,
            self.boards.run,
            Relief(self._members).run,
            self._look_on,
        ]
        self._tasks = [asyncio.create_task(kept(run)) for run in loops]

    async def stop(self) -> None:
        """Nobody waits for this gateway any more."""
        self.ring.close()
        await self.pulls.close()
        await self._going.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.presence.leave()
        except LoradError as error:
            log.warning("other gateways may wait for this one: %s", error.message)

    async def look(self) -> None:
        """What members serve, and whether they have tenants."""
        versions = given(await each(alive(self._members), self._version_of))
        if versions:
            self._bases = models.bases_of([v.models or (v.model,) for v in versions.values()])
            self._version = next(iter(versions.values()))
            pages = given(await each(alive(self._members), self._tenants_of))
            if pages:
                self._private = any(page.items for page in pages.values())
            await self.listing.look()
            mixed = self.listing.mixed()
            for words in mixed if mixed != self._mixed else ():
                log.warning("%s: answers depend on who gives them", words)
            self._mixed = mixed

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS if self._bases else FIRST_LOOK_SECONDS)
            await self.look()

    async def _version_of(self, member: Member) -> Version:
        return read(await self._members.ask(member.name, Ask("GET", "/version")), Version)

    async def _tenants_of(self, member: Member) -> TenantPage:
        ask = Ask("GET", f"{V1}/tenants", face="admin")
        return read(await self._members.ask(member.name, ask), TenantPage)

    # ------------------------------------------------------------- apps
    def app(self) -> Starlette:
        """Both faces on one, for TCP: operators' routes need a key of `keys.admin`, the others one
        of `keys.inference`.  Where that has none, members say who is let in, and no page that came
        by a name of its own is."""
        routes = [*self._inference_routes(), *self._admin_routes]
        known = () if self._keys.inference else (Middleware(KnownHost, deps=self._deps),)
        return self._app(routes, *known, admit=self._admit, streamed=True)

    def inference_app(self) -> Starlette:
        """For applications: members say who is let in."""
        return self._app(self._inference_routes(), admit=lambda scope, headers: None)

    def admin_app(self) -> Starlette:
        """For a socket: root, the gateway's own user, and `admin.allow_uids`."""
        uids = admin_uids(self.settings.admin.allow_uids)
        routes = [*self._health_routes(), *self._admin_routes]
        return self._app(routes, admit=lambda scope, headers: None, uids=uids, streamed=True)

    def _admit(self, scope: Scope, headers: Any) -> None:
        if scope["path"].startswith(f"{V1}/") or scope["path"] == "/metrics":
            admit_operator(self._keys, scope, headers)
        elif self._keys.inference:
            name = self._keys.inference.name_of(key_of(headers))
            if name is None:
                hint = "authorization: Bearer KEY"
                raise LoradError("invalid_api_key", "an API key is needed here", hint=hint)
            scope[KNOWN] = name

    def _app(
        self,
        routes: list[Route],
        *more: Middleware,
        admit: Callable[[Scope, Any], None],
        uids: frozenset[int] | None = None,
        streamed: bool = False,
    ) -> Starlette:
        limits = self.settings.limits
        bounds = Bounds(
            limits.body,
            limits.headers,
            limits.request_receipt,
            uids=uids,
            admit=admit,
            open_paths=OPEN,
            streamed=_is_upload if streamed else (lambda scope: False),
        )
        guard = Middleware(Guard, bounds=bounds, counts=self._counts, on_gone=self._note_gone)
        app = Starlette(
            routes=routes,
            middleware=[Middleware(AtRoot), guard, *more],
            exception_handlers={HTTPException: missing.no_route},
        )
        app.router.redirect_slashes = False
        app.state.deps, app.state.bounds, app.state.desk = self._deps, bounds, self._desk
        return app

    def _health_routes(self) -> list[Route]:
        return [
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/health", self._readyz),
            Route("/startupz", self._readyz),
            Route("/version", self._say_version),
        ]

    def _inference_routes(self) -> list[Route]:
        """Every route of a daemon; the body of most of them is a member's business."""
        own = {"/v1/models": self._models, "/v1/models/{id:path}": self._model}
        rest = [
            Route(one.path, own.get(one.path, self.inference.forward), methods=methods_of(one))
            for one in INFERENCE
            if one.path not in OPEN
        ]
        return [*self._health_routes(), *rest]

    # ------------------------------------------------------------- routes
    async def _livez(self, request: Request) -> Response:
        return json({"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        """One member that takes requests is enough, if this gateway knows what names mean."""
        ready, code = self.listing.ready()
        if not ready:
            raise LoradError(code, f"not ready: {self.listing.waiting()}")
        self.presence.check()
        if not self._bases:
            raise LoradError("engine_restarting", f"not ready: {UNKNOWN}")
        return json({"status": "ok"})

    async def _say_version(self, request: Request) -> Response:
        return json(msgspec.structs.replace(self._version, version=__version__))

    async def _models(self, request: Request) -> Response:
        answer = await self._one_says(request, "")
        if answer.status != 200:
            return response_of(answer)
        self.presence.check()
        said, table, private = read(answer, ModelList), self._catalog.table, self._private
        # thousands of rows would be heard in every stream
        page = await asyncio.to_thread(lambda: json(models.listed(said, table, private=private)))
        return page

    async def _model(self, request: Request) -> Response:
        return response_of(await self._one_says(request, request.path_params["id"]))

    async def _one_says(self, request: Request, model: str) -> Answer:
        known = KNOWN in request.scope
        ask = replace(await ask_of(request), method="GET")  # of a HEAD as well
        answer = await self.inference.begin(ask, model, vouched=known)
        assert isinstance(answer, Answer)
        return answer

    def _tell(self, type: str, *, name: str, rev: str, message: str) -> None:
        """Of an order that is done."""
        self.listing.note_change()
        self.ring.publish(type, name=name, rev=rev, message=message)

    def _note_gone(self, reason: str) -> None:
        self._gone[reason] += 1

    def _make_deps(self, uploads: Uploads) -> Deps:
        """What the daemon's own handlers ask for, of those that are used here."""
        deaf = SimpleNamespace(note=lambda *words, **more: None)
        some = SimpleNamespace(
            settings=self.settings,
            limits=self.settings.limits,
            adapters=self.wishes,
            listing=self.listing,
            board=self.boards,
            events=self.ring,
            uploads=uploads,
            http=self._counts,
            audit=deaf,
            version=__version__,
            ping_seconds=15.0,
            note_aborted=self._note_gone,
        )
        return cast(Deps, some)


async def kept(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A loop that fails by our own fault is begun anew: half a gateway is worse than a late one."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("a task of the gateway failed; it begins anew")
            await asyncio.sleep(1.0)


def _is_upload(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "PUT" and path.startswith(f"{V1}/uploads/")
