"""Shell completion of adapter names, live from the daemon.

Answers within 200 ms of asking or not at all: a daemon that is down or slow must not hang a shell,
nor print into it.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import typer

from lorad import wire

if TYPE_CHECKING:
    from lorad.client import LoradClient

T = TypeVar("T")

PATIENCE = 0.2  # seconds


def any_name(context: typer.Context, incomplete: str) -> list[str]:
    """Registered names."""
    return [a.name for a in _adapters(context, incomplete)]


def model_name(context: typer.Context, incomplete: str) -> list[str]:
    """What `run` can ask: the base, too."""

    def ask(client: "LoradClient") -> list[str]:
        status = client.status()
        names = [one.name for one in status.models] or [status.model]
        names += [a.name for a in client.adapters(q=incomplete or None, limit=200).items]
        return [name for name in names if name.startswith(incomplete)]

    return _asked(context, ask)


def resident_name(context: typer.Context, incomplete: str) -> list[str]:
    """What `evict` can take."""
    return [a.name for a in _adapters(context, incomplete) if a.slot is not None]


def cold_name(context: typer.Context, incomplete: str) -> list[str]:
    """What `load` can take."""
    return [a.name for a in _adapters(context, incomplete) if a.slot is None]


def state_name(incomplete: str) -> list[str]:
    """What `ls --state` can ask for."""
    from engine.adapters.states import State

    return [state for state in sorted(State) if state.startswith(incomplete)]


def adapter_tenant(context: typer.Context, incomplete: str) -> list[str]:
    """Tenants that have adapters: what `ls --tenant` can find."""
    found = {a.tenant for a in _adapters(context, incomplete) if a.tenant}
    return sorted(tenant for tenant in found if tenant.startswith(incomplete))


def live_operation(context: typer.Context, incomplete: str) -> list[str]:
    """What `op cancel` can take."""
    return _operations(context, incomplete, live=True)


def any_operation(context: typer.Context, incomplete: str) -> list[str]:
    """What `op show` can take."""
    return _operations(context, incomplete, live=False)


def tenant_name(context: typer.Context, incomplete: str) -> list[str]:
    """Tenants."""

    def ask(client: "LoradClient") -> list[str]:
        from lorad import client_tenants

        return [t.name for t in client_tenants.every(client).items if t.name.startswith(incomplete)]

    return _asked(context, ask)


def _operations(context: typer.Context, incomplete: str, *, live: bool) -> list[str]:
    def ask(client: "LoradClient") -> list[str]:
        return [o.id for o in client.operations(live=live).items if o.id.startswith(incomplete)]

    return _asked(context, ask)


def _adapters(context: typer.Context, incomplete: str) -> list[wire.Adapter]:
    def ask(client: "LoradClient") -> list[wire.Adapter]:
        page = client.adapters(q=incomplete or None, limit=200)
        return [a for a in page.items if a.name.startswith(incomplete)]

    return _asked(context, ask)


def _asked(context: typer.Context, question: "Callable[[LoradClient], list[T]]") -> list[T]:
    """A thread asks, so that not even a daemon that sends a byte now and then keeps us."""
    from lorad.cli.reach import checked_host, default_host
    from lorad.client import LoradClient

    given = context.find_root().params.get("host") or os.environ.get("LORAD_HOST")
    found: list[T] = []

    def ask() -> None:
        with suppress(Exception), client:
            found.extend(question(client))

    with suppress(ValueError):
        client = LoradClient(checked_host(given or default_host(os.environ)), timeout=PATIENCE)
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(PATIENCE)
    return list(found)
