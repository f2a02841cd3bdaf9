"""Health routes and `/version`, open on both sockets.

`/livez` is the daemon's loop: that it answers is the answer.  `/readyz` (and `/health`) is the
engines': 200 only while requests for every model are taken, else 503 with the reason; with
`?model=NAME` it is about that model alone.  `/startupz` is 200 from the first time that all were
ready.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lorad.api.deps import deps_of
from lorad.api.respond import json
from lorad.errors import TABLE, LoradError
from lorad.wire_status import Version


async def livez(request: Request) -> Response:
    return json({"status": "ok"})


async def readyz(request: Request) -> Response:
    listing, model = deps_of(request).listing, request.query_params.get("model")
    names = [m.name for m in deps_of(request).settings.models]
    if model is not None and model not in names:
        hint = f"there is {', '.join(names)}"
        raise LoradError("model_not_found", "no base has that name", param="model", hint=hint)
    ready, reason = listing.ready(model)
    if ready:
        return json({"status": "ok"})
    which = listing.waiting() if model is None else ""
    words = f"not ready: {reason}" + (f" ({which})" if which else "")
    raise LoradError(reason if reason in TABLE else "loading_base", words)


async def startupz(request: Request) -> Response:
    deps = deps_of(request)
    if all(deps.requests.facts(m.name) is not None for m in deps.settings.models):
        return json({"status": "ok"})
    raise LoradError("loading_base", "not started: the base model is still loading")


async def version(request: Request) -> Response:
    deps = deps_of(request)
    first = deps.settings.models[0]  # its folder's name: where it lies is not for tenants to know
    models = tuple(model.name for model in deps.settings.models)
    base = Path(first.base).name
    return json(Version(version=deps.version, model=first.name, base=base, models=models))
