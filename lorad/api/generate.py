"""`/v1/chat/completions` and `/v1/completions`: body → Ask → Generation → body or stream.

Goes in: a request whose size and time the guard has bounded.  Comes out: the OpenAI answer.  A
failure before the first byte has its HTTP status; one after it is an error event, and no `[DONE]`.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lorad.api import parse, sse
from lorad.api.deps import deps_of
from lorad.api.respond import as_lorad_error, envelope, json
from lorad.api.shapes import ChatShape, CompletionShape, Gathered
from lorad.config import Limits
from lorad.service.ask import Ask
from lorad.service.generation import Generation


@dataclass(frozen=True, slots=True)
class _Facts:
    id: str
    created: int
    model: str
    fingerprint: str


_ShapeClass = type[ChatShape] | type[CompletionShape]


async def chat_completions(request: Request) -> Response:
    return await _generate(request, parse.chat, ChatShape)


async def completions(request: Request) -> Response:
    return await _generate(request, parse.completion, CompletionShape)


async def _generate(
    request: Request,
    parse_body: Callable[[bytes, Limits], tuple[Ask, parse.Shape]],
    shape_class: _ShapeClass,
) -> Response:
    deps = deps_of(request)
    ask, wanted = parse_body(await request.body(), deps.limits)
    if not wanted.stream:
        return await sse.unless_gone(request, _whole(request, ask, wanted, shape_class))
    generation = await sse.unless_gone(request, deps.requests.start(ask))
    events = _stream(generation, wanted, shape_class, deps.ping_seconds)
    try:
        # The status line waits for the first event, so that a failure until then is no 200.
        first = await sse.unless_gone(request, anext(events))
    except BaseException:
        generation.close()
        raise
    return sse.EventStream(
        _resumed(first, events),
        headers=_headers(generation),
        stall_seconds=deps.limits.stall_write,
        on_gone=deps.note_aborted,
        on_close=generation.close,
    )


async def _whole(
    request: Request, ask: Ask, wanted: parse.Shape, shape_class: _ShapeClass
) -> Response:
    generation = await deps_of(request).requests.start(ask)
    try:
        answers = [Gathered() for _ in generation.choices]
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if piece is not None:
                    answers[piece.index].add(piece)
    finally:
        generation.close()
    shape = _shape(generation, wanted, shape_class)
    return json(shape.body(answers, generation.usage()), headers=_headers(generation))


async def _stream(
    generation: Generation, wanted: parse.Shape, shape_class: _ShapeClass, ping: float
) -> AsyncGenerator[bytes, None]:
    shape = _shape(generation, wanted, shape_class)
    begun = False
    try:
        async with aclosing(generation.pieces(ping)) as pieces:
            async for piece in pieces:
                for chunk in map(sse.event, shape.chunks(piece)) if piece else (sse.PING,):
                    begun = True
                    yield chunk
        if wanted.include_usage:
            yield sse.event(shape.usage_chunk(generation.usage()))
        yield sse.DONE
    except Exception as error:
        if not begun:
            raise
        yield sse.event(envelope(as_lorad_error(error)))
    finally:
        generation.close()


async def _resumed(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for item in rest:
            yield item
    finally:
        await rest.aclose()


def _shape(
    generation: Generation, wanted: parse.Shape, shape_class: _ShapeClass
) -> ChatShape | CompletionShape:
    facts = _Facts(generation.id, generation.created, generation.ask.model, generation.fingerprint)
    spell = generation.text.token_bytes
    return shape_class(facts, spell, wanted.top_logprobs, wanted.include_usage)


def _headers(generation: Generation) -> dict[str, str]:
    return {"x-lorad-rev": generation.rev or "base"}
