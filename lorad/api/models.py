"""`/v1/models`: what can be asked for now.

Goes in: a caller, or a model's name.  Comes out: cards without file paths.  An unknown
model answers here exactly as it does on the generating routes.
"""

import asyncio
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorad import wire
from lorad.api.deps import Deps, deps_of
from lorad.api.identity import caller_of
from lorad.api.respond import json
from lorad.spelling import split_digest
from lorad.wire_openai import ModelCard, ModelFacts, ModelList

#: Rows between two turns of the event loop: ten thousand at once would be heard in every stream.
_PAGE = 200
_HIDDEN = ("quarantined", "missing")


async def list_models(request: Request) -> Response:
    deps, caller = deps_of(request), caller_of(request)
    context = deps.requests.engine().max_model_len
    cards = [_base_card(deps, context)] if caller.may(deps.settings.model.name) else []
    cursor: str | None = None
    while True:
        page = deps.listing.page(
            state=None, tenant=None, q=None, sort="name", limit=_PAGE, cursor=cursor
        )
        cards += [
            _card(deps, context, item, item.name, item.rev)
            for item in page.items
            if item.rev is not None and item.state not in _HIDDEN and caller.may(item.name)
        ]
        cursor = page.cursor
        if cursor is None:
            return json(ModelList(data=cards))
        await asyncio.sleep(0)


async def get_model(request: Request) -> Response:
    deps = deps_of(request)
    name = request.path_params["id"]
    rev = deps.requests.resolve(name, caller_of(request))
    context = deps.requests.engine().max_model_len
    if rev is None:
        return json(_base_card(deps, context))
    adapter = deps.listing.detail(split_digest(deps.requests.named(name))[0]).adapter
    return json(_card(deps, context, adapter, name, rev))


def _base_card(deps: Deps, context: int) -> ModelCard:
    return ModelCard(
        id=deps.settings.model.name,
        created=int(deps.started),
        root="base",
        parent=None,
        max_model_len=context,
        lorad=ModelFacts(state="active", **_purpose(deps)),
    )


def _card(deps: Deps, context: int, adapter: wire.Adapter, name: str, rev: str) -> ModelCard:
    """`name` is as it was asked for, which may be `name@digest`."""
    return ModelCard(
        id=name,
        created=int(datetime.fromisoformat(adapter.created_at).timestamp()),
        root=rev,
        parent=deps.settings.model.name,
        max_model_len=context,
        lorad=ModelFacts(
            state=adapter.state,
            rank=adapter.rank,
            pinned=adapter.pinned,
            priority=adapter.priority,
            **_purpose(deps),
        ),
    )


def _purpose(deps: Deps) -> dict[str, Any]:
    """An adapter is for what its base is for."""
    pooling = deps.requests.engine().pooling
    if pooling is None:
        return {}
    return {"tasks": deps.settings.model.tasks, "dimensions": pooling.width}
