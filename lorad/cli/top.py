"""`loractl top`, also `tui`: the live dashboard, or with --once its board as text.

Goes in: a daemon, or a recording.  Comes out: a dashboard until one leaves it.  Where there is no
terminal to show it on, the board once, as text.  Textual is imported only when it is shown.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorad.cli.options import seconds
from lorad.cli.output import print_document, print_line, terminal_width
from lorad.cli.session import Broken, Session, Usage, session

if TYPE_CHECKING:
    from lorad.client import LoradClient
    from lorad.tui.messages import Source
    from lorad.tui.record import Recorded
    from lorad.tui.replay import Replay
    from lorad.wire_stream import Board

#: Seconds between two pictures that a daemon can be asked for.
INTERVALS = (0.2, 10.0)
NUM_SCREENS = 7


def register(app: typer.Typer) -> None:
    """Hang the command on the root, under both of its names."""
    app.command("top")(top)
    app.command("tui", hidden=True)(top)


def top(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Print the board once, as text or with -o json.")
    ] = False,
    ascii: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII alone.")] = False,
    interval: Annotated[
        str, typer.Option(metavar="TIME", help="Between two pictures: 200ms to 10s.")
    ] = "1s",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Nothing can be changed from it.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep what comes; FILE.gz is compressed.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show a recording; needs no daemon.")
    ] = None,
    speed: Annotated[
        float, typer.Option(metavar="N", help="With --replay: N times as fast.")
    ] = 1.0,
    screen: Annotated[
        int, typer.Option(metavar="N", min=1, max=NUM_SCREENS, help="The screen to begin with.")
    ] = 1,
    theme: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its colours; `mono` has none.")
    ] = None,
    mouse: Annotated[
        bool, typer.Option("--mouse/--no-mouse", help="Without: the terminal selects text.")
    ] = True,
) -> None:
    """Watch it live: slots, churn, drains, caches, requests. Also called `tui`; `?` shows its keys.

    Without a terminal it prints the board once.
    """
    s = session(context)
    look = Look(ascii, theme, _pace(interval), read_only, screen, mouse)
    if context.find_root().params.get("no_color"):
        os.environ["NO_COLOR"] = "1"
    _refuse_nonsense(once, record, replay, speed)
    if once or s.options.machine or not can_show():
        if record is not None:
            raise Usage("--record is of a dashboard, and here is no terminal to show it on")
        print_once(s, replay, ascii=ascii)
        return
    with ExitStack() as held:
        if replay is not None:
            show(_replay(replay, speed), look, None)
            return
        s.client.board()  # what is wrong is said while there is a terminal to say it on
        source = _live(s, look.pace, held)
        if record is not None:
            source = held.enter_context(closing(_recorded(source, record)))
        show(source, look, partial(_connect, s))


@dataclass(frozen=True, slots=True)
class Look:
    """How it is to be shown."""

    ascii: bool
    theme: str | None
    pace: float  # seconds between two pictures
    read_only: bool
    screen: int
    mouse: bool


def can_show() -> bool:
    """Keys come from stdin, and it is drawn on stderr: all three have to be a terminal."""
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    return all(end is not None and end.isatty() for end in (sys.stdin, sys.stdout, sys.stderr))


def print_once(s: Session, replay: Path | None, *, ascii: bool) -> None:
    """The board as it is, or as it was at the end of a recording."""
    from lorad.tui.draw import glyphs_for
    from lorad.tui.once import lines

    board = s.client.board() if replay is None else _last_board(replay)
    if s.options.machine:
        print_document(board, s.options)
        return
    glyphs = glyphs_for(getattr(sys.stdout, "encoding", None), ascii=ascii)
    host = s.client.host if replay is None else ""
    for line in lines(board, glyphs, terminal_width() or None, host=host):
        print_line(line)


def show(source: "Source", look: Look, connect: "Callable[[], LoradClient] | None") -> None:
    """Until one leaves it; `connect` makes a client for questions, None where nobody is asked."""
    from lorad.tui.draw import ASCII, glyphs_for

    try:
        from lorad.tui import terminal
        from lorad.tui.app import Settings, TopApp
        from lorad.tui.ink import LOOKS
        from lorad.tui.office import Office
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing != "textual":
            raise
        raise Broken(
            "missing_package",
            f"the dashboard needs the Python package {missing}, which is not installed",
            hint=f"pip install {missing}, or for a look: loractl top --once",
        ) from None
    theme = look.theme or Settings.theme
    if theme not in LOOKS:
        raise Usage(f"there is no theme {theme!r}: {', '.join(LOOKS)}")
    settings = Settings(
        ascii=look.ascii or glyphs_for(sys.stderr.encoding) is ASCII,
        theme=theme,
        interval=look.pace,
        read_only=look.read_only or connect is None,
        screen=str(look.screen),
    )
    office = None if connect is None else Office(connect)
    try:
        terminal.run(TopApp(source, settings, office=office), mouse=look.mouse)
    except terminal.Crashed as error:
        raise Broken("dashboard_failed", str(error), hint="add -v for the traceback") from error


def _refuse_nonsense(once: bool, record: Path | None, replay: Path | None, speed: float) -> None:
    from lorad.tui.replay import MAX_SPEED

    if not 0 < speed <= MAX_SPEED:
        raise Usage(f"--speed is above 0, and {MAX_SPEED:.0f} at most")
    if speed != 1 and replay is None:
        raise Usage("--speed is that of --replay FILE")
    if record is not None and replay is not None:
        raise Usage("--record keeps what a daemon says, not a recording")
    if record is not None and once:
        raise Usage("--record keeps what a dashboard shows, and --once shows none")


def _pace(text: str) -> float:
    """Seconds of --interval."""
    least, most = INTERVALS
    try:
        pace = seconds(text)
    except ValueError as error:
        raise Usage(str(error)) from None
    if not least <= pace <= most:
        raise Usage(f"--interval is {least * 1000:.0f}ms to {most:.0f}s")
    return pace


def _live(s: Session, pace: float, held: ExitStack) -> "Source":
    """The daemon's stream, through a client of its own: another thread reads it."""
    from lorad.tui.feed import Live

    client = _connect(s)
    held.callback(client.close)
    return Live(client.host, lambda last: client.follow_board(pace, last))


def _connect(s: Session) -> "LoradClient":
    """One more client: each thread has its own."""
    from lorad.caller import TIMEOUT_SECONDS
    from lorad.client import LoradClient

    return LoradClient(s.client.host, timeout=s.timeout(TIMEOUT_SECONDS))


def _recorded(source: "Source", path: Path) -> "Recorded":
    from lorad.tui.record import CannotRecord, Recorded

    try:
        return Recorded(source, path)
    except CannotRecord as error:
        raise Usage(str(error)) from None


def _replay(path: Path, speed: float) -> "Replay":
    from lorad.tui.replay import Replay

    with _told():
        return Replay(path, speed=speed)


def _last_board(path: Path) -> "Board":
    from lorad.tui.replay import last_board

    with _told():
        return last_board(path)


@contextmanager
def _told() -> Iterator[None]:
    """What is wrong with a recording, as loractl tells it."""
    from lorad.tui.replay import BadRecording

    try:
        yield
    except BadRecording as error:
        raise Broken("bad_recording", str(error), hint=error.hint) from None
