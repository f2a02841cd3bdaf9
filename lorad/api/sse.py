"""Server-sent events: bytes of one event, and a response that sends them until somebody leaves.

Goes in: an async iterator of encoded events.  Comes out: the stream.  A client that leaves or stops
reading ends the iterator, whose own cleanup does the rest.  Knows nothing of what is sent.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
PING_SECONDS = 15.0

#: JSON may hold these raw, but some clients' line splitters take them for line ends.
_LINE_ENDS = {"\u2028": b"\\u2028", "\u2029": b"\\u2029", "\u0085": b"\\u0085"}
_RAW_LINE_ENDS = [(character.encode(), escaped) for character, escaped in _LINE_ENDS.items()]


_encode_text = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client left, or stopped reading; `reason` is the label of `http_aborted_total`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def event(value: object, *, name: str = "", event_id: str = "") -> bytes:
    """One event with `value` as JSON; never more than one `data:` line."""
    data = _on_one_line(msgspec.json.encode(value))
    head = (f"id: {event_id}\n" if event_id else "") + (f"event: {name}\n" if name else "")
    return head.encode() + b"data: " + data + b"\n\n"


def json_text(text: str) -> bytes:
    """A JSON string, fit for an event."""
    data = _encode_text(text)
    return data if text.isascii() else _on_one_line(data)


def _on_one_line(data: bytes) -> bytes:
    for raw, escaped in _RAW_LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


class EventStream(Response):
    """`stall_seconds`: how long one write may wait for a reader.

    `on_gone` hears why a client was lost; `on_close` is called at the end, whatever it is.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str] | None = None,
        stall_seconds: float = 30.0,
        on_gone: Callable[[str], None] = lambda reason: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", **(headers or {})})
        self._events = events
        self._stall = stall_seconds
        self._on_gone = on_gone
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone as gone:
            self._on_gone(gone.reason)
            if gone.reason == "slow_client" and "lorad_connection" in scope:
                scope["lorad_connection"].abort()  # its buffer will not empty by itself
        finally:
            self._on_close()
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for data in self._events:
            await self._send(send, data, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        await send_within(self._stall, send, message)


async def send_within(seconds: float, send: Send, message: Message) -> None:
    """Send it once the client has read enough of what came before; ClientGone past `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await send(message)
    except TimeoutError:
        raise ClientGone("slow_client") from None


async def with_pings(items: AsyncIterator[T], seconds: float) -> AsyncGenerator[T | None, None]:
    """The items as they come, and None after each `seconds` without one."""
    coming: asyncio.Future[T] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(items))
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if not done:
                yield None
                continue
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield item
    finally:
        if coming is not None:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await coming


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first (ClientGone).

    Only once the body has been read: it takes what else the connection receives.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("client_disconnect")
    finally:
        for task in (working, leaving):
            task.cancel()
        for task in (working, leaving):
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
