"""`/v1/chat/completions` and `/v1/completions`: body → Ask → Generation → body or stream.

Goes in: a request whose size and time the guard has bounded.  Comes out: the OpenAI answer.  A
failure before the first byte has its HTTP status; one after it is an error event, and no `[DONE]`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from lorad.api import parse, sse
from lorad.api.asked import read_with
from lorad.api.deps import deps_of
from lorad.api.encode import EventEncoder
from lorad.api.identity import MOVES_HEADER, caller_of
from lorad.api.respond import json
from lorad.api.shapes import ChatShape, CompletionShape, Gathered
from lorad.api.stream import TokenStream
from lorad.api.tool_shape import ToolShape
from lorad.config_sections import Limits
from lorad.service.ask import Ask
from lorad.service.generation import Generation

#: Characters of a token with its probability.
WRITTEN = 16
#: An answer of more than so many in tokens and alternatives is written beside the loop: 16 prompts
#: of 2,900 tokens with 20 alternatives each, 15 MB, held up everybody's stream for half a second.
ON_LOOP = 1 << 16


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
    ask, wanted = await read_with(request, lambda body: parse_body(body, deps.limits))
    ask = replace(ask, timeout=parse.timeout(request.headers.get("x-request-timeout")))
    if MOVES_HEADER in request.headers:
        ask = replace(ask, moves=True)
    if deps.requests.tracing:
        ask = _part_of_its_trace(request, ask)
    if not wanted.stream:
        return await sse.unless_gone(request.receive, _whole(request, ask, wanted, shape_class))
    generation = await sse.unless_gone(
        request.receive, deps.requests.start(ask, caller_of(request))
    )
    shape = _shape(generation, wanted, shape_class)
    stream = TokenStream(
        generation,
        EventEncoder(shape, generation.usage if wanted.include_usage else None),
        headers=_headers(generation),
        ping_seconds=deps.ping_seconds,
        stall_seconds=deps.limits.stall_write,
        on_gone=deps.note_aborted,
    )
    try:
        # The status line waits for the first event, so that a failure until then is no 200.
        await stream.begun(request)
        generation.moves = False  # its client has the head now
    except BaseException:
        generation.close()
        raise
    return stream


async def _whole(
    request: Request, ask: Ask, wanted: parse.Shape, shape_class: _ShapeClass
) -> Response:
    generation = await deps_of(request).requests.start(ask, caller_of(request))
    try:
        await generation.wait()
    finally:
        generation.close()
    if generation.error is not None:
        raise generation.error
    answers = [Gathered() for _ in generation.choices]
    for piece in generation.pull():
        answers[piece.index].add(piece)
    shape = _shape(generation, wanted, shape_class)

    def write() -> Response:
        return json(shape.body(answers, generation.usage()), headers=_headers(generation))

    told = 0 if wanted.top_logprobs is None else sum(answer.num_scored for answer in answers)
    size = told * (1 + (wanted.top_logprobs or 0)) * WRITTEN
    if size < ON_LOOP:
        return write()
    return await deps_of(request).requests.threads.run(size, write)


def _part_of_its_trace(request: Request, ask: Ask) -> Ask:
    """With the W3C's two headers as they came: who reads them ignores what has no such form."""
    parent, state = map(request.headers.get, ("traceparent", "tracestate"))
    return replace(ask, traceparent=parent or "", tracestate=state or "") if parent else ask


def _shape(
    generation: Generation, wanted: parse.Shape, shape_class: _ShapeClass
) -> ChatShape | CompletionShape:
    facts = _Facts(generation.id, generation.created, generation.ask.model, generation.fingerprint)
    spell, ask = generation.text.token_bytes, generation.ask
    if ask.tools:
        return ToolShape(
            facts,
            spell,
            wanted.top_logprobs,
            wanted.include_usage,
            names=[tool["function"]["name"] for tool in ask.tools],
            parallel=ask.parallel_tool_calls,
        )
    return shape_class(facts, spell, wanted.top_logprobs, wanted.include_usage)


def _headers(generation: Generation) -> dict[str, str]:
    return {"x-lorad-rev": generation.rev or "base"}
