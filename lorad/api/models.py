"""`/v1/models`: what can be asked for now.

Goes in: a caller, or a model's name.  Comes out: cards without file paths.  An unknown
model answers here exactly as it does on the generating routes.
"""

import asyncio
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.messages import EngineInfo
from lorad import wire
from lorad.api.deps import Deps, deps_of
from lorad.api.identity import caller_of
from lorad.api.respond import json
from lorad.errors import LoradError
from lorad.spelling import split_digest
from lorad.wire_openai import ModelCard, ModelFacts, ModelList

#: Rows between two turns of the event loop: ten thousand at once would be heard in every stream.
_PAGE = 200
_HIDDEN = ("quarantined", "missing")


async def list_models(request: Request) -> Response:
    """Of models whose engine takes requests; while none does, why."""
    deps, caller = deps_of(request), caller_of(request)
    models, bases = _up(deps), {model.name for model in deps.settings.models}
    cards = [_base_card(deps, m, models[m]) for m in models if caller.may(m)]
    cursor: str | None = None
    while True:
        page = deps.listing.page(
            state=None, tenant=None, q=None, sort="name", limit=_PAGE, cursor=cursor
        )
        cards += [
            _card(deps, models[item.model], item, item.name, item.rev)
            for item in page.items
            if item.rev is not None
            and item.state not in _HIDDEN
            and item.model in models
            and item.name not in bases
            and caller.may(item.name)
        ]
        cursor = page.cursor
        if cursor is None:
            return json(ModelList(data=cards))
        await asyncio.sleep(0)


async def get_model(request: Request) -> Response:
    deps = deps_of(request)
    name = request.path_params["id"]
    found = deps.requests.resolve(name, caller_of(request))
    info = deps.requests.engine(found.model)
    if found.rev is None:
        return json(_base_card(deps, found.model, info))
    adapter = deps.listing.detail(split_digest(deps.requests.named(name))[0]).adapter
    return json(_card(deps, info, adapter, name, found.rev))


def _up(deps: Deps) -> dict[str, EngineInfo]:
    """By name.  Raises what requests for the last one are told, if no engine takes any."""
    found, why = dict[str, EngineInfo](), None
    for model in deps.settings.models:
        try:
            found[model.name] = deps.requests.engine(model.name)
        except LoradError as error:
            why = error
    if why is not None and not found:
        raise why
    return found


def _base_card(deps: Deps, model: str, info: EngineInfo) -> ModelCard:
    return ModelCard(
        id=model,
        created=int(deps.started),
        root="base",
        parent=None,
        max_model_len=info.max_model_len,
        lorad=ModelFacts(state="active", **_purpose(deps, model, info)),
    )


def _card(deps: Deps, info: EngineInfo, adapter: wire.Adapter, name: str, rev: str) -> ModelCard:
    """`name` is as it was asked for, which may be `name@digest`."""
    return ModelCard(
        id=name,
        created=int(datetime.fromisoformat(adapter.created_at).timestamp()),
        root=rev,
        parent=adapter.model,
        max_model_len=info.max_model_len,
        lorad=ModelFacts(
            state=adapter.state,
            rank=adapter.rank,
            pinned=adapter.pinned,
            priority=adapter.priority,
            **_purpose(deps, adapter.model, info),
        ),
    )


def _purpose(deps: Deps, model: str, info: EngineInfo) -> dict[str, Any]:
    """An adapter is for what its base is for."""
    if info.pooling is None:
        return {}
    tasks = next(m.tasks for m in deps.settings.models if m.name == model)
    return {"tasks": tasks, "dimensions": info.pooling.width}
