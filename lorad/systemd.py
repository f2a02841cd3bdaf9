"""What systemd wants to hear, and the sockets it hands over.

Goes in: NOTIFY_SOCKET, WATCHDOG_USEC and LISTEN_* from the environment.  Comes out: datagrams and
sockets by name.  Without systemd every call does nothing.
"""

import os
import socket
import time
from collections.abc import Mapping

FIRST_FD = 3


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

    def send(self, *lines: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                self._address = ""

    def ready(self, status: str) -> None:
        self.send("READY=1", f"STATUS={status}")

    def status(self, text: str, *, extend_seconds: float = 0.0) -> None:
        extend = [f"EXTEND_TIMEOUT_USEC={int(extend_seconds * 1e6)}"] if extend_seconds else []
        self.send(f"STATUS={text}", *extend)

    def reloading(self) -> None:
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, text: str) -> None:
        self.send("STOPPING=1", f"STATUS={text}")

    def watchdog(self) -> None:
        self.send("WATCHDOG=1")


def activated_sockets(env: Mapping[str, str]) -> dict[str, socket.socket]:
    """Listening sockets that were passed in, by FileDescriptorName; {} when started by hand."""
    if env.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = env.get("LISTEN_FDNAMES", "").split(":")
    found = {}
    for i in range(int(env.get("LISTEN_FDS", "0"))):
        sock = socket.socket(fileno=FIRST_FD + i)
        sock.set_inheritable(False)
        found[names[i] if i < len(names) else f"fd{i}"] = sock
    return found
