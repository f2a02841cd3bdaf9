"""`loractl audit`: who did what, and what came of it.

Goes in: filters.  Comes out: one act a line, the newest last.  Knows the wire and nothing behind
it.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import typer

from lorad import client_tenants as calls
from lorad.cli.complete import any_name
from lorad.cli.options import seconds
from lorad.cli.output import Column, moment, print_items
from lorad.cli.session import Usage, session
from lorad.wire_tenants import AuditItem


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("audit")(audit)


def _clock(item: AuditItem) -> str:
    """For people: their own time zone, to the second."""
    then = moment(item.time)
    return item.time if then is None else then.astimezone().strftime("%m-%d %H:%M:%S")


AUDIT: Sequence[Column[AuditItem]] = (
    Column("TIME", _clock),
    Column("WHO", lambda a: a.actor),
    Column("ACTION", lambda a: a.action),
    Column("NAME", lambda a: a.name, shrinks=True),
    Column("REV", lambda a: a.rev[:8]),
    Column("RESULT", lambda a: a.result),
    Column("ID", lambda a: str(a.id), wide=True, right=True),
    Column("MESSAGE", lambda a: a.message, wide=True),
)


def audit(
    context: typer.Context,
    limit: Annotated[
        int,
        typer.Option("--limit", "-n", metavar="N", min=1, max=10_000, help="The newest N."),
    ] = 100,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only of the last 10m, 2h ...")
    ] = None,
    who: Annotated[
        str, typer.Option(metavar="WORDS", help="Only of these: 'uid 1000', a key's id, daemon.")
    ] = "",
    action: Annotated[str, typer.Option(metavar="WORD", help="Only what begins so.")] = "",
    name: Annotated[
        str,
        typer.Option(
            "--name",
            "--adapter",
            metavar="NAME",
            help="Only about this adapter, or tenant:NAME.",
            autocompletion=any_name,
        ),
    ] = "",
) -> None:
    """Who changed what, who was refused, and why."""
    s = session(context)
    try:
        past = 0 if since is None else math.ceil(seconds(since))
    except ValueError as error:
        raise Usage(str(error)) from None
    page = calls.audit(s.client, limit=limit, seconds=past, actor=who, action=action, name=name)
    print_items(page.items, AUDIT, s.options, document=page, name=lambda a: str(a.id))
