"""The daemon behind its sockets: is it there, may we in, and is it of our version?

Goes in: a host, the paths of sockets, the groups that were configured.  Comes out: findings.
Connects, and sends GET /version; changes nothing.
"""

import grp
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from lorad import __version__
from lorad.caller import ApiError, Unreachable
from lorad.cli.reach import MAX_SOCKET_PATH, advise
from lorad.client import LoradClient
from lorad.doctor.finding import Finding, fail, ok, warn

PATIENCE = 5.0  # seconds for the daemon's answer


def daemon(client: LoradClient) -> Iterator[Finding]:
    """Reachable, and of which version."""
    try:
        server = client.version()
        reason = client.ready()
    except Unreachable as error:
        yield _unreachable(error)
        return
    except ApiError as error:
        yield fail("daemon", f"{client.host} is no lorad: {error}", "loractl -H unix:///PATH")
        return
    state = "ready" if not reason else f"not ready: {reason}"
    told = ok if not reason else warn
    yield told("daemon", f"{client.host} answers, {state}")
    if server.version == __version__:
        yield ok("version", f"{__version__} here and there, API {server.api}")
    else:
        yield warn(
            "version",
            f"loractl is {__version__}, the daemon {server.version}",
            "restart the daemon if lorad was upgraded under it, or use its own loractl",
        )


def _unreachable(error: Unreachable) -> Finding:
    advice = advise(error)
    message = f"{error.host}: {advice.cause or str(error).partition(': ')[2]}; {advice.why}"
    told = fail if advice.exit == 5 else warn
    return told("daemon", message, advice.hint)


def socket_file(name: str, path: Path, group: str = "") -> Iterator[Finding]:
    """One socket: its path, kind, mode, group, and whether somebody listens.

    `group` is the one that was configured; "" takes any.
    """
    check, size = f"{name} socket", len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        text = f"{path} has {size} bytes, {MAX_SOCKET_PATH} are possible"
        yield fail(check, text, f"choose a shorter `[{name}] socket`")
        return
    try:
        info = path.lstat()
    except FileNotFoundError:
        yield warn(check, f"{path} is not there", "lorad serve")
        return
    except OSError as error:
        yield fail(check, f"{path}: {error.strerror}", f"look at the folders above {path}")
        return
    if not stat.S_ISSOCK(info.st_mode):
        yield fail(check, f"{path} is no socket", "move it away, or name another path")
        return
    mode, owner = info.st_mode & 0o777, _group(info.st_gid)
    if mode & 0o002:
        text = f"everybody may connect to {path} ({mode:04o})"
        yield fail(check, text, f"chmod o-w {path}, and look who changed it")
        return
    if group and owner != group:
        text = f"{path} belongs to group {owner}, `[{name}] group` is {group}"
        yield warn(check, text, "restart lorad")
        return
    yield _listener(check, path, f"{path} ({mode:04o}, group {owner})")


def _listener(check: str, path: Path, shown: str) -> Finding:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PATIENCE)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            text = f"nobody listens on {shown}: it is stale"
            return warn(check, text, "lorad serve    (it removes a stale socket by itself)")
        except PermissionError:
            mine = ", ".join(_group(g) for g in sorted({os.getegid(), *os.getgroups()}))
            text = f"you may not connect to {shown}; your groups: {mine}"
            fix = f"sudo usermod -aG {_group(path.stat().st_gid)} $USER, then log in again"
            return (fail if check.startswith("admin") else warn)(check, text, fix)
        except OSError as error:
            return warn(check, f"{shown}: {error}", "loractl ping")
    return ok(check, shown)


def groups(configured: dict[str, str]) -> Iterator[Finding]:
    """Groups that sockets are to belong to.  {key: group}"""
    for key, group in configured.items():
        try:
            entry = grp.getgrnam(group)
        except KeyError:
            yield fail("groups", f"{key}: there is no group {group}", f"sudo groupadd -r {group}")
            continue
        if entry.gr_gid in {os.getegid(), *os.getgroups()} or os.geteuid() == 0:
            yield ok("groups", f"{group}: you are in it")
        else:
            fix = f"sudo usermod -aG {group} $USER, then log in again"
            yield warn("groups", f"{group}: you are not in it", fix)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
