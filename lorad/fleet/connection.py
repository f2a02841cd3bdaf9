"""Connection: one HTTP/1.1 connection of a gateway to a daemon, one exchange after another.

Goes in: a request's head and body.  Comes out: the answer's head, then all of its body that has
come since the last read, however many pieces that was sent in: when the gateway is behind it passes
on fewer and larger ones, as a daemon does.  Knows what daemons send, and no more of HTTP.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

#: An answer that is not read holds no more; its daemon waits then, and gives its client up.
HELD_BYTES = 256 << 10
HEAD_BYTES = 64 << 10


class Broken(Exception):
    """It ended before the answer did; says why in a few words."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer's head; names are lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]


class Connection(asyncio.Protocol):
    """Of one exchange at a time: `send`, `head`, then `read` until b""."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._raw = bytearray()  # as it came
        self._body = bytearray()  # of the answer, without its chunks
        self._reply: Reply | None = None
        self._left: int | None = 0  # bytes of the chunk or the body; None: until it ends
        self._chunked = self._over = self._to_end = False
        self._held = False  # nothing is read from the socket
        self._why = ""  # it is broken
        self._waiter: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._bare = False
        self.answered = False  # a byte came, of this exchange

    # ------------------------------------------------------------- one exchange
    async def send(self, head: bytes, body: bytes | AsyncIterator[bytes], *, bare: bool) -> None:
        """`bare`: the answer has a head alone.  Raises Broken."""
        self._check()
        self._reply, self._over, self.answered, self._bare = None, False, False, bare
        transport = cast(asyncio.Transport, self._transport)
        if isinstance(body, bytes):
            transport.write(head + body)
            return
        transport.write(head)
        async for piece in body:
            transport.write(piece)
            await self._writable.wait()
            if self._why or self._reply is not None:  # it has heard enough
                return

    async def head(self) -> Reply:
        """Raises Broken."""
        while self._reply is None:
            await self._more()
        return self._reply

    async def read(self) -> bytes:
        """What has come since; b"": that was all.  Raises Broken."""
        while not self._body and not self._over:
            await self._more()
        taken = bytes(self._body)
        self._body.clear()
        self._hold()
        return taken

    @property
    def reusable(self) -> bool:
        """May it have another exchange?"""
        return self._over and not (self._why or self._raw or self._body or self._to_end)

    def cut(self, why: str) -> None:
        """It is broken from here on."""
        self._break(why)
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------- the protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._left is None and self._reply is not None and exc is None and not self._why:
            self._over = True
        self._break("the connection broke")

    def data_received(self, data: bytes) -> None:
        self.answered = True
        self._raw += data
        try:
            if self._reply is None:
                self._take_head()
            if self._reply is not None and not self._over:
                self._take_body()
        except ValueError:
            self.cut("what answers there is no lorad")
        self._hold()
        self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # ------------------------------------------------------------- parsing
    def _take_head(self) -> None:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > HEAD_BYTES:
                raise ValueError("a head without an end")
            return
        first, *lines = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        version, status, *_ = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(first)
        pairs = (line.partition(":") for line in lines)
        headers = tuple((name.lower(), value.strip()) for name, _, value in pairs)
        if int(status) < 200:  # it goes on
            return self._take_head()
        told = dict(headers)
        self._chunked = told.get("transfer-encoding", "").lower() == "chunked"
        self._to_end = told.get("connection", "").lower() == "close"
        length = told.get("content-length")
        self._left = 0 if self._chunked else None if length is None else int(length)
        if self._bare or int(status) in (204, 304):
            self._chunked, self._left = False, 0
        self._to_end |= self._left is None
        self._over = not self._chunked and self._left == 0
        self._reply = Reply(int(status), headers)

    def _take_body(self) -> None:
        if self._chunked:
            return self._take_chunks()
        size = len(self._raw) if self._left is None else min(self._left, len(self._raw))
        self._body += self._raw[:size]
        del self._raw[:size]
        if self._left is not None:
            self._left -= size
            self._over = not self._left

    def _take_chunks(self) -> None:
        """Every chunk that is whole, and what there is of the next; `_left` counts its line's end,
        too."""
        raw, at = self._raw, 0
        while True:
            if not self._left:
                end = raw.find(b"\r\n", at)
                if end < 0:
                    break
                size = int(raw[at:end].partition(b";")[0], 16)
                if size == 0:  # then trailers, which no daemon has, and an empty line
                    if raw[end + 2 : end + 4] == b"\r\n":
                        at, self._over = end + 4, True
                    elif len(raw) >= end + 4:
                        raise ValueError("trailers")
                    break
                at, self._left = end + 2, size + 2
            there = min(self._left, len(raw) - at)
            data = max(0, min(there, self._left - 2))
            self._body += raw[at : at + data]
            at, self._left = at + there, self._left - there
            if self._left:
                break
        del raw[:at]

    # ------------------------------------------------------------- inside
    async def _more(self) -> None:
        """Until something has come.  Raises Broken."""
        self._check()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _check(self) -> None:
        if self._why:
            raise Broken(self._why)

    def _break(self, why: str) -> None:
        self._why = self._why or why
        self._writable.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _hold(self) -> None:
        """Let the daemon wait while too much of it is unread."""
        full = len(self._body) > HELD_BYTES
        if full != self._held and self._transport is not None and not self._why:
            self._held = full
            (self._transport.pause_reading if full else self._transport.resume_reading)()
