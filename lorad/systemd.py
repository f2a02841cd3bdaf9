"""What systemd wants to hear, and the sockets it hands over.

Goes in: NOTIFY_SOCKET, WATCHDOG_USEC and LISTEN_* from the environment.  Comes out: datagrams and
sockets by name.  Without systemd every call does nothing.
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping

from lorad.errors import CannotBind

FIRST_FD = 3
#: A service manager that does not read for so long is not waited for: the loop has streams to feed.
SEND_SECONDS = 0.5


class Notifier:
    """Sends states to the service manager; a lost datagram is never an error of ours."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._address = env.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        usec = env.get("WATCHDOG_USEC", "")
        mine = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        #: Seconds between two watchdog pings, 0 = none wanted; half of what systemd allows.
        self.watchdog_seconds = int(usec) / 2e6 if usec.isdigit() and mine else 0.0
        self._ready = self._stopping = False

    def send(self, *lines: str) -> None:
        """One datagram; each line is `NAME=value`."""
        if not self._address:
            return
        text = "\n".join(" ".join(line.split()) for line in lines)  # no value makes a line of ours
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(SEND_SECONDS)
            try:
                sock.sendto(text.encode(), self._address)
            except OSError:
                return

    def ready(self, status: str) -> None:
        self._ready = True
        self.send("READY=1", f"STATUS={status}")

    def status(self, text: str, *, extend_seconds: float = 0.0) -> None:
        """`extend_seconds`: so much more, from now on, before a start or stop takes too long."""
        self.send(f"STATUS={text}", *_extend(extend_seconds))

    def reloading(self) -> None:
        """To be followed by `reloaded`.  A start that is not over cannot be reloaded."""
        if self._ready and not self._stopping:
            self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self, status: str) -> None:
        """Whatever came of it: systemd waits for this, and calls what is missing a failure."""
        if self._ready and not self._stopping:
            self.send("READY=1", f"STATUS={status}")

    def stopping(self, text: str, *, extend_seconds: float = 0.0) -> None:
        self._stopping = True
        self.send("STOPPING=1", f"STATUS={text}", *_extend(extend_seconds))

    def watchdog(self) -> None:
        self.send("WATCHDOG=1")


def _extend(seconds: float) -> tuple[str, ...]:
    return (f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}",) if seconds else ()


def activated_sockets(env: Mapping[str, str], known: Iterable[str]) -> dict[str, socket.socket]:
    """Listening sockets that were passed in, by FileDescriptorName; {} when started by hand.

    Raises CannotBind for a name that is not among `known`, comes twice, or is no stream socket
    that listens: a socket that nobody serves would keep its clients waiting for ever.
    """
    count = env.get("LISTEN_FDS", "0")
    if env.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return {}
    names, known = env.get("LISTEN_FDNAMES", "").split(":"), sorted(known)
    found: dict[str, socket.socket] = {}
    for i in range(int(count)):
        name = names[i] if i < len(names) else "unknown"
        if name not in known or name in found:
            raise CannotBind(
                f"a socket named {name!r} was passed in" + (" twice" if name in found else ""),
                hint=f"FileDescriptorName= is one of: {', '.join(known)}",
            )
        found[name] = _listener(FIRST_FD + i, name)
    return found


def _listener(fd: int, name: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise CannotBind(
            f"descriptor {fd}, named {name}, is no socket: {error}",
            hint="ListenStream= in the .socket unit",
        ) from None
    if not listens or sock.type != socket.SOCK_STREAM:
        sock.close()
        raise CannotBind(
            f"the socket named {name} does not listen for streams",
            hint="ListenStream=, and Accept=no",
        )
    sock.set_inheritable(False)
    return sock
