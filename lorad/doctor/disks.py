"""The folders that lorad writes to, and its unit.

Goes in: paths.  Comes out: findings.  Writes nothing: what may be written to is asked of the
kernel, for this user alone.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lorad.disk import free_bytes, mount_of
from lorad.doctor.finding import Finding, fail, ok, warn

GIB = 1 << 30
#: Less than this is soon nothing: an adapter of an 8B model at rank 64 takes 0.6 GiB, twice.
SCARCE_BYTES = 2 * GIB
#: What a database and a few lines always need.
LEAST_BYTES = 8 << 20
#: Where units lie, the administrator's first.
SYSTEM_UNITS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system")
USER_UNITS = ("/etc/systemd/user", "/usr/lib/systemd/user")


def folders(wanted: Mapping[str, Path], *, ours: bool) -> Iterator[Finding]:
    """{what: path}.  `ours`: the daemon runs, or will run, as this user."""
    for what, path in wanted.items():
        there = _nearest(path)
        free = free_bytes(there)
        shown = f"{path}, {free / GIB:.1f} GiB free on {mount_of(there)}"
        if ours and not os.access(there, os.W_OK | os.X_OK):
            yield fail(f"{what} folder", f"{there} may not be written to", f"chown it: {there}")
        elif free < LEAST_BYTES:
            yield fail(f"{what} folder", shown, f"free space on {mount_of(there)}")
        elif free < SCARCE_BYTES:
            yield warn(f"{what} folder", shown, "loractl gc --dry-run, or free space there")
        else:
            yield ok(f"{what} folder", shown)


def local_disk(state: Path) -> Iterator[Finding]:
    """SQLite's log is not safe on a network file system."""
    from lorad.errors import RegistryUnusable
    from lorad.registry.migrate import refuse_network_filesystem

    try:
        refuse_network_filesystem(_nearest(state))
    except RegistryUnusable as error:
        yield fail("state folder", error.message, error.hint)


def _nearest(path: Path) -> Path:
    """The folder itself, or the one that it would be made in."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def unit(
    home: Path | None,
    system: bool,
    drain_timeout: float,
    *,
    booted: Path = Path("/run/systemd/system"),
    places: Sequence[str] | None = None,
) -> Iterator[Finding]:
    """The service unit: is there one, and does it fit?  `booted` exists where systemd runs."""
    if not booted.is_dir():
        yield ok("unit", "systemd does not run here")
        return
    if places is None:
        own = [] if system or home is None else [str(home / ".config/systemd/user")]
        places = [*own, *(SYSTEM_UNITS if system else (*USER_UNITS, *SYSTEM_UNITS))]
    found = [path for place in places if (path := Path(place) / "lorad.service").is_file()]
    if not found:
        yield warn("unit", "there is no lorad.service", "docs/howto/systemd.md has one")
        return
    try:
        text = found[0].read_text()
    except OSError as error:
        yield warn("unit", f"{found[0]}: {error.strerror}")
        return
    wrong = list(_unfit(text, drain_timeout))
    for message, fix in wrong:
        yield warn("unit", f"{found[0]}: {message}", f"{fix}, then systemctl daemon-reload")
    if not wrong:
        yield ok("unit", str(found[0]))


def _unfit(text: str, drain_timeout: float) -> Iterator[tuple[str, str]]:
    values = dict(re.findall(r"(?m)^\s*(\w+)\s*=\s*(.*?)\s*$", text))
    if not values.get("Type", "simple").startswith("notify"):
        yield "it does not wait until lorad is ready", "Type=notify"
    stop = seconds(values.get("TimeoutStopSec", "90"))
    if stop is not None and stop <= drain_timeout:
        text = f"TimeoutStopSec is {stop:g} s, a drain may take {drain_timeout:g} s"
        yield text, f"TimeoutStopSec={drain_timeout + 15:g}"
    if values.get("PrivateDevices", "no").lower() in ("yes", "true", "1", "on"):
        yield "PrivateDevices hides the card", "PrivateDevices=no"
    if values.get("MemoryDenyWriteExecute", "no").lower() in ("yes", "true", "1", "on"):
        yield "MemoryDenyWriteExecute forbids compiled kernels", "MemoryDenyWriteExecute=no"


def seconds(text: str) -> float | None:
    """systemd's `45`, `45s`, `1min 30s`; None for infinity and what else is no number."""
    units = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    if not parts or any(unit not in units for _, unit in parts):
        return None
    return sum(float(number) * units[unit] for number, unit in parts)
