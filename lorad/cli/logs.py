"""`loractl logs`: the daemon's last log lines, and with `-f` those that follow, across restarts.

Goes in: how many.  Comes out: one line each; a traceback below its line.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from lorad.cli.following import follow_on
from lorad.cli.output import Column, flush, moment, plain, print_items, print_line
from lorad.cli.session import Interrupted, Session, Usage, session
from lorad.wire_operate import LogLine, LogPage

LEVELS = ("debug", "info", "warning", "error", "critical")


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("logs")(logs)


LINES: Sequence[Column[LogLine]] = (
    Column("TIME", lambda line: line.time),
    Column("LEVEL", lambda line: line.level),
    Column("LOGGER", lambda line: line.logger),
    Column("MESSAGE", lambda line: line.message),
)


def logs(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, max=1000, help="The last N.")
    ] = 200,
    level: Annotated[
        str, typer.Option("--level", metavar="LEVEL", help="This level and above.")
    ] = "debug",
) -> None:
    """Print the daemon's log. Its engine's own words are on its stderr alone."""
    s = session(context)
    if level not in LEVELS:
        raise Usage(f"unknown level {level!r}", hint=f"one of {', '.join(LEVELS)}")
    if follow and s.options.output == "json":
        raise Usage("--follow prints one record a line: use -o jsonl")
    wanted = LEVELS[LEVELS.index(level) :]
    page = s.client.recent_logs(limit=lines)
    last = page.items[-1].id if page.items else 0
    _show(s, page, tuple(line for line in page.items if line.level in wanted))
    if not follow:
        return
    try:
        for line in follow_on(s, s.client.follow_logs, f"{page.instance_id}-{last}"):
            if line.level in wanted:
                _show(s, page, (line,))
    except KeyboardInterrupt:
        raise Interrupted("") from None


def _show(s: Session, page: LogPage, lines: tuple[LogLine, ...]) -> None:
    if s.options.machine or s.options.output == "name":
        shown = LogPage(instance_id=page.instance_id, items=lines)
        print_items(lines, LINES, s.options, document=shown, name=lambda line: str(line.id))
    else:
        for line in lines:
            _print(line)
    flush()


def _print(line: LogLine) -> None:
    """As on the daemon's stderr, in the reader's time zone."""
    then = moment(line.time)
    clock = line.time if then is None else then.astimezone().strftime("%m-%d %H:%M:%S.%f")[:-3]
    print_line(f"{clock} {line.level.upper()} {plain(line.logger)}: {plain(line.message)}")
    for row in line.error.split("\n") if line.error else ():
        print_line(f"    {plain(row)}")
