"""The outermost middleware of both apps: identity, size, time, and one envelope for every failure.

Goes in: any ASGI call.  Comes out: a response with `x-request-id`, or none when the client has
left.  Bodies over the limit end in 413 (before they are read, where Content-Length admits it),
bodies that dawdle in 408, encoded ones in 415, oversized heads in 431, and on the admin socket
strangers in 403.  Knows no route's meaning; `streamed` says which bodies go to disk, piece by
piece: their handler bounds the bytes, and each piece has the time of a whole body.
"""

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorad.api.protocol import Peer
from lorad.api.respond import failure, log, new_request_id
from lorad.api.sse import ClientGone
from lorad.errors import LoradError
from lorad.metrics.http import CLIENT_GONE, UNMATCHED, HttpCounts

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: In a request's scope: how its errors are said, if not in our envelope.
FAILURE = "lorad_failure"
#: How long the rest of a body is read after its request was answered.
LINGER_SECONDS = 1.0
_JSON = re.compile(r"application/(json|[a-z0-9.+-]+\+json)\s*(;|$)", re.IGNORECASE)


@dataclass(slots=True)
class Bounds:
    """Bytes and seconds of one request; `uids` None lets every peer in, `open_paths` too.

    `admit` raises for who may not use any other path, and notes in the scope who may; `on_refused`
    hears of everything that ends in an error.  A reload changes the bounds, for requests that come.
    """

    body_bytes: int
    header_bytes: int
    receipt_seconds: float
    uids: frozenset[int] | None = None
    open_paths: frozenset[str] = frozenset()
    admit: Callable[[Scope, Headers], None] = field(default=lambda scope, headers: None)
    streamed: Callable[[Scope], bool] = field(default=lambda scope: False)
    on_refused: Callable[[Scope, Exception], None] = field(default=lambda scope, error: None)
    listener: str = "inference"


def admin_uids(allowed: tuple[int, ...]) -> frozenset[int]:
    """Who may use admin.sock: root, the daemon's own user, and whom the settings name."""
    return frozenset({0, os.getuid(), *allowed})


class Guard:
    """`on_gone` hears why a request ended without an answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        bounds: Bounds,
        counts: HttpCounts,
        on_gone: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._app, self._bounds, self._on_gone = app, bounds, on_gone
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = new_request_id()
        scope["lorad_request_id"] = request_id
        began, status = asyncio.get_running_loop().time(), 0
        body = _Body(receive, headers, self._bounds, streamed=self._bounds.streamed(scope))

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode())]
                if not body.whole:  # what is left of it must not be read as the next request
                    added.append((b"connection", b"close"))
                message = {**message, "headers": [*message["headers"], *added]}
            elif not (body.whole or message.get("more_body")):
                await send({**message, "more_body": True})
                await body.linger()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            self._admit(scope, headers)
            body.check_declared()
            await self._app(scope, body.receive, tagged)
        except ClientGone as gone:
            self._on_gone(gone.reason)
        except Exception as error:
            self._note_refusal(scope, error)
            if status:
                log.error("response %s broke off", request_id, exc_info=error)
                _cut(scope)
                return
            said = scope.get(FAILURE, failure)(error)
            await said(scope, receive, tagged)
        finally:
            seconds = asyncio.get_running_loop().time() - began
            route = scope.get("lorad_route", UNMATCHED)
            self._counts.note(route, scope["method"], status or CLIENT_GONE, seconds)

    def _note_refusal(self, scope: Scope, error: Exception) -> None:
        self._bounds.on_refused(scope, error)
        code = error.code if isinstance(error, LoradError) else ""
        if code in ("permission_denied", "invalid_api_key"):
            self._counts.denied[self._bounds.listener] += 1
        elif code == "request_timeout":
            self._on_gone("receipt_timeout")

    def _admit(self, scope: Scope, headers: Headers) -> None:
        uids, peer = self._bounds.uids, scope.get("lorad_peer")
        if scope["path"] not in self._bounds.open_paths:
            if uids is not None:
                _admit_peer(uids, peer)
            self._bounds.admit(scope, headers)
        if (
            "\n" in scope["path"]
        ):  # a route's pattern does not see one at the end: /x%0A would be /x
            raise LoradError("not_found", "there is no such route here")
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        size += len(scope["raw_path"]) + len(scope["query_string"])
        if size > self._bounds.header_bytes:
            message = f"a head of {size} bytes; limits.headers = {self._bounds.header_bytes}"
            raise LoradError("headers_too_large", message)
        if "transfer-encoding" in headers and "content-length" in headers:
            message = "content-length and transfer-encoding contradict each other"
            raise LoradError("invalid_value", message, param="content-length")
        if headers.get("content-encoding", "identity").lower() != "identity":
            message = f"content-encoding {headers['content-encoding'][:40]!r} is not accepted"
            raise LoradError("unsupported_media_type", message, hint="send the body as it is")
        if scope["method"] in ("POST", "PATCH") and not _is_json(headers):
            message = f"content-type {headers['content-type'][:60]!r} is not application/json"
            hint = "curl: add -H 'content-type: application/json'"
            raise LoradError("unsupported_media_type", message, hint=hint)


def _admit_peer(uids: frozenset[int], peer: Peer | None) -> None:
    if peer is None or peer.uid not in uids:
        who = f"uid {peer.uid}" if peer else "this client"
        message = f"{who} may not use the admin socket"
        raise LoradError("permission_denied", message, hint="admin.allow_uids in lorad.toml")


class _Body:
    """`receive` of one request, counted and timed until its body is whole."""

    def __init__(
        self, receive: Receive, headers: Headers, bounds: Bounds, *, streamed: bool
    ) -> None:
        self._receive = receive
        self._limit = None if streamed else bounds.body_bytes
        self._streamed = streamed
        self._seconds = bounds.receipt_seconds
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + self._seconds
        self._size = 0
        declared = headers.get("content-length", "0")
        self._declared = int(declared) if re.fullmatch("[0-9]{1,18}", declared) else 1 << 63
        self.whole = self._declared == 0 and "transfer-encoding" not in headers

    def check_declared(self) -> None:
        """Raise payload_too_large before a byte is read, if Content-Length admits it."""
        self._check(self._declared)

    async def receive(self) -> Message:
        if self.whole:
            return await self._receive()
        if self._streamed:
            self._deadline = self._now() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            text = f"the body did not arrive within {self._seconds:g} s"
            raise LoradError("request_timeout", text) from None
        if message["type"] == "http.disconnect":
            raise ClientGone("client_disconnect")
        self._size += len(message.get("body", b""))
        self._check(self._size)
        self.whole = not message.get("more_body", False)
        return message

    async def linger(self) -> None:
        """Throw away what still comes, for a moment.  A connection that is closed with bytes unread
        is reset, and then its client may lose the answer that says what was wrong."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.whole:
                    message = await self._receive()
                    self.whole = not message.get("more_body", False)  # or the client has left

    def _check(self, size: int) -> None:
        if self._limit is not None and size > self._limit:
            text = f"a body of {size} bytes; limits.body = {self._limit}"
            raise LoradError("payload_too_large", text)


def _is_json(headers: Headers) -> bool:
    """A body without a type is taken for JSON: there is no form on any route."""
    return "content-type" not in headers or _JSON.match(headers["content-type"]) is not None


def _cut(scope: Scope) -> None:
    """Half an answer must not look like a whole one."""
    if (connection := scope.get("lorad_connection")) is not None:
        connection.abort()
