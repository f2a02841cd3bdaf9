"""Where the daemon is by default, and why it cannot be reached, in words with a next step.

Goes in: the environment, the socket's file.  Comes out: a host; exit status, cause and advice.
"""

import grp
import os
import pwd
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lorad import paths
from lorad.caller import Unreachable

SYSTEM_SOCKET = Path("/run/lorad/admin.sock")
#: Of sockaddr_un, without the closing NUL.
MAX_SOCKET_PATH = 107


@dataclass(frozen=True, slots=True)
class Advice:
    """`exit` 3 = nobody there, 5 = not allowed.  `cause` "": the error's own words will do."""

    exit: int
    why: str
    hint: str
    cause: str = ""


def default_host(env: Mapping[str, str]) -> str:
    """The user's own daemon if it has a socket, else the machine's; of none the likelier place."""
    own = None
    with suppress(RuntimeError):  # a uid without a home has no daemon of its own
        runtime = paths.find(env).runtime
        own = runtime / "admin.sock" if runtime else None
    places = [place for place in (own, SYSTEM_SOCKET) if place is not None]
    there = [place for place in places if os.path.exists(place)]
    return f"unix://{(there or places)[0]}"


def checked_host(host: str) -> str:
    """`host` if it is one; ValueError that says what to write."""
    form = "write unix:///path/admin.sock or http://host:port"
    if host.startswith(("http://", "https://")):
        try:
            parts = urlsplit(host)
            good = bool(parts.hostname) and parts.port != 0 and host.isascii()
        except ValueError:
            good = False
        if not good:
            raise ValueError(f"{host!r} is not a host: {form}")
        if "@" in parts.netloc:  # and the host is shown wherever something goes wrong
            raise ValueError("a host has no user and password in it; LORAD_API_KEY has the key")
        return host
    path = host.removeprefix("unix://")
    if not path or "://" in path or "\0" in path:
        raise ValueError(f"{host!r} is not a host: {form}")
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        limit = f"a socket's path has at most {MAX_SOCKET_PATH} bytes"
        raise ValueError(f"{path!r} has {size} bytes: {limit}")
    return host


def advise(error: Unreachable) -> Advice:
    """Cause and next step of an Unreachable."""
    path = Path(error.host.removeprefix("unix://"))
    tcp = error.host.startswith(("http://", "https://"))
    if error.kind == "denied":
        return Advice(5, _ownership(path), _way_in(path))
    if error.kind == "loading" and tcp:
        why = "the name is unknown here, or nothing answers within the time"
        return Advice(3, why, "look at address and port: `[tcp] admin_bind`", "it does not answer")
    if error.kind == "loading":
        why = "something holds the socket and does not answer within the time"
        return Advice(3, why, "wait a moment, or look at the daemon's log")
    if error.kind == "lost":
        why = "the daemon ended, or was started anew; what it had acknowledged is kept"
        return Advice(3, why, "loractl ping, then look at the state and repeat")
    if tcp:
        why = "lorad listens on Unix sockets unless it was told otherwise"
        return Advice(3, why, "loractl -H unix:///path/admin.sock", "nobody listens there")
    if error.kind == "stale" and not _is_socket(path):
        why = f"{path} is a file or folder of another kind"
        return Advice(3, why, "loractl -H unix:///path/admin.sock", "that is not a socket")
    if error.kind == "stale":
        why = "the file is left from a daemon that ended without removing it"
        return Advice(3, why, "lorad serve    (it removes a stale socket by itself)")
    why = f"{path} does not exist"
    return Advice(3, why, "lorad serve, or name another socket: loractl -H unix:///path/admin.sock")


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return True  # nothing to contradict the errno with


def _ownership(path: Path) -> str:
    try:
        info = path.stat()
    except OSError:
        return f"a folder above {path} may not be entered by uid {os.geteuid()}"
    owner = f"{_name(pwd.getpwuid, info.st_uid)}:{_name(grp.getgrgid, info.st_gid)}"
    mine = ", ".join(_name(grp.getgrgid, g) for g in sorted({os.getegid(), *os.getgroups()}))
    mode = f"{info.st_mode & 0o777:04o}"
    return f"the socket belongs to {owner} ({mode}); you are uid {os.geteuid()}, groups: {mine}"


def _way_in(path: Path) -> str:
    """Joining the socket's group, where that would help and is wise."""
    try:
        info = path.stat()
    except OSError:
        return "sudo usermod -aG lorad-admin $USER, then log in again"
    mine = {os.getegid(), *os.getgroups()}
    if info.st_gid == 0 or info.st_gid in mine or not info.st_mode & stat.S_IWGRP:
        return f"run it as {_name(pwd.getpwuid, info.st_uid)}, for instance with sudo -u"
    return f"sudo usermod -aG {_name(grp.getgrgid, info.st_gid)} $USER, then log in again"


def _name(look_up: Callable[[int], Any], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)
