"""Can adapters be pulled: is the hub to be asked, and does it answer?

Goes in: settings.  Comes out: findings.  One request without a token, for the endpoint's own page.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from lorad.config import Settings
from lorad.doctor.finding import Finding, fail, ok, warn

PATIENCE = 5.0  # seconds


def hub(settings: Settings, *, ask: bool) -> Iterator[Finding]:
    """`ask` False sends nothing."""
    from lorad.sources.hub_access import endpoint_of, why_offline

    yield from _token(settings.hf.token_file)
    endpoint, offline = endpoint_of(settings), why_offline(settings)
    if offline:
        yield ok("hub", f"is not asked: {offline}")
    elif not ask:
        yield ok("hub", f"{endpoint}, not asked now")
    else:
        yield _answer(endpoint)


def _token(name: str) -> Iterator[Finding]:
    if not name:
        return
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        yield fail("hub token", f"{path}: {error.strerror}", "look at `[hf] token_file`")
        return
    if mode & (stat.S_IRGRP | stat.S_IROTH) and not os.environ.get("CREDENTIALS_DIRECTORY"):
        yield warn("hub token", f"others may read {path}", f"chmod 600 {path}")
    else:
        yield ok("hub token", str(path))


def _answer(endpoint: str) -> Finding:
    import httpx

    try:
        status = httpx.head(endpoint, timeout=PATIENCE, follow_redirects=True).status_code
    except httpx.HTTPError as error:
        fix = "look at proxies (HTTPS_PROXY) and `[hf] endpoint`, or set `[hf] offline = true`"
        return warn("hub", f"{endpoint} does not answer: {type(error).__name__}", fix)
    if status >= 500:
        return warn("hub", f"{endpoint} answers {status}", "try again later")
    return ok("hub", f"{endpoint} answers")
