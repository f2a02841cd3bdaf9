"""The commands that operate the daemon: reload drain resume.

Goes in: perhaps a name.  Comes out: what changed, or what still runs.  Knows the wire and nothing
behind it.
"""

from typing import Annotated

import typer

from lorad.cli.complete import any_name
from lorad.cli.listing import checked_name
from lorad.cli.output import note, plain, print_document, print_line
from lorad.cli.session import Session, session
from lorad.spelling import still_running
from lorad.wire_operate import DrainAsk, Drained

One = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", autocompletion=any_name, help="Default: the daemon."),
]


def register(app: typer.Typer) -> None:
    """Hang the commands on the root."""
    for command in (reload, drain, resume):
        app.command(command.__name__)(command)


def reload(context: typer.Context) -> None:
    """Read the configuration anew. Limits, log level, keys; looks at the inbox and at pins."""
    s = session(context)
    done = s.client.reload()
    if done.needs_restart:  # first: who changed nothing else would take "nothing" for the answer
        note(f"needs a restart: {', '.join(done.needs_restart)}", s.options)
    if s.options.machine:
        print_document(done, s.options)
    elif s.options.output == "name":
        for key in done.changed:
            print_line(key)
    else:
        nothing = "nothing else changed" if done.needs_restart else "nothing changed"
        print_line(f"changed: {', '.join(done.changed)}" if done.changed else nothing)


def drain(
    context: typer.Context,
    name: One = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="What still runs when --timeout is up is aborted.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until nothing runs.")] = True,
) -> None:
    """Take no new requests, of all or of one adapter. What runs ends; `resume` takes them again."""
    s = session(context)
    wanted = None if name is None else checked_name(name)
    ask = DrainAsk(name=wanted, timeout_s=s.timeout(30.0), wait=wait, cancel=cancel)
    _tell(s, s.client.drain(ask))


def resume(context: typer.Context, name: One = None) -> None:
    """Take requests again after `drain`."""
    s = session(context)
    _tell(s, s.client.resume(None if name is None else checked_name(name)))


def _tell(s: Session, done: Drained) -> None:
    if s.options.machine:
        print_document(done, s.options)
        return
    what = "the daemon" if done.name is None else plain(done.name)
    if s.options.output == "name":
        print_line(what)
    else:
        state = "drained" if done.draining else "takes requests"
        if done.draining and done.running:
            state = f"drains, {still_running(done.running)}"
        already = "" if done.changed else " (already)"
        aborted = f", {done.cancelled} aborted" if done.cancelled else ""
        print_line(f"{what}  {state}{aborted}{already}")
    if done.still and not done.draining:
        note(f"still drained: {', '.join(map(plain, done.still))}", s.options)
