"""Line: HTTP to one daemon, over its sockets or TCP.

Goes in: an `Ask`.  Comes out: its answer, or Lost; `cut` ends everything that is under way, for a
machine that is gone says nothing.  Knows no route, and nobody but its one daemon.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import urlsplit

from lorad.caller import address
from lorad.fleet.connection import Broken, Connection
from lorad.fleet.members import Answer, Ask, Head, Lost

CONNECT_SECONDS = 2.0
#: Idle connections that are kept to one face of a daemon, and how long: less than daemons do.
KEPT, KEPT_SECONDS = 64, 5.0
_SILENT = "it does not answer"
#: Headers of one connection, and those that the gateway's own server sets.
OF_CONNECTION = {
    *("connection", "content-length", "date", "host", "keep-alive", "proxy-authenticate"),
    *("proxy-authorization", "proxy-connection", "server", "te", "trailer"),
    *("transfer-encoding", "upgrade", "x-request-id"),
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where a daemon is: two sockets (`unix:///path`, a path) or URLs.  `admin_key`: of its
    `tcp.admin_keys_file`, where the admin face is a URL."""

    name: str
    inference: str
    admin: str
    admin_key: str = ""


class Line:
    """To one daemon."""

    def __init__(self, site: Site) -> None:
        self.site = site
        key = f"authorization: Bearer {site.admin_key}\r\n" if site.admin_key else ""
        self._faces = {"admin": _Face(site.admin, key), "inference": _Face(site.inference)}
        self._under_way: set[Connection] = set()

    async def close(self) -> None:
        for face in self._faces.values():
            face.close()
        self.cut()

    def cut(self) -> None:
        """What is under way ends with Lost, at once."""
        for one in tuple(self._under_way):
            one.cut(_SILENT)

    async def ask(
        self, ask: Ask, seconds: float | None, body: AsyncIterator[bytes] | None = None
    ) -> Answer:
        """A whole answer; see `stream`."""
        return await whole(self.stream(ask, seconds, body))

    async def stream(
        self,
        ask: Ask,
        seconds: float | None = None,
        body: AsyncIterator[bytes] | None = None,
    ) -> AsyncGenerator[Head | bytes, None]:
        """A Head, then bytes.  `seconds`: for all of it.  `body`: in place of the ask's, of the
        content-length that is among the headers."""
        loop, face = asyncio.get_running_loop(), self._faces[ask.face]
        until = None if seconds is None else loop.time() + seconds
        head, began, reused = face.head_of(ask), False, body is None
        while True:
            connection = await self._connected(face, until, reuse=reused)
            self._under_way.add(connection)
            late = None if until is None else loop.call_at(until, connection.cut, _SILENT)
            try:
                content = ask.body if body is None else body
                await connection.send(head, content, bare=ask.method == "HEAD")
                reply = await connection.head()
                began = True
                headers = tuple(pair for pair in reply.headers if pair[0] not in OF_CONNECTION)
                yield Head(self.site.name, reply.status, headers)
                while piece := await connection.read():
                    yield piece
                face.keep(connection)
                return
            except Broken as broken:
                if began or not reused or connection.answered or str(broken) == _SILENT:
                    raise Lost(self.site.name, str(broken), began=began) from broken
                reused = False  # its daemon had closed it, or was about to
            finally:
                self._under_way.discard(connection)
                if late is not None:
                    late.cancel()
                if not face.keeps(connection):
                    connection.cut("nobody reads it")

    async def _connected(self, face: "_Face", until: float | None, *, reuse: bool) -> Connection:
        if reuse and (kept := face.take()) is not None:
            return kept
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(now + CONNECT_SECONDS, until or float("inf"))):
                return await face.connect()
        except (OSError, TimeoutError) as error:
            raise Lost(self.site.name, "it cannot be reached") from error


class _Face:
    """One face of a daemon: where it is, and connections to it that nobody uses now."""

    def __init__(self, host: str, key: str = "") -> None:
        _, url, self._socket = address(host)
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._fixed = f"host: {parts.netloc}\r\nuser-agent: lorad-gateway\r\n{key}"
        self._idle: dict[Connection, float] = {}  # since when
        self._context: ssl.SSLContext | None = None

    def head_of(self, ask: Ask) -> bytes:
        """Raises ValueError for what would be read as more than one header."""
        target = f"{self._prefix}{ask.path}" + (f"?{ask.query}" if ask.query else "")
        told = any(name == "content-length" for name, _ in ask.headers)
        lines = [f"{ask.method} {target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in ask.headers]
        if not told and (ask.body or ask.method not in ("GET", "HEAD")):
            lines.append(f"content-length: {len(ask.body)}")
        text = "\r\n".join(lines)
        if text.count("\r") != len(lines) - 1 or text.count("\n") != len(lines) - 1:
            raise ValueError("a line end within a header")
        return f"{text}\r\n{self._fixed}\r\n".encode("latin-1")

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._socket:
            _, made = await loop.create_unix_connection(Connection, self._socket)
            return made
        if self._secure and self._context is None:
            self._context = ssl.create_default_context()
        _, made = await loop.create_connection(
            Connection, self._host, self._port, ssl=self._context
        )
        return made

    def take(self) -> Connection | None:
        """One that may have another exchange; the one that was used last is the likeliest."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, since = self._idle.popitem()
            if connection.reusable and now - since < KEPT_SECONDS:
                return connection
            connection.cut("nobody uses it")
        return None

    def keep(self, connection: Connection) -> None:
        if connection.reusable and len(self._idle) < KEPT:
            self._idle[connection] = asyncio.get_running_loop().time()

    def keeps(self, connection: Connection) -> bool:
        return connection in self._idle

    def close(self) -> None:
        for connection in self._idle:
            connection.cut("nobody uses it")
        self._idle.clear()


async def whole(parts: AsyncGenerator[Head | bytes, None]) -> Answer:
    """A stream's parts as one answer."""
    async with aclosing(parts):
        head = await anext(parts)
        assert isinstance(head, Head)
        body = bytearray()
        async for part in parts:
            assert isinstance(part, bytes)
            body += part
    return Answer(head, bytes(body))
