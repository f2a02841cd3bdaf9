"""Shell completion of adapter names, live from the daemon.

Answers within 200 ms of asking or not at all: a daemon that is down or slow must not hang a shell,
nor print into it.
"""

import os
import threading
from contextlib import suppress

import typer

from lorad import wire

PATIENCE = 0.2  # seconds


def any_name(context: typer.Context, incomplete: str) -> list[str]:
    """Registered names."""
    return [a.name for a in _adapters(context, incomplete)]


def resident_name(context: typer.Context, incomplete: str) -> list[str]:
    """What `evict` can take."""
    return [a.name for a in _adapters(context, incomplete) if a.slot is not None]


def cold_name(context: typer.Context, incomplete: str) -> list[str]:
    """What `load` can take."""
    return [a.name for a in _adapters(context, incomplete) if a.slot is None]


def _adapters(context: typer.Context, incomplete: str) -> list[wire.Adapter]:
    """A thread asks, so that not even a daemon that sends a byte now and then keeps us."""
    from lorad.cli.reach import checked_host, default_host
    from lorad.client import LoradClient

    given = context.find_root().params.get("host") or os.environ.get("LORAD_HOST")
    found: list[wire.Adapter] = []

    def ask() -> None:
        with suppress(Exception):
            page = client.adapters(q=incomplete or None, limit=200)
            found.extend(a for a in page.items if a.name.startswith(incomplete))

    with suppress(ValueError):
        client = LoradClient(checked_host(given or default_host(os.environ)), timeout=PATIENCE)
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(PATIENCE)
    return list(found)
