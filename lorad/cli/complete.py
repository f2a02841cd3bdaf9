"""Shell completion of adapter names, live from the daemon.

Answers within 200 ms or not at all: a daemon that is down or slow must not hang a shell, nor print
into it.
"""

import os
from contextlib import suppress

from lorad import wire

PATIENCE = 0.2  # seconds


def any_name(incomplete: str) -> list[str]:
    """Registered names."""
    return [a.name for a in _adapters(incomplete)]


def resident_name(incomplete: str) -> list[str]:
    """What `evict` can take."""
    return [a.name for a in _adapters(incomplete) if a.slot is not None]


def cold_name(incomplete: str) -> list[str]:
    """What `load` can take."""
    return [a.name for a in _adapters(incomplete) if a.slot is None]


def _adapters(incomplete: str) -> list[wire.Adapter]:
    from lorad.cli.reach import default_host
    from lorad.client import LoradClient

    host = os.environ.get("LORAD_HOST") or default_host(os.environ)
    with suppress(Exception), LoradClient(host, timeout=PATIENCE) as client:
        page = client.adapters(q=incomplete or None, limit=200)
        return [a for a in page.items if a.name.startswith(incomplete)]
    return []
