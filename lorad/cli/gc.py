"""gc: what lies in the store for nobody.

Goes in: nothing, or --dry-run.  Comes out: a line for each piece with its size and the reason, and
on stderr what it came to.  Knows the wire and nothing behind it.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from lorad import wire
from lorad.cli.listing import short
from lorad.cli.output import UNKNOWN, Column, human_bytes, note, print_items
from lorad.cli.session import session

PIECES: Sequence[Column[wire.GarbageItem]] = (
    Column("REV", lambda g: short(g.rev)),
    Column("WHAT", lambda g: g.kind),
    Column("SIZE", lambda g: human_bytes(g.num_bytes), right=True),
    Column("LAYOUT", lambda g: g.layout or UNKNOWN, wide=True),
    Column("WHY", lambda g: g.why),
)


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("gc")(gc)


def gc(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
) -> None:
    """Remove from the store what no adapter needs. lorad does so by itself now and then."""
    s = session(context)
    patience = s.timeout(600.0)
    found = s.client.gc(dry_run=True, timeout_s=patience)
    if found.items and not dry_run:
        pieces = f"{len(found.items)} pieces, {human_bytes(found.num_bytes)}"
        s.confirm(f"remove what no adapter needs from the store: {pieces}")
        found = s.client.gc(timeout_s=patience)
    print_items(found.items, PIECES, s.options, document=found, name=lambda g: g.rev)
    what = "would be removed" if dry_run else "removed"
    budget = f" of {human_bytes(found.budget_bytes)}" if found.budget_bytes else ""
    gained = f"{human_bytes(found.num_bytes)} {what}" if found.items else "nothing to remove"
    note(f"{gained}; the store holds {human_bytes(found.used_bytes)}{budget}", s.options)
