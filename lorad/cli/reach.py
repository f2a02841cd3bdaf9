"""Where the daemon is by default, and why it cannot be reached, in words with a next step.

Goes in: the environment, the socket's file.  Comes out: a host; exit status, cause and advice.
"""

import grp
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lorad import paths
from lorad.client import Unreachable

SYSTEM_SOCKET = Path("/run/lorad/admin.sock")


@dataclass(frozen=True, slots=True)
class Advice:
    """`exit` 3 = nobody there, 5 = not allowed."""

    exit: int
    why: str
    hint: str


def default_host(env: Mapping[str, str]) -> str:
    """The user's own daemon if it has a socket, else the machine's."""
    runtime = paths.find(env).runtime
    own = runtime / "admin.sock" if runtime else None
    chosen = own if own is not None and own.exists() else SYSTEM_SOCKET
    return f"unix://{chosen}"


def advise(error: Unreachable) -> Advice:
    """Cause and next step of an Unreachable."""
    path = Path(error.host.removeprefix("unix://"))
    if error.kind == "denied":
        return Advice(
            5, _ownership(path), f"sudo usermod -aG {_group(path)} $USER, then log in again"
        )
    if error.kind == "stale":
        why = "the file is left from a daemon that ended without removing it"
        return Advice(3, why, "lorad serve    (it removes a stale socket by itself)")
    if error.kind == "loading":
        why = "something holds the socket and does not answer within the time"
        return Advice(3, why, "wait a moment, or look at the daemon's log")
    why = f"{path} does not exist"
    return Advice(3, why, "lorad serve, or name another socket: loractl -H unix:///path/admin.sock")


def _ownership(path: Path) -> str:
    try:
        info = path.stat()
    except OSError:
        return f"a folder above {path} may not be entered by uid {os.geteuid()}"
    owner = f"{_name(pwd.getpwuid, info.st_uid)}:{_group(path)}"
    mine = ", ".join(_name(grp.getgrgid, g) for g in os.getgroups())
    mode = f"{info.st_mode & 0o777:04o}"
    return f"the socket belongs to {owner} ({mode}); you are uid {os.geteuid()}, groups: {mine}"


def _group(path: Path) -> str:
    try:
        return _name(grp.getgrgid, path.stat().st_gid)
    except OSError:
        return "lorad-admin"


def _name(look_up: object, number: int) -> str:
    try:
        return str(look_up(number)[0])  # type: ignore[operator]
    except KeyError:
        return str(number)
