"""One HTTP connection: uvicorn's h11 protocol, bounded in time and size, with the peer's identity.

Goes in: bytes of a connection.  Comes out: ASGI calls whose scope holds `lorad_peer` (who, from
SO_PEERCRED) and `lorad_connection` (to cut it off).  A head that is not whole within
`receipt_seconds` ends in 408, a malformed or oversized one in 400 or 431, all in our envelope.
A full house sheds the connection that is idle longest, and refuses only when all are at work; so
does what one user may hold, which is not the whole house.
"""

import asyncio
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from lorad.api.respond import envelope, error_headers, new_request_id
from lorad.errors import LoradError

_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel saw it at connect."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds for a whole request head, and how many connections one listener holds."""

    receipt_seconds: float
    connections: int
    #: Hears of every connection that was refused before it was a request.
    on_refused: Callable[[LoradError], None] = lambda error: None

    @property
    def of_one_user(self) -> int:
        """Who fills the house with work leaves the last eighth to others."""
        return self.connections - self.connections // 8


def peer_of(connection: socket.socket | None) -> Peer | None:
    """None for what is not a Unix socket."""
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(raw))


class BodyWriter:
    """Bytes of a body whose head has been sent, past h11.

    A chunk is a line in front of the bytes and one behind them, and changes nothing in h11's state.
    Through middleware, uvicorn and h11 it took 17 of a token's 41 µs, 5 of them in the write.  The
    body's end goes the usual way.
    """

    def __init__(self, connection: "GuardedProtocol", *, chunked: bool) -> None:
        self._connection, self._chunked = connection, chunked
        self._transport = connection.transport

    @property
    def blocked(self) -> bool:
        """The client has not read what it was sent; `on_writable` is called when it has."""
        return self._connection.flow.write_paused

    def write(self, data: bytes) -> None:
        """Send or buffer it, as one chunk.  Bytes for a client that has left go nowhere."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def close(self) -> None:
        self._connection.on_writable = _nothing


def _nothing() -> None:
    pass


class GuardedProtocol(H11Protocol):
    """Built by `server.HttpServer`, which gives `limits`."""

    limits: ConnectionLimits

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.peer: Peer | None = None
        self.quiet_since = self.loop.time()
        self._inner = self.app
        self.app = self._with_peer
        self._deadline: asyncio.TimerHandle | None = None
        self.on_writable: Callable[[], None] = _nothing

    # ----------------------------------------------------------------- asyncio's side
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = peer_of(transport.get_extra_info("socket"))
        if why := self._no_room():
            self.refuse(LoradError("queue_full", why, hint="limits.connections"))
            return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._deadline is None and self.conn.their_state is h11.IDLE:
            self._expect_head()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._have_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        super().connection_lost(exc)
        # Where it ended with an error uvicorn leaves the timer, which held all of this for as long.
        self._unset_keepalive_if_required()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.on_writable()

    def on_response_complete(self) -> None:
        self.quiet_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this from its handler of h11's error, which knows the status."""
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self.refuse(LoradError("headers_too_large", "the request's head is too large"))
        else:
            self.refuse(LoradError("invalid_value", "this is not a valid HTTP/1.1 request"))

    # ----------------------------------------------------------------- for others
    @property
    def at_work(self) -> bool:
        """Is a request being answered?"""
        return self.cycle is not None and not self.cycle.response_complete

    def abort(self) -> None:
        """Cut it off, whatever is still unsent."""
        self._disown()
        self.transport.abort()

    def body_writer(self, on_writable: Callable[[], None]) -> BodyWriter:
        """For the response whose head was just sent without a length; `close` it before the end."""
        self.on_writable = on_writable
        # As h11 has framed it: HTTP/1.0 knows no chunks, its body ends with the connection.
        return BodyWriter(self, chunked=(self.conn.their_http_version or b"") >= b"1.1")

    def refuse(self, error: LoradError) -> None:
        """Answer `error` unless an answer has begun, and hang up."""
        self._disown()
        self.limits.on_refused(error)
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            self._answer(error)
            self.transport.close()
        else:
            self.transport.abort()

    # ----------------------------------------------------------------- details
    def _disown(self) -> None:
        """Tell the app that nobody listens; uvicorn then does not call its silence an error."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _answer(self, error: LoradError) -> None:
        body = msgspec.json.encode(envelope(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": new_request_id(),
            **error_headers(error),
        }
        response = h11.Response(
            status_code=error.status,
            headers=[(name.encode(), value.encode()) for name, value in headers.items()],
            reason=STATUS_PHRASES[error.status],
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self.limits.receipt_seconds, self._too_slow)

    def _have_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        seconds = self.limits.receipt_seconds
        if self.conn.trailing_data[0]:
            message = f"the request's head did not arrive within {seconds:g} s"
            self.refuse(LoradError("request_timeout", message))
        else:  # nothing was asked, so nothing is answered
            self.transport.close()

    def _no_room(self) -> str:
        """Why it cannot stay although idle ones make way; "" if it can."""
        every = cast("set[GuardedProtocol]", self.connections)
        limits, uid = self.limits, self._uid
        if len(every) > limits.connections and not self._shed_one(every):
            return f"all {limits.connections} connections are at work"
        if uid is None or len(every) <= limits.of_one_user:
            return ""
        own = {other for other in every if other._uid == uid}
        if len(own) <= limits.of_one_user or self._shed_one(own):
            return ""
        return f"user {uid} has {limits.of_one_user} connections at work; the last are for others"

    def _shed_one(self, among: "set[GuardedProtocol]") -> bool:
        """Close an idle connection, of the user who holds the most; False if none is idle."""
        held = Counter(other._uid for other in among)
        idle = [other for other in among if other is not self and not other.at_work]
        if not idle:
            return False
        victim = min(idle, key=lambda other: (-held[other._uid], other.quiet_since))
        self.connections.discard(victim)
        victim.abort()
        return True

    @property
    def _uid(self) -> int | None:
        """Whose it is; None over TCP, where nobody can tell."""
        return None if self.peer is None else self.peer.uid

    async def _with_peer(self, scope: Any, receive: Any, send: Any) -> None:
        scope["lorad_peer"] = self.peer
        scope["lorad_connection"] = self
        try:
            await self._inner(scope, receive, send)
        except asyncio.CancelledError:  # cut off by `HttpServer.stop`: uvicorn would log it
            if self.cycle is None or not self.cycle.disconnected:
                raise
