"""The terminal, given back as it was, whatever happens to the dashboard.

Goes in: a Textual app.  Comes out: what it returned; `Crashed` with the file of a report when it
failed, `SystemExit` with 128 + n when signal n ended it.  A signal asks the app to leave; one that
does not within `PATIENCE_SECONDS`, or is told again, is ended from here: modes are switched off,
the terminal's settings are put back, and the process ends.  Knows nothing of boards.
"""

import os
import platform
import select
import signal
import sys
import tempfile
import termios
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from textual.drivers.linux_driver import LinuxDriver

from lorad import __version__

PATIENCE_SECONDS = 3.0
#: Whatever a dashboard may have switched on, off: paste, wheel and clicks, focus, keyboard
#: protocol, synchronised output, the other screen; then lines wrap and the cursor is seen again.
RESET = (
    "\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?2048l"
    "\x1b[?1004l\x1b[<u\x1b[?2026l\x1b[?1049l\x1b[?7h\x1b[?25h\x1b[0m"
)
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Crashed(Exception):
    """The dashboard failed; `report` is the file that says how, "" if none could be written."""

    def __init__(self, cause: BaseException, report: str) -> None:
        where = f"; the report is in {report}" if report else ""
        super().__init__(f"the dashboard failed: {type(cause).__name__}: {cause}{where}")
        self.report = report


class Driver(LinuxDriver):
    """Textual's, which also lives through `kill -STOP` and `kill -CONT`.

    Nothing told it that it would be stopped, so that it is shown twice over when it goes on.
    """

    def start_application_mode(self) -> None:
        if self._key_thread is not None and self._key_thread.is_alive():
            self.suspend_application_mode()
            self._must_signal_resume = True  # paints everything
        super().start_application_mode()  # type: ignore[no-untyped-call]


def run(app: Any, *, mouse: bool = True) -> Any:
    """Run it until it ends."""
    if app.driver_class is LinuxDriver:
        app.driver_class = Driver
    # Textual prints a traceback with the values of variables: here it goes into a file, without.
    app._print_error_renderables = lambda: None
    with _kept(app) as leaving:
        try:
            result = app.run(mouse=mouse)
        except Exception as error:
            raise Crashed(error, _report(error)) from error
    if leaving:
        raise SystemExit(128 + leaving[0])
    failure = getattr(app, "_exception", None)
    if failure is not None:
        raise Crashed(failure, _report(failure)) from failure
    return result


@contextmanager
def _kept(app: Any) -> Iterator[list[int]]:
    """Signals lead out of the app, and the terminal is as it was.  Yields the signals."""
    came: list[int] = []
    before = _settings()

    def forced(number: int, frame: FrameType | None) -> None:
        _restore(before)
        os._exit(128 + (came[0] if came else number))

    def leave(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            forced(number, frame)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
        loop = app._loop
        if loop is None:  # it has not begun, or has ended already
            raise SystemExit(128 + number)
        loop.call_soon_threadsafe(app.exit)

    held = {number: signal.signal(number, leave) for number in SIGNALS}
    held[signal.SIGALRM] = signal.signal(signal.SIGALRM, forced)
    # Textual stops itself by these, and leaves its handlers behind.
    held |= {n: signal.getsignal(n) for n in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)}
    try:
        yield came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in held.items():
            signal.signal(number, handler)
        _restore(before)


def _settings() -> list[Any] | None:
    """Of the terminal that keys come from; None if it is none."""
    with suppress(termios.error, OSError, ValueError):
        return termios.tcgetattr(0)
    return None


def _restore(settings: list[Any] | None) -> None:
    """At once, and without waiting for a terminal that takes nothing.

    Settings that are as they were say that Textual has left already.  Then nothing is written: one
    pop of the keyboard's modes too many would be that of the shell.
    """
    if settings is None or _settings() == settings:
        return
    with suppress(OSError, ValueError):
        _, writable, _ = select.select([], [2], [], 0.5)
        if writable and os.isatty(2):
            os.write(2, RESET.encode())
    with suppress(termios.error, OSError):
        termios.tcsetattr(0, termios.TCSANOW, settings)


def _report(error: BaseException) -> str:
    """The path of a file with the traceback, for its owner alone; "" if there is no room for it."""
    told = [
        f"loractl {__version__} top, Python {platform.python_version()}, {platform.platform()}",
        f"terminal {os.environ.get('TERM', '')}, {' '.join(map(str, _size()))}",
        "",
        *(line.rstrip("\n") for line in traceback.format_exception(error)),
    ]
    with suppress(OSError):
        descriptor, path = tempfile.mkstemp(prefix="loractl-top-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(told) + "\n")
        return path
    return ""


def _size() -> tuple[int, int]:
    with suppress(OSError, AttributeError, ValueError):
        size = os.get_terminal_size(sys.stderr.fileno())
        return size.columns, size.lines
    return 0, 0
