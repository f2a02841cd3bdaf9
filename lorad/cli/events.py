"""`loractl events`: what happened, and with `-f` what happens, across restarts of the daemon.

Goes in: filters.  Comes out: one event a line.  A follower that lost the daemon waits for it, and
says by a `gap` event that it may have missed some.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from lorad import wire
from lorad.cli.complete import any_name
from lorad.cli.following import follow_on
from lorad.cli.options import seconds
from lorad.cli.output import Column, Table, flush, moment, print_items
from lorad.cli.session import Interrupted, Usage, session
from lorad.event_types import unlike_all
from lorad.spelling import split_digest

if TYPE_CHECKING:
    from lorad.client import LoradClient

_PAGE = 1000


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("events")(events)


def _clock(event: wire.EventItem) -> str:
    """For people: their own time zone, to the second."""
    then = moment(event.time)
    return event.time if then is None else then.astimezone().strftime("%m-%d %H:%M:%S")


def _message(event: wire.EventItem) -> str:
    """With the level, unless it is that of most."""
    return event.message if event.level == "info" else f"{event.level}: {event.message}"


def _where_and_what(event: wire.EventItem) -> str:
    """With the replica that it happened on, where no column says so."""
    message = _message(event)
    return f"replica {event.replica}: {message}".rstrip(": ") if event.replica else message


EVENTS: Sequence[Column[wire.EventItem]] = (
    Column("TIME", _clock),
    Column("LEVEL", lambda e: e.level, wide=True),
    Column("TYPE", lambda e: e.type),
    Column("NAME", lambda e: e.name),
    Column("REV", lambda e: e.rev[:8]),
    Column("REPLICA", lambda e: e.replica, wide=True),
    Column("CAUSE", lambda e: e.cause),
    Column("ID", lambda e: str(e.id), wide=True, right=True),
    Column("MESSAGE", _message),
)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events are shown.  A `gap` always is: it may stand for any of them."""

    kind: str = ""
    adapter: str | None = None
    earliest: datetime | None = None

    @property
    def takes_all(self) -> bool:
        return self == Filter()

    def takes(self, event: wire.EventItem) -> bool:
        if event.type == "gap":
            return True
        then = moment(event.time)
        return (
            event.type.startswith(self.kind)
            and self.adapter in (None, event.name, split_digest(event.name)[0])
            and (self.earliest is None or then is None or then >= self.earliest)
        )


def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen.")] = False,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only of the last 10m, 2h ...")
    ] = None,
    after: Annotated[
        int | None, typer.Option(metavar="ID", min=0, help="Only after this event.")
    ] = None,
    limit: Annotated[
        int,
        typer.Option("--limit", "-n", metavar="N", min=1, help="At most this many, the newest."),
    ] = 100,
    kind: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="Only types that begin so.")
    ] = "",
    adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only of this adapter.", autocompletion=any_name),
    ] = None,
) -> None:
    """What happened: loads, evictions, replacements, refusals."""
    s = session(context)
    if follow and s.options.output == "json":
        raise Usage("--follow prints one record a line: use -o jsonl")
    if kind and (hint := unlike_all(kind)):
        raise Usage(f"no event has a type that begins with {kind!r}", hint=hint)
    try:
        past = None if since is None else timedelta(seconds=seconds(since))
    except ValueError as error:
        raise Usage(str(error)) from None
    wanted = Filter(kind, adapter, None if past is None else datetime.now(UTC) - past)
    page, last = _recent(s.client, after, limit, wanted)
    columns = _columns(page, wide=s.options.output == "wide")
    table = Table(columns, s.options, cut=False)  # the end is what matters most

    def show(items: Sequence[wire.EventItem], *, headings: bool = False) -> None:
        if s.options.machine or s.options.output == "name":
            print_items(items, EVENTS, s.options, document=page, name=lambda e: str(e.id))
        else:
            table.print(items, headings=headings)
        flush()

    show(page.items, headings=True)
    if follow:
        try:
            last_id = f"{page.instance_id}-{last}"
            for event in follow_on(s, s.client.follow_events, last_id):
                if wanted.takes(event):
                    show((event,))
        except KeyboardInterrupt:
            raise Interrupted("") from None


def _columns(page: wire.EventPage, *, wide: bool) -> list[Column[wire.EventItem]]:
    """Which replica is a column where any of the events tells of one."""
    if wide:
        return list(EVENTS)
    replicas = any(event.replica for event in page.items)
    columns = [c for c in EVENTS if not c.wide or (replicas and c.heading == "REPLICA")]
    return columns if replicas else [*columns[:-1], Column("MESSAGE", _where_and_what)]


def _recent(
    client: "LoradClient", after: int | None, limit: int, wanted: Filter
) -> tuple[wire.EventPage, int]:
    """The newest `limit` wanted events, oldest first, and the id to follow from."""
    if after is None and wanted.takes_all and limit <= _PAGE:
        page = client.recent_events(limit=limit)
        return page, page.items[-1].id if page.items else 0
    found: list[wire.EventItem] = []
    last = after or 0
    while True:
        page = client.recent_events(since=last, limit=_PAGE)
        found += filter(wanted.takes, page.items)
        last = page.items[-1].id if page.items else last
        if len(page.items) < _PAGE:
            return wire.EventPage(items=tuple(found[-limit:]), instance_id=page.instance_id), last


class _Show(Protocol):
    def __call__(self, items: Sequence[wire.EventItem], *, headings: bool = False) -> None: ...
