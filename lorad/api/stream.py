"""A streamed answer: the pieces of a Generation, as events, straight to the connection.

Goes in: a Generation, and an encoder of its pieces.  Comes out: a response that writes once for all
that a turn of the event loop has brought: one write a step while everybody keeps up, fewer and
larger ones when the client or the daemon is behind.  No task is woken and no timer is set for a
token.  A client that leaves, or reads nothing for `stall_seconds`, closes the Generation.  Knows no
JSON and nothing of OpenAI.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorad.api.protocol import BodyWriter, GuardedProtocol
from lorad.api.sse import PING, ClientGone, send_within, unless_gone
from lorad.service.ask import Piece
from lorad.service.generation import Generation

#: Pieces of one write.  Log probabilities wait piece by piece, each of some kB: a client that was
#: away and reads again must not have to read megabytes before that is seen.  And one that reads at
#: once must not hold up others: the probabilities of a prompt of 8,000 tokens took half a second.
AT_ONCE = 64


class Encoder(Protocol):
    """Bytes of events; `end` is called once, after the last pieces."""

    def pieces(self, pieces: Sequence[Piece]) -> bytes: ...
    def end(self, error: Exception | None) -> bytes: ...


class TokenStream(Response):
    """Await `begun` before it is sent: until then a failure has an HTTP status.

    `on_gone` hears why a client was lost.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        encoder: Encoder,
        *,
        headers: Mapping[str, str],
        ping_seconds: float,
        stall_seconds: float,
        on_gone: Callable[[str], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", **headers})
        self._generation, self._encoder = generation, encoder
        self._ping_seconds, self._stall_seconds = ping_seconds, stall_seconds
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._due = False  # a flush is, in this turn of the loop
        self._wrote = self._loop.time()
        self._unsent = deque[Piece]()  # pulled, while the client had yet to read
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    async def begun(self, request: Request) -> None:
        """Returns with the first news, or after a while without.  Raises what failed before."""
        news = asyncio.Event()
        self._generation.listen(news.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._ping_seconds):
                await unless_gone(request.receive, news.wait())
        if self._generation.error is not None:
            raise self._generation.error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: GuardedProtocol = scope["lorad_connection"]
        try:
            await unless_gone(receive, self._send_all(connection, send))
        except ClientGone as gone:
            self._on_gone(gone.reason)
            if gone.reason == "slow_client":
                connection.abort()  # its buffer will not empty by itself
        finally:
            self._generation.close()

    async def _send_all(self, connection: GuardedProtocol, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._out: BodyWriter = connection.body_writer(self._on_writable)
        try:
            self._on_quiet()
            self._generation.listen(self._schedule)
            await self._ended
        finally:
            self._out.close()
            for timer in self._timers.values():
                timer.cancel()
        end = {"type": "http.response.body", "body": b"", "more_body": False}
        await send_within(self._stall_seconds, send, end)

    # ----------------------------------------------------------------- news
    def _schedule(self) -> None:
        """What else this turn of the loop brings comes into the same write."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what is new, and at the end the end; the rest once the client has read more, and
        others have had their turn."""
        self._due = False
        if self._ended.done():
            return
        try:
            if not self._out.blocked and self._write_some():
                self._schedule()
        except Exception as error:
            self._ended.set_exception(error)

    def _write_some(self) -> bool:
        """One write; True if there is more to say."""
        self._unsent.extend(self._generation.pull())
        now = [self._unsent.popleft() for _ in range(min(AT_ONCE, len(self._unsent)))]
        data = self._encoder.pieces(now)
        if over := self._generation.over and not self._unsent:
            data += self._encoder.end(self._generation.error)
        if data:
            self._write(data)
        if over:
            self._ended.set_result(None)
        return not over and bool(self._unsent)

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._wrote = self._loop.time()
        if self._out.blocked:
            self._after(self._stall_seconds, self._on_stall)

    # ----------------------------------------------------------------- time
    def _on_quiet(self) -> None:
        """A comment after each `ping_seconds` without an event."""
        left = self._wrote + self._ping_seconds - self._loop.time()
        if left <= 0:
            left = self._ping_seconds
            if not self._out.blocked:
                self._write(PING)
        self._after(left, self._on_quiet)

    def _on_writable(self) -> None:
        """The client has read most of what it was sent."""
        if (timer := self._timers.pop(self._on_stall, None)) is not None:
            timer.cancel()
        self._schedule()

    def _on_stall(self) -> None:
        if not self._ended.done():
            self._ended.set_exception(ClientGone("slow_client"))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._timers[act] = self._loop.call_later(seconds, act)
