"""`loractl op`: operations, which go on when their client leaves: ls show cancel.

Goes in: ids.  Comes out: rows, one record, what became of a cancellation.  Knows the wire and
nothing behind it.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from lorad.cli.complete import any_operation, live_operation
from lorad.cli.listing import short
from lorad.cli.output import (
    UNKNOWN,
    Column,
    age_of,
    human_age,
    human_bytes,
    plain,
    print_document,
    print_items,
    print_line,
    print_pairs,
)
from lorad.cli.session import session
from lorad.wire_operations import Operation, OperationPage

app = typer.Typer(help="Operations: what goes on when its client leaves.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", autocompletion=any_operation, show_default=False)]
Live = Annotated[
    str, typer.Argument(metavar="ID", autocompletion=live_operation, show_default=False)
]


def register(root: typer.Typer) -> None:
    """Hang the group on the root."""
    for command in (ls, show, cancel):
        app.command(command.__name__)(command)
    root.add_typer(app, name="op")


def progress(o: Operation) -> str:
    """`43%`, or bytes where nobody knows how many there are."""
    if o.total_bytes:
        return f"{100 * o.done_bytes // o.total_bytes}%"
    return human_bytes(o.done_bytes) if o.done_bytes else UNKNOWN


OPERATIONS: Sequence[Column[Operation]] = (
    Column("ID", lambda o: o.id),
    Column("KIND", lambda o: o.kind),
    Column("TARGET", lambda o: o.target),
    Column("STATE", lambda o: o.state),
    Column("PROGRESS", progress, right=True),
    Column("AGE", lambda o: human_age(age_of(o.created_at)), right=True),
    Column("NAME", lambda o: o.name, wide=True),
    Column("REV", lambda o: short(o.rev), wide=True),
    Column("ACTOR", lambda o: o.actor, wide=True),
    Column("CODE", lambda o: o.reason or o.code, wide=True),
)


def ls(
    context: typer.Context,
    live: Annotated[bool, typer.Option("--live", help="Only those that have not ended.")] = False,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="At most this many, the newest.")
    ] = 100,
) -> None:
    """List operations, the newest last."""
    s = session(context)
    page = s.client.operations(live=live, limit=limit)
    page = OperationPage(items=tuple(sorted(page.items, key=lambda o: o.id)))
    print_items(page.items, OPERATIONS, s.options, document=page, name=lambda o: o.id)


def show(context: typer.Context, id: Id) -> None:
    """Show one operation: how far it is, or what became of it."""
    s = session(context)
    o = s.client.operation(id)
    if s.options.machine:
        print_document(o, s.options)
        return
    if s.options.output == "name":
        print_line(plain(o.id))
        return
    whole = human_bytes(o.total_bytes) if o.total_bytes else UNKNOWN
    print_pairs(
        [
            ("id", o.id),
            ("kind", o.kind),
            ("target", o.target),
            ("state", o.state),
            ("bytes", f"{human_bytes(o.done_bytes)} of {whole}"),
            ("adapter", f"{o.name}@{short(o.rev)}" if o.rev else o.name or UNKNOWN),
            ("commit", o.commit or UNKNOWN),
            ("by", o.actor or UNKNOWN),
            ("begun", f"{human_age(age_of(o.created_at))} ago"),
            ("changed", f"{human_age(age_of(o.updated_at))} ago"),
            *([("why", f"{o.reason or o.code}: {o.message}")] if o.code else []),
            *([("note", o.message)] if o.message and not o.code else []),
            *([("try", o.hint)] if o.hint else []),
        ]
    )


def cancel(context: typer.Context, id: Live) -> None:
    """End an operation, and take away what it had begun."""
    s = session(context)
    o = s.client.cancel_operation(id)
    if s.options.machine:
        print_document(o, s.options)
    elif s.options.output == "name":
        print_line(plain(o.id))
    else:
        print_line(f"{plain(o.id)}  {plain(o.state)}")
