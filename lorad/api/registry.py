"""Admin routes of the registry as a whole: check, backup, export, import.

Goes in: requests of peers that the guard let in.  Comes out: what Ledger answers; a backup is the
bytes of a database.  Decides nothing itself.
"""

from starlette.requests import Request
from starlette.responses import Response

from lorad.api import audit
from lorad.api.asked import body
from lorad.api.deps import deps_of
from lorad.api.respond import json
from lorad.wire_registry import RegistryImport


async def check(request: Request) -> Response:
    return json(await deps_of(request).ledger.check())


async def backup(request: Request) -> Response:
    data = await deps_of(request).ledger.backup()
    audit.done(request, "registry.backup", "")
    return Response(data, media_type="application/vnd.sqlite3")


async def export(request: Request) -> Response:
    return json(await deps_of(request).ledger.export())


async def take_in(request: Request) -> Response:
    wish = await body(request, RegistryImport)
    outcome = await deps_of(request).ledger.take_in(wish)
    if not wish.dry_run:
        audit.done(request, "registry.import", "", message=f"{len(wish.items)} names")
    return json(outcome)
