"""Results of a model that pools → the bodies of the routes that asked for them.

Goes in: `Answered` or `Scored`, and the request's body.  Comes out: Structs of `wire_pooling`,
whose vectors are JSON already.  Many numbers are written in pieces, so that other requests of the
event loop are not kept waiting for all of them.
"""

import asyncio
import base64
import math
import secrets
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from engine.pooling.requests import Floats, PoolResult
from lorad import wire_pooling as wire
from lorad.service.pool_ask import Answered, Scored

#: Numbers that are written between two turns of the loop: a millisecond or two.
_PIECE = 4096
#: Documents that Cohere counts as one search.
_SEARCH_UNIT = 100


async def embeddings(body: wire.EmbeddingsRequest, answered: Answered) -> wire.EmbeddingList:
    """One vector for each input."""
    plain = body.encoding_format != "base64"
    items = (
        wire.Embedding(index=i, embedding=values.tolist() if plain else as_base64(values))
        for i, values in enumerate(map(_values, answered.results))
    )
    return wire.EmbeddingList(
        data=await _written(items, answered.results),
        model=body.model,
        usage=_usage(answered),
    )


async def pooling(body: wire.PoolingRequest, answered: Answered) -> wire.PoolingList:
    """Whatever each input has."""
    plain = body.encoding_format != "base64"
    items = (
        wire.PoolingItem(
            index=i,
            data=values.tolist() if plain else as_base64(values),
            shape=tuple(values.shape),
        )
        for i, values in enumerate(map(_values, answered.results))
    )
    return wire.PoolingList(
        data=await _written(items, answered.results),
        model=body.model,
        usage=_usage(answered),
        **_made("pool"),
    )


def classified(model: str, answered: Answered) -> wire.ClassifiedList:
    """The likeliest class of each input, and all of them."""
    return wire.ClassifiedList(
        data=tuple(
            _classes(i, result, answered.labels) for i, result in enumerate(answered.results)
        ),
        model=model,
        usage=_usage(answered),
        **_made("classify"),
    )


def scored(model: str, scored: Scored) -> wire.ScoreList:
    """In the order that they were given in."""
    return wire.ScoreList(
        data=tuple(wire.ScoreItem(index=i, score=s) for i, s in enumerate(scored.scores)),
        model=model,
        usage=_usage(scored.answered),
        **_made("score"),
    )


def ranked(body: wire.RerankRequest, model: str, scored: Scored, version: str) -> wire.Ranked:
    """The best first, as many as were asked for."""
    results = tuple(
        wire.RankedItem(
            index=i,
            relevance_score=scored.scores[i],
            document=_document(body.documents[i]) if body.return_documents else UNSET,
        )
        for i in scored.order[: body.top_n]
    )
    units = math.ceil(len(body.documents) / _SEARCH_UNIT)
    return wire.Ranked(
        id=_id("rerank"),
        model=model,
        results=results,
        usage=_usage(scored.answered),
        meta=wire.RankedMeta(
            api_version=wire.ApiVersion(version=version),
            billed_units=wire.BilledUnits(search_units=units),
        ),
    )


def tei_ranked(body: wire.TeiRerankRequest, scored: Scored) -> tuple[wire.TeiRank, ...]:
    """All of them, the best first."""
    return tuple(
        wire.TeiRank(
            index=i, score=scored.scores[i], text=body.texts[i] if body.return_text else UNSET
        )
        for i in scored.order
    )


async def tei_embedded(answered: Answered) -> Any:
    """A bare list with a vector for each input."""
    return await _written(
        (_values(result).tolist() for result in answered.results), answered.results
    )


def as_base64(values: Floats) -> str:
    """Little-endian fp32, rows one behind the other."""
    return base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()


# ----------------------------------------------------------------- inside
async def _written(items: Iterable[Struct | list[float]], results: Iterable[PoolResult]) -> Any:
    """Each as JSON, which the Struct around them takes as it is."""
    written, numbers = [], 0
    for item, result in zip(items, results, strict=True):
        written.append(Raw(msgspec.json.encode(item)))
        numbers += _values(result).size
        if numbers > _PIECE:
            numbers = 0
            await asyncio.sleep(0)
    return written


def _classes(index: int, result: PoolResult, labels: tuple[str, ...]) -> wire.Classified:
    probs = tuple(_values(result).tolist())
    keys = probs if result.logits is None else result.logits.tolist()
    best = max(range(len(probs)), key=keys.__getitem__)
    label = labels[best] if len(labels) == len(probs) else f"LABEL_{best}"
    return wire.Classified(index=index, label=label, probs=probs, num_classes=len(probs))


def _document(document: str | wire.Document) -> wire.Document:
    return wire.Document(text=document) if isinstance(document, str) else document


def _values(result: PoolResult) -> Floats:
    assert result.values is not None
    return result.values


def _usage(answered: Answered) -> wire.PoolingUsage:
    count = answered.num_tokens
    return wire.PoolingUsage(prompt_tokens=count, total_tokens=count)


def _made(kind: str) -> dict[str, Any]:
    return {"id": _id(kind), "created": int(time.time())}


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
