"""Inference: a request to the gateway becomes one to a member, and its bytes come back as they are.

Goes in: the route's method, path, headers and body.  Comes out: the member's answer.  The name in
the body is looked up in the catalog's table, and goes along as a revision.  Of whose answer nothing
was seen, a request goes to another member: once after a loss, and from each that takes no more or
sends it on.  A stream that breaks ends with an error event.
"""

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import quote

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from lorad.api import sse
from lorad.api.respond import envelope
from lorad.errors import LoradError
from lorad.fleet import table as tables
from lorad.fleet.catalog import Catalog
from lorad.fleet.daemon import MOVES_HEADER, REV_HEADER
from lorad.fleet.line import OF_CONNECTION
from lorad.fleet.local import nobody
from lorad.fleet.members import Answer, Ask, Head, Lost, Members
from lorad.fleet.presence import Presence
from lorad.fleet.table import Entry
from lorad.fleet.taking import lacks, refusal
from lorad.spelling import is_reference

#: A member says so when another one may take the request.
ELSEWHERE = ("engine_restarting", "engine_stalled", "loading_base", "draining")
#: A request that a member had at hand when it was lost may be why: it goes on this many times.  A
#: member that takes no more or sends it on has lost nothing; after a loss none may send it on.
MOST_MOVES = 1
#: A name that moves while it is asked for is looked up again, this many times.
MOST_LOOKS = 4
#: Of no content.
_NO_REVISION = "0" * 64
#: In a request's scope: the key that it came with is the gateway's, and no member's business.
KNOWN = "lorad_gateway_key"
UNKNOWN = "this gateway does not know yet what its members serve"
_BROKEN = LoradError(
    "engine_restarting", "the member that answered was lost; what it was to say is lost, too"
)


class _Named(Struct):
    """All that is looked at of a body."""

    model: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer whose head is here.  `rest` has its bytes, and is to be closed."""

    head: Head
    rest: AsyncGenerator[Head | bytes, None]


class Inference:
    """`bases`: the names of the models that members serve."""

    def __init__(
        self,
        members: Members,
        catalog: Catalog,
        presence: Presence,
        bases: Callable[[], Collection[str]],
        *,
        stall_seconds: float = 30.0,
        on_gone: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._members, self._catalog, self._presence = members, catalog, presence
        self._bases = bases
        self._stall, self._on_gone = stall_seconds, on_gone
        self.moved = 0  # requests that went to another member
        self.broken = 0  # streams whose member was lost

    async def forward(self, request: Request) -> Response:
        """Any route whose body may name a model."""
        ask = await ask_of(request)
        work = self.begin(ask, model_of(ask.body), vouched=KNOWN in request.scope)
        answer = await sse.unless_gone(request.receive, work)
        if isinstance(answer, Answer):
            return response_of(answer)
        headers = {k: v for k, v in answer.head.headers if k != "content-type"}
        return sse.EventStream(
            events(answer.rest, self._note_broken),
            headers=headers,
            stall_seconds=self._stall,
            on_gone=self._on_gone,
        )

    def find(self, model: str) -> Entry | None:
        """What a name means now; None: a base.  Raises model_not_found; registry_busy if this
        gateway cannot know."""
        if not model or model in self._bases():
            return None
        if not self._bases():
            members = self._members.seen()
            ready = any(member.state == "ready" for member in members)
            raise LoradError("engine_restarting", UNKNOWN if ready else nobody(members))
        self._presence.check()
        entry = tables.find(self._catalog.table, model)
        if entry is None:
            message = f"The model {model[:200]!r} does not exist"
            raise LoradError("model_not_found", message, param="model")
        return entry

    async def begin(self, ask: Ask, model: str, *, vouched: bool = False) -> Answer | Begun:
        """An answer, or a stream that has begun; a loss before that is made good once.  Who is not
        `vouched` for is told by a member that there is no such model, once that knows who it is."""
        left: list[str] = []
        looks = moves = 0
        stays = False  # it may be sent on no more
        while True:
            entry, headers = None, ask.headers
            if vouched or not self._is_unknown(model):
                entry = self.find(model)
            else:
                headers = (*headers, (REV_HEADER, _NO_REVISION))
            if not (moves or stays):
                headers = (*headers, (MOVES_HEADER, "1"))
            to = Ask(ask.method, ask.path, ask.query, headers, ask.body, model=id_of(entry))
            shut = entry is not None and entry.drained and ask.method != "GET"
            if shut and entry is not None:
                if vouched:
                    raise _closed(entry)
                to = Ask("GET", f"/v1/models/{quote(entry.name)}", "", headers, model=entry.id)
            try:
                answer = await self._once(to, entry, left)
            except Lost as lost:
                left.append(lost.member)
                if moves >= MOST_MOVES:
                    message = f"no member answered: {lost}"
                    raise LoradError("engine_restarting", message) from None
                moves += 1
                self.moved += 1
                continue
            if isinstance(answer, Begun):
                return answer
            if shut and entry is not None and answer.status == 200:
                raise _closed(entry)  # to whoever may know that it is there
            if entry is not None and looks < MOST_LOOKS and lacks(answer):
                looks += 1  # the name may have moved, and this gateway was the last to know
                await self._presence.renew(self._presence.now())
                if self.find(model) is not entry:
                    continue
            if (why := _elsewhere(answer)) and (moves < MOST_MOVES or why == "draining"):
                left.append(answer.head.member)
                if self._others(left):
                    moves += why != "draining"  # a member that takes no more has lost nothing
                    self.moved += 1
                    continue
                if why == "draining" and not stays and self._others(()):
                    # Sent on for one that is gone again, or was asked before and is another now.
                    left, stays = left[-1:] if self._others(left[-1:]) else [], True
                    continue
            return answer

    def _is_unknown(self, model: str) -> bool:
        """A name that could be one, and is none: it may be said so by a member.  With a digest it
        would look among revisions of its own."""
        bases = self._bases()
        if not (model and bases) or model in bases or "@" in model or is_reference(model):
            return False
        return self._presence.fresh and model not in self._catalog.table.entries

    async def _once(self, ask: Ask, entry: Entry | None, without: list[str]) -> Answer | Begun:
        parts = self._members.stream(ask, entry.rev if entry is not None else None, without=without)
        try:
            head = await anext(parts)
            assert isinstance(head, Head)
            if head.status == 200 and dict(head.headers).get("content-type", "").startswith(
                "text/event-stream"
            ):
                return Begun(head, parts)
            return Answer(head, (await _rest(parts)))
        except BaseException:
            await parts.aclose()
            raise

    def _note_broken(self) -> None:
        self.broken += 1

    def _others(self, left: Collection[str]) -> bool:
        return any(m.state == "ready" and m.name not in left for m in self._members.seen())


async def events(
    parts: AsyncGenerator[Head | bytes, None], on_broken: Callable[[], None] = lambda: None
) -> AsyncGenerator[bytes, None]:
    """A stream's events as they come, each as a whole; after a loss, an error is the last."""
    held = b""
    async with aclosing(parts):
        try:
            async for part in parts:
                assert isinstance(part, bytes)
                held += part
                end = held.rfind(b"\n\n") + 2
                if end > 1:
                    yield held[:end]
                    held = held[end:]
        except Lost:
            on_broken()
            held = sse.event(envelope(_BROKEN))
        if held:
            yield held


async def ask_of(request: Request) -> Ask:
    """What is passed on: all but what is of this connection, and what only a gateway may say."""
    body = await request.body()
    out = {REV_HEADER, MOVES_HEADER, "accept-encoding", "expect", *OF_CONNECTION}
    if KNOWN in request.scope:
        out.add("authorization")
    headers = [(name, value) for name, value in request.headers.items() if name not in out]
    headers.append(("x-request-id", request.scope["lorad_request_id"]))
    path: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return Ask(
        request.method,
        path.decode("latin-1"),
        request.scope["query_string"].decode("latin-1"),
        tuple(headers),
        body,
    )


def model_of(body: bytes) -> str:
    """Of a body that is none, "": a member says what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, RecursionError):
        return ""


def id_of(entry: Entry | None) -> str:
    return entry.id if entry is not None else ""


def response_of(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    kept = [(k.encode(), v.encode()) for k, v in answer.head.headers if k not in OF_CONNECTION]
    response.raw_headers = [*response.raw_headers, *kept]
    return response


def _closed(entry: Entry) -> LoradError:
    return LoradError("draining", f"{entry.name!r} takes no new requests for now")


def _elsewhere(answer: Answer) -> str:
    """Why another member may take it; "": none would say anything else."""
    code = refusal(answer).code if answer.status == 503 else ""
    return code if code in ELSEWHERE else ""


async def _rest(parts: AsyncGenerator[Head | bytes, None]) -> bytes:
    body = bytearray()
    async with aclosing(parts):
        async for part in parts:
            assert isinstance(part, bytes)
            body += part
    return bytes(body)
