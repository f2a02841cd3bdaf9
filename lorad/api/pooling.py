"""The routes for vectors and scores: body → ask → results → body.

Goes in: a request whose size and time the guard has bounded.  Comes out: the answer in the shape
that the route's clients read.  A client that leaves takes its inputs back.
"""

from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

from msgspec import convert
from starlette.requests import Request
from starlette.responses import Response

from engine.pooling.fit import CLASSIFY, EMBED, RERANK
from lorad import wire_pooling as wire
from lorad.api import params, parse, pool_answers, pool_parse, sse, tei
from lorad.api.asked import checked
from lorad.api.deps import deps_of
from lorad.api.identity import caller_of
from lorad.api.respond import json
from lorad.service.pool_ask import Answered, PoolAsk, ScoreAsk, Scored, Wish

T = TypeVar("T")
SCORES = (RERANK, CLASSIFY)


async def embeddings(request: Request) -> Response:
    body = await checked(request, wire.EmbeddingsRequest, params.EMBEDDINGS)
    answered = await _run(request, pool_parse.embeddings(body, _timeout(request)))
    answer = await pool_answers.embeddings(body, answered)
    return json(answer, headers=_headers(answered))


async def pooling(request: Request) -> Response:
    body = await checked(request, wire.PoolingRequest, params.EMBEDDINGS)
    answered = await _run(request, pool_parse.pooling(body, _timeout(request)))
    return json(await pool_answers.pooling(body, answered), headers=_headers(answered))


async def classify(request: Request) -> Response:
    body = await checked(request, wire.ClassifyRequest, params.CLASSIFY)
    answered = await _run(request, pool_parse.classify(body, _timeout(request)))
    return json(pool_answers.classified(body.model, answered), headers=_headers(answered))


async def score(request: Request) -> Response:
    body = await checked(request, wire.ScoreRequest, params.SCORE)
    scored = await _score(request, pool_parse.score(body, _timeout(request)))
    return json(pool_answers.scored(body.model, scored), headers=_headers(scored.answered))


async def rerank(request: Request) -> Response:
    """Cohere's, both versions, and Jina's."""
    body = await checked(request, wire.RerankRequest, params.RERANK)
    ask = pool_parse.rerank(body, _served(request, *SCORES), _timeout(request))
    scored = await _score(request, ask)
    version = "2" if request.url.path.startswith("/v2/") else "1"
    answer = pool_answers.ranked(body, ask.wish.model, scored, version)
    return json(answer, headers=_headers(scored.answered))


async def tei_rerank(request: Request) -> Response:
    """Text Embeddings Inference's, which says in its own words what went wrong."""
    tei.speak(request)
    body = await checked(request, wire.TeiRerankRequest, params.TEI_RERANK)
    served = _served(request, *SCORES)
    scored = await _score(request, pool_parse.tei_rerank(body, served, _timeout(request)))
    return json(pool_answers.tei_ranked(body, scored), headers=_headers(scored.answered))


async def tei_embed(request: Request) -> Response:
    """TEI's vectors."""
    return await _tei(request, wire.TeiEmbedRequest)


async def tei_similarity(request: Request) -> Response:
    """TEI's: how alike the vectors of one text are to those of others."""
    return await _tei(request, wire.TeiSimilarityRequest)


async def tei_root(request: Request) -> Response:
    """For TEI's clients that have no more than its address."""
    return await _tei(request, wire.TeiRequest)


# ----------------------------------------------------------------- inside
async def _tei(
    request: Request,
    kind: type[wire.TeiVectors | wire.TeiSimilarityRequest],
) -> Response:
    tei.speak(request)
    body = convert(await checked(request, kind, params.TEI), wire.TeiRequest, from_attributes=True)
    ask = pool_parse.tei(body, _served(request, EMBED), _timeout(request))
    if isinstance(ask, ScoreAsk):
        scored = await _score(request, ask)
        return json(scored.scores, headers=_headers(scored.answered))
    answered = await _run(request, ask)
    return json(await pool_answers.tei_embedded(answered), headers=_headers(answered))


async def _run(request: Request, ask: PoolAsk) -> Answered:
    ask = replace(ask, wish=_of_its_trace(request, ask.wish))
    return await _unless_gone(request, deps_of(request).pooling.run(ask, caller_of(request)))


async def _score(request: Request, ask: ScoreAsk) -> Scored:
    ask = replace(ask, wish=_of_its_trace(request, ask.wish))
    return await _unless_gone(request, deps_of(request).pooling.score(ask, caller_of(request)))


def _of_its_trace(request: Request, wish: Wish) -> Wish:
    """With the W3C's two headers as they came, where somebody traces."""
    parent, state = map(request.headers.get, ("traceparent", "tracestate"))
    if not (deps_of(request).requests.tracing and parent):
        return wish
    return replace(wish, traceparent=parent, tracestate=state or "")


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    return await sse.unless_gone(request.receive, work)


def _served(request: Request, *tasks: str) -> str:
    """Where a body names no model: that of the query, the first for one of `tasks`, or else the
    first that pools at all."""
    if named := request.query_params.get("model"):
        return named
    models = deps_of(request).settings.models
    fit = [m for m in models if set(tasks) & set(m.tasks)]
    return (fit or [m for m in models if m.pools or m.pools_too] or models)[0].name


def _timeout(request: Request) -> float | None:
    return parse.timeout(request.headers.get("x-request-timeout"))


def _headers(answered: Answered) -> dict[str, str]:
    return {"x-lorad-rev": answered.rev or "base"}
