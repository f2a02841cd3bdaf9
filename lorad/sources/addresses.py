"""Which addresses are asked, and where a redirect may lead.

Goes in: URLs.  Comes out: FetchError for plain http to another machine, for schemes that are no
http, and for a step from https to http.  Asks nobody.
"""

import ipaddress

import httpx

from lorad.sources.errors import FetchError
from lorad.sources.reference import shown_url


def need_allowed(url: httpx.URL, plain: bool) -> None:
    """Refuse plain http to another machine, and whatever is no http at all."""
    if url.scheme == "https" or (url.scheme == "http" and (plain or is_loopback(url.host))):
        return
    if url.scheme != "http":
        raise FetchError(
            "source_unreachable",
            f"{shown_url(str(url))} is not an http(s) address",
            hint="ask for the address that the file is really at",
        )
    raise FetchError(
        "bad_reference",
        f"{shown_url(str(url))} would come over plain http, where anybody can change it",
        hint="use https, or set `[pull] plain_http` for a network that you trust",
    )


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its text; no name is looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def following(response: httpx.Response, url: httpx.URL) -> httpx.URL:
    """Where a redirect from `url` leads; user and password go along to the same host alone."""
    try:
        target = url.join(response.headers["Location"])
    except (httpx.InvalidURL, ValueError):
        raise FetchError(
            "source_unreachable",
            f"{shown_url(str(url))} leads to an address that cannot be read",
            hint="ask for the address that the file is really at",
        ) from None
    if url.scheme == "https" and target.scheme != "https":
        raise FetchError(
            "source_unreachable",
            f"{shown_url(str(url))} leads from https to {target.scheme}, which is not followed",
            hint="ask whoever runs the server to redirect to https",
        )
    if origin(target) == origin(url) and not target.userinfo:
        return target.copy_with(userinfo=url.userinfo)
    return target


def origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
