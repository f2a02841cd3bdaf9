"""`loractl pull`: an adapter from the hub, from S3 or from a URL.

Goes in: a reference.  Comes out: the adapter's name and revision, or by `--no-wait` the id of the
operation, which goes on whatever becomes of this client.  Progress goes to stderr: a bar on a
terminal, else a line for every tenth or every ten seconds.  Knows the wire and nothing behind it.
"""

import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from lorad import wire
from lorad.cli.adapters import Wait
from lorad.cli.listing import short
from lorad.cli.output import (
    UNKNOWN,
    Column,
    complain,
    human_bytes,
    note,
    plain,
    print_document,
    print_items,
    print_line,
)
from lorad.cli.session import Failed, Interrupted, Session, Usage, session
from lorad.wire_operations import Operation, PulledFile, PullPlan, PullStart

#: How long the daemon holds an answer back while nothing has ended.
LOOK_SECONDS = 0.5
LINE_SECONDS = 10.0
BAR_CELLS = 24
MAX_TOKEN_BYTES = 4096

FILES = (
    Column[PulledFile]("FILE", lambda f: f.name),
    Column[PulledFile]("SIZE", lambda f: human_bytes(f.num_bytes), right=True),
)


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("pull")(pull)


def pull(
    context: typer.Context,
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="hf:ORG/REPO[@COMMIT], s3://BUCKET/PREFIX or https://HOST/PATH."
        ),
    ],
    revision: Annotated[
        str, typer.Option(metavar="REV", help="Commit, branch or tag of an hf: reference.")
    ] = "",
    name: Annotated[
        str, typer.Option(metavar="[TENANT/]NAME", help="Default: the reference's last word.")
    ] = "",
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The base it is for; default: the one that it fits."),
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Give a known name a new revision.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Load, and never evict by itself.")] = False,
    load: Annotated[bool, typer.Option("--load", help="Load once registered.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A token for the source; the daemon does not keep it."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="From what was fetched before; nobody is asked.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be fetched; write nothing.")
    ] = False,
    wait: Wait = True,
) -> None:
    """Fetch an adapter from elsewhere and register it."""
    s = session(context)
    start = PullStart(
        reference=reference,
        revision=revision,
        name=name,
        model=model,
        replace=replace,
        pin=pin,
        load=load,
        offline=offline,
        dry_run=dry_run,
        token=_token(token_file, s) if token_file is not None else "",
    )
    if dry_run:
        _show_plan(s, s.client.plan_pull(start, timeout=s.timeout(60.0)))
        return
    begun = s.client.pull(start)
    ended = _wait(s, begun) if wait else begun
    if s.options.machine:
        print_document(ended, s.options)
    elif s.options.output == "name" and wait:
        print_line(plain(ended.name))
    elif not wait:
        print_line(plain(ended.id))
    else:
        print_line(f"{plain(ended.name)}@{short(ended.rev)}  {plain(ended.target)}")
    if wait and ended.message:
        note(ended.message, s.options)


def _show_plan(s: Session, plan: PullPlan) -> None:
    print_items(plan.files, FILES, s.options, document=plan, name=lambda f: f.name)
    if not s.options.machine and s.options.output != "name":
        total = human_bytes(plan.total_bytes)
        print_line(f"{plain(plan.name)}  {total}  {plain(plan.reference)}")


def _token(path: Path, s: Session) -> str:
    """The word in the file.  It travels over the admin socket alone, and is never shown."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_TOKEN_BYTES:
            raise Usage(f"{path} is no file with a token in it")
        word = path.read_text().strip()
    except UnicodeDecodeError:
        raise Usage(f"{path} is no file with a token in it") from None
    if not word or not word.isascii() or not word.isprintable() or " " in word:
        raise Usage(f"{path} holds no token, which is one word")
    if status.st_mode & 0o077:
        note(f"warning: others may read {path}; chmod 600 it", s.options)
    return word


# ----------------------------------------------------------------- waiting
def _wait(s: Session, o: Operation) -> Operation:
    """Until it has ended; raises what it ended with, or that this client stops waiting."""
    from lorad.caller import Unreachable

    teller = _Teller(s)
    deadline = None if s.options.timeout is None else time.monotonic() + s.options.timeout
    try:
        while o.state in ("queued", "running"):
            teller.tell(o)
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                teller.end()
                raise _late(s, o)
            o = s.client.operation(o.id, wait=min(LOOK_SECONDS, left))
    except KeyboardInterrupt:
        teller.end()
        raise Interrupted(f"operation {o.id} goes on: loractl op show {o.id}") from None
    except Unreachable:
        teller.end()
        note(f"operation {o.id} goes on when the daemon is back: loractl op show {o.id}", s.options)
        raise
    teller.tell(o)
    teller.end()
    if o.state != "done":
        raise _failure(o)
    return o


def _late(s: Session, o: Operation) -> Failed:
    if s.options.machine:
        print_document(o, s.options)
    else:
        print_line(plain(o.id))
    return Failed(
        wire.ItemResult(
            name=o.name,
            ok=False,
            code="deadline_exceeded",
            message=f"not done after {s.options.timeout:g} s; operation {o.id} goes on",
            hint=f"loractl op show {o.id}",
        )
    )


def _failure(o: Operation) -> Failed:
    cancelled = o.state == "cancelled"
    return Failed(
        wire.ItemResult(
            name=o.name,
            ok=False,
            code="cancelled" if cancelled else o.code,
            message=f"operation {o.id} was cancelled" if cancelled else o.message,
            hint=o.hint,
            details={"operation": o.id} | ({"reason": o.reason} if o.reason else {}),
        )
    )


@dataclass
class _Teller:
    """How far it is, on stderr; silent with --quiet and for a program."""

    session: Session
    clock: Callable[[], float] = time.monotonic
    _tenth: int = 0
    _line_at: float = field(default=0.0)
    _drawn: int = 0  # characters of the bar

    def __post_init__(self) -> None:
        options = self.session.options
        self._silent = options.quiet or options.machine
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._line_at = self.clock()

    def tell(self, o: Operation) -> None:
        if self._silent:
            return
        if self._terminal:
            self._draw(_bar(o))
            return
        tenth = 10 * o.done_bytes // o.total_bytes if o.total_bytes else 0
        if tenth > self._tenth or self.clock() - self._line_at >= LINE_SECONDS:
            self._tenth, self._line_at = tenth, self.clock()
            complain(f"{plain(o.target)}: {o.state} {_numbers(o)}")

    def end(self) -> None:
        """The bar goes: what follows stands alone."""
        if self._drawn:
            self._draw("")
            self._drawn = 0

    def _draw(self, text: str) -> None:
        print(f"\r{text:<{self._drawn}}\r{text}", end="", file=sys.stderr, flush=True)
        self._drawn = len(text)


def _numbers(o: Operation) -> str:
    whole = human_bytes(o.total_bytes) if o.total_bytes else UNKNOWN
    share = f"{100 * o.done_bytes // o.total_bytes}%  " if o.total_bytes else ""
    return f"{share}{human_bytes(o.done_bytes)} of {whole}"


def _bar(o: Operation) -> str:
    full = BAR_CELLS * o.done_bytes // o.total_bytes if o.total_bytes else 0
    cells = "#" * min(full, BAR_CELLS)
    return f"{o.state:<7} [{cells:-<{BAR_CELLS}}] {_numbers(o)}"
