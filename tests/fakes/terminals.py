"""A real pseudo-terminal with a program in it, and what is left of its modes.

The program has the terminal as its controlling one, in a session of its own, as from a shell.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0
_MODE = re.compile(r"\x1b\[\?([\d;]+)([hl])")
#: Modes that are on before anything was asked for.
_BORN_ON = frozenset(("7", "25"))


class Terminal:
    """`program` is what runs in it; `read` is all that it wrote so far."""

    def __init__(self, command: Sequence[str], *, width: int, height: int, env: Mapping[str, str]):
        self._master, self._slave = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self._slave)
        self._written = b""
        self.program = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=dict(env),
            cwd=ROOT,
            preexec_fn=_lead,
        )

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> str:
        """Until the program wrote it; all that it wrote so far."""
        return self.wait_until(lambda read: text in read, text)

    def wait_until(self, done: Any, what: str) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not done(self.read):
            left = deadline - time.monotonic()
            assert left > 0, f"no {what!r} in {self.read[-2000:]!r}"
            if not self.drain(min(left, 0.5)) and self.program.poll() is not None:
                assert done(self.read), f"it ended before {what!r}: {self.read[-2000:]!r}"
        return self.read

    def end(self) -> int:
        """Until it ends; its status."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.program.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.read[-2000:]!r}"
            self.drain(0.1)
        while self.drain(0.0):
            continue
        return self.program.returncode

    @property
    def read(self) -> str:
        return self._written.decode(errors="replace")

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def hang_up(self) -> None:
        """As when the window is closed."""
        os.close(self._slave)
        os.close(self._master)
        self._master = self._slave = -1

    def close(self) -> None:
        if self.program.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.program.pid, signal.SIGKILL)
        self.program.wait()
        for descriptor in (self._master, self._slave):
            if descriptor >= 0:
                os.close(descriptor)

    def drain(self, seconds: float) -> bool:
        """Read what is there, or what comes within so long; False if nothing did."""
        readable, _, _ = select.select([self._master], [], [], seconds)
        if not readable:
            return False
        self._written += os.read(self._master, 65536)
        return True


@contextlib.contextmanager
def loractl(
    *words: str, width: int = 120, height: int = 36, before: str = "", **env: str
) -> Iterator[Terminal]:
    """`loractl WORDS` in a terminal; `before` is Python that runs in its process first."""
    code = f"{before}\nfrom lorad.cli.app import main\nmain()"
    command = [sys.executable, "-c", code, *words]
    path = os.environ["PATH"]
    around = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": "/nowhere", "LC_ALL": "C.UTF-8"}
    terminal = Terminal(
        command,
        width=width,
        height=height,
        env={**around, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"} | env,
    )
    try:
        yield terminal
    finally:
        terminal.close()


def modes(written: str) -> set[str]:
    """The private modes of a terminal that are other than at its start, by number; `kitty` too."""
    on = set(_BORN_ON)
    for match in _MODE.finditer(written):
        for number in match[1].split(";"):
            (on.add if match[2] == "h" else on.discard)(number)
    changed = on ^ _BORN_ON
    pushed = len(re.findall(r"\x1b\[>\d+u", written)) - len(re.findall(r"\x1b\[<\d*u", written))
    return changed | ({"kitty"} if pushed > 0 else set())


def _lead() -> None:
    """In the child: lead a session, whose terminal this is."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
