"""Files over HTTP that go on where they were cut.

Goes in: a URL, headers, and an open file that holds nothing or the first part.  Comes out: the
whole file; Refused if the server answers with something else, FetchError if it does not answer, or
says too much.  Redirects are followed by hand: a few, never from https to http, and what authorizes
for one host is not sent to another.  Knows nothing of adapters; checksums are the caller's.
"""

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import BinaryIO

import httpx

from lorad import __version__
from lorad.config import Settings
from lorad.sources import disk
from lorad.sources.addresses import following, need_allowed, origin
from lorad.sources.errors import FetchError
from lorad.sources.patience import Again, Meter, Patience, patiently, retry_after
from lorad.sources.reference import shown_url
from lorad.sources.wanted import too_big

MAX_REDIRECTS = 5
USER_AGENT = f"lorad/{__version__}"

#: Statuses after which the same request may succeed.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
_RESET = re.compile(r"\bt=(\d+)")


class Refused(Exception):
    """The server answers, and not with the file.  `url` is safe to show."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code}")
        self.status = response.status_code
        self.headers = response.headers
        self.url = shown_url(str(response.url))


class Transfer:
    """One client.  Use as a context manager."""

    def __init__(self, settings: Settings, *, patience: Patience | None = None) -> None:
        self._plain = settings.pull.plain_http
        self._patience = patience or Patience()
        self._client = httpx.Client(
            verify=_trust(),
            timeout=settings.pull.timeout,
            # Compressed on the way, a file has no size and cannot be gone on with.
            headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
        )

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def head(
        self, url: str, meter: Meter, patience: Patience, *, method: str = "HEAD"
    ) -> httpx.Response:
        """Status and headers of a file; the body is not read.  Raises Refused, FetchError."""

        def attempt() -> httpx.Response:
            with self._opened(method, url, {}) as response:
                _need_file(response)
                return response

        return patiently(attempt, meter, patience)

    def get(
        self,
        url: str,
        out: BinaryIO,
        meter: Meter,
        *,
        limit: int,
        size: int | None = None,
        etag: str = "",
        resume: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """All of `url` into `out`, from its end on if `resume`: the caller knows that what is there
        belongs to it, by `etag` or by a checksum.  `limit`: bytes; `size`: those that it must have.
        Raises Refused, FetchError, Cancelled; `out` keeps what had arrived."""

        def attempt() -> None:
            have = self._start(out, size, resume)
            if have and have == size:
                meter.at(have)
                return
            asked = dict(headers or {})
            if have:
                asked["Range"] = f"bytes={have}-"
                if etag:
                    asked["If-Range"] = etag
            with self._opened("GET", url, asked) as response:
                _receive(response, out, have, meter, limit, size, etag)

        patiently(attempt, meter, self._patience)

    def _start(self, out: BinaryIO, size: int | None, resume: bool) -> int:
        """Bytes that are there and count."""
        have = out.seek(0, 2)
        if have and (not resume or (size is not None and have > size)):
            out.truncate(0)
            return out.seek(0)
        return have

    @contextmanager
    def _opened(
        self, method: str, url: str, headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        """The answer at the end of the redirects; raises Again where there is none."""
        target = httpx.URL(url)
        sent = dict(headers)
        for _ in range(MAX_REDIRECTS + 1):
            need_allowed(target, self._plain)
            with _network(target), self._client.stream(method, target, headers=sent) as response:
                if not response.has_redirect_location:
                    yield response
                    return
                before, target = target, following(response, target)
            if origin(target) != origin(before):
                sent = {k: v for k, v in sent.items() if k.lower() != "authorization"}
        raise FetchError(
            "source_unreachable",
            f"{shown_url(url)} leads from one place to the next without end",
            hint="ask for the address that the file is really at",
        )


@lru_cache(maxsize=1)
def _trust() -> ssl.SSLContext:
    """Reading the certificates takes longer (40 ms) than all else about a client."""
    return httpx.create_ssl_context()


@contextmanager
def _network(url: httpx.URL) -> Iterator[None]:
    """What the network does, as Again: it may pass."""
    try:
        yield
    except httpx.TransportError as error:
        raise Again(unreachable(shown_url(str(url)), _why(error))) from None
    except httpx.HTTPError as error:
        raise Again(unreachable(shown_url(str(url)), type(error).__name__)) from None


def unreachable(where: str, why: str) -> FetchError:
    return FetchError(
        "source_unreachable",
        f"{where} cannot be reached: {why}",
        hint="look at network, proxy and address; what arrived is kept, so pull again",
    )


def busy(where: str, after: float) -> FetchError:
    asked = f"in {after:.0f} s" if after else "later"
    return FetchError(
        "source_busy",
        f"{where} has too many requests and asks to come back {asked}",
        hint=f"pull again {asked}; what arrived is kept",
        retry_after=after or None,
    )


def _why(error: httpx.TransportError) -> str:
    """One line; httpx's text holds no URL, but may be empty."""
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time (`[pull] timeout`)"
    return " ".join(str(error).split())[:200] or type(error).__name__


def waits_for(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks for: Retry-After, or the hub's `RateLimit: ...;t=55`."""
    after = retry_after(headers.get("Retry-After"))
    if not after and (reset := _RESET.search(headers.get("RateLimit", ""))):
        after = min(float(reset[1]), 86400.0)
    return after


def passing(status: int, headers: Mapping[str, str], where: str) -> Again | None:
    """Again, for a status that may pass."""
    if status not in _PASSING:
        return None
    after = waits_for(headers)
    if status == 429:
        return Again(busy(where, after), after)
    return Again(unreachable(where, f"it answers {status}"), after)


def _need_file(response: httpx.Response) -> None:
    again = passing(response.status_code, response.headers, shown_url(str(response.url)))
    if again:
        raise again
    if response.status_code not in (200, 206):
        raise Refused(response)


def _receive(
    response: httpx.Response,
    out: BinaryIO,
    have: int,
    meter: Meter,
    limit: int,
    size: int | None,
    etag: str,
) -> None:
    """The body, behind what is there or in its place."""
    where = shown_url(str(response.url))
    if response.status_code == 416 or (
        response.status_code == 206 and _first_byte(response) != have
    ):
        out.truncate(0)  # it counts otherwise than we do: from the start, then
        raise Again(unreachable(where, "it does not send the rest of a file"))
    _need_file(response)
    if etag and response.headers.get("ETag", etag) != etag:
        raise FetchError(
            "conflict", f"{where} changed while it was being fetched", hint="pull it again"
        )
    if response.status_code == 200:
        have = 0
        out.truncate(0)
    length = response.headers.get("Content-Length", "")
    told = have + int(length) if length.isdecimal() and len(length) < 20 else None
    if told is not None and told > limit:
        raise too_big(f"{where} has {told} bytes", limit)
    if size is not None and told is not None and told != size:
        raise _other_size(where, told, size)
    out.seek(have)
    for chunk in response.iter_raw():
        have += len(chunk)
        if have > limit:
            raise too_big(f"{where} has more bytes than it said", limit)
        disk.write(out, chunk)
        meter.at(have)
    if size is not None and have != size:
        raise Again(_other_size(where, have, size))
    if told is not None and have != told:
        raise Again(_other_size(where, have, told))


def _first_byte(response: httpx.Response) -> int:
    match = _RANGE.match(response.headers.get("Content-Range", ""))
    return int(match[1]) if match and len(match[1]) < 20 else -1


def _other_size(where: str, found: int, wanted: int) -> FetchError:
    return FetchError(
        "source_corrupt",
        f"{where} sends {found} bytes, where {wanted} were told",
        hint="pull it again; if it stays so, the source is at fault",
    )
