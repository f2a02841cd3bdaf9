"""Line: HTTP to one daemon, over its sockets or TCP.

Goes in: an `Ask`.  Comes out: its answer, or Lost; `cut` ends everything that is under way, for a
machine that is gone says nothing.  Knows no route, and nobody but its one daemon.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from lorad.caller import address
from lorad.fleet.members import Answer, Ask, Head, Lost

CONNECT_SECONDS = 2.0
#: Idle connections that are kept to one face of a daemon.
KEPT = 64
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
        key = {"authorization": f"Bearer {site.admin_key}"} if site.admin_key else {}
        self._admin = _client(site.admin, key)
        self._inference = _client(site.inference, {})
        self._under_way: set[asyncio.Timeout] = set()

    async def close(self) -> None:
        await self._admin.aclose()
        await self._inference.aclose()

    def cut(self) -> None:
        """What is under way ends with Lost, at once."""
        now = asyncio.get_running_loop().time()
        for one in tuple(self._under_way):
            one.reschedule(now)

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
        """A Head, then bytes.  `seconds`: for all of it.  `body`: in place of the ask's."""
        loop = asyncio.get_running_loop()
        until = None if seconds is None else loop.time() + seconds
        client = self._admin if ask.face == "admin" else self._inference
        request = client.build_request(
            ask.method,
            httpx.URL(client.base_url).copy_with(raw_path=_target(ask)),
            headers=list(ask.headers),
            content=ask.body if body is None else body,
        )
        with self._told(began=False):
            async with self._alive(until):
                response = await client.send(request, stream=True)
        try:
            headers = tuple(
                (name.decode("latin-1").lower(), value.decode("latin-1"))
                for name, value in response.headers.raw
                if name.decode("latin-1").lower() not in OF_CONNECTION
            )
            yield Head(self.site.name, response.status_code, headers)
            pieces = response.aiter_raw()
            while True:
                with self._told(began=True):
                    async with self._alive(until):
                        piece = await anext(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            await response.aclose()

    def _alive(self, until: float | None) -> "_Alive":
        return _Alive(self._under_way, until)

    @contextmanager
    def _told(self, *, began: bool) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.DecodingError, httpx.StreamError) as error:
            why = "the connection broke" if began else "it cannot be reached"
            raise Lost(self.site.name, why, began=began) from error
        except TimeoutError as error:
            raise Lost(self.site.name, "it does not answer", began=began) from error


class _Alive:
    """Around one wait for the daemon: ends it with TimeoutError when it is cut, or at `until`."""

    def __init__(self, under_way: set[asyncio.Timeout], until: float | None) -> None:
        self._under_way, self._limit = under_way, asyncio.timeout_at(until)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._under_way.add(self._limit)

    async def __aexit__(self, *exc: Any) -> None:
        self._under_way.discard(self._limit)
        await self._limit.__aexit__(*exc)  # raises TimeoutError, and swallows nothing


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


def _target(ask: Ask) -> bytes:
    return (f"{ask.path}?{ask.query}" if ask.query else ask.path).encode("latin-1")


def _client(host: str, headers: dict[str, str]) -> httpx.AsyncClient:
    _, base_url, socket = address(host)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT)
    # A generation may be silent for minutes; who waits for it bounds that.
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    secure = base_url.startswith("https:")
    transport = httpx.AsyncHTTPTransport(uds=socket or None, verify=secure, limits=limits)
    return httpx.AsyncClient(
        base_url=base_url,
        transport=transport,
        timeout=timeout,
        trust_env=False,
        headers={"accept-encoding": "identity", "user-agent": "lorad-gateway", **headers},
    )
