"""The card, the libraries, and the kernel's limits.

Goes in: nvidia-smi's answer, installed packages, /proc.  Comes out: findings.  Imports neither
torch nor triton: their versions are read from what is installed.
"""

import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from lorad.cli.card import Card
from lorad.cli.output import human_bytes
from lorad.doctor.finding import Finding, fail, ok, warn

PROC = Path("/proc")
GIB = 1 << 30
#: inotify watches that other programs have may not be seen; so much of the limit is left to them.
SHARE_OF_WATCHES = 0.5


def card(found: Sequence[Card], why: str, device: str, *, running: bool) -> Iterator[Finding]:
    """`device` is `models.device`; `running`: a lorad has its share of the memory already."""
    if device == "cpu":
        yield ok("gpu", 'not needed: device = "cpu"')
        return
    if not found:
        told = fail if device == "cuda" else warn
        yield told("gpu", f"none: {why}", 'install the NVIDIA driver, or set device = "cpu"')
        return
    for number, one in enumerate(found):
        shown = f"{one.name}, {one.total_bytes / GIB:.0f} GiB, driver {one.driver}"
        used = one.used_bytes / max(one.total_bytes, 1)
        if number == 0 and not running and used > 0.05:
            text = f"{shown}; others use {one.used_bytes / GIB:.1f} GiB of it"
            yield warn("gpu", text, "nvidia-smi says who; lorad takes what they leave")
        else:
            yield ok("gpu", shown)


def libraries(device: str, has_card: bool) -> Iterator[Finding]:
    """torch and triton, and whether they go together and with the card."""
    torch, triton = version("torch"), version("triton")
    if torch is None:
        yield fail("torch", "torch is not installed here", "pip install torch triton")
        return
    if has_card and device != "cpu" and "+cpu" in torch:
        yield fail("torch", f"{torch} was built without CUDA", "pip install torch of a CUDA build")
        return
    yield ok("torch", torch)
    wanted = _triton_of_torch()
    if triton is None:
        told = fail if has_card and device != "cpu" else warn
        yield told("triton", "not installed: there are no kernels for a card", "pip install triton")
    elif wanted and triton != wanted:
        text = f"{triton}, and torch {torch} wants {wanted}"
        yield warn("triton", text, f"pip install triton=={wanted}")
    else:
        yield ok("triton", triton)


def version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _triton_of_torch() -> str:
    """What torch says that it was built with; "" if it names no version."""
    for line in metadata.requires("torch") or ():
        match = re.match(r"triton\s*\(?==\s*([\w.]+)", line)
        if match:
            return match[1]
    return ""


def inotify(inbox: Path | None, mode: str, proc: Path = PROC) -> Iterator[Finding]:
    """Do the kernel's limits suffice for every folder of the inbox?"""
    if inbox is None or mode in ("off", "polling"):
        yield ok("inotify", f'not used: [watch] mode = "{mode}"')
        return
    try:
        watches = int((proc / "sys/fs/inotify/max_user_watches").read_text())
        instances = int((proc / "sys/fs/inotify/max_user_instances").read_text())
    except (OSError, ValueError):
        yield warn("inotify", "its limits cannot be read; lorad looks every `[watch] rescan`")
        return
    folders = 1 + sum(1 for path in inbox.rglob("*") if path.is_dir()) if inbox.is_dir() else 1
    said = f"folders in the inbox: {folders}, max_user_watches {watches}"
    if instances < 1 or folders > watches * SHARE_OF_WATCHES:
        fix = f"sudo sysctl -w fs.inotify.max_user_watches={max(524288, 4 * folders)}"
        yield warn("inotify", f"{said}: lorad may have to look every `[watch] rescan`", fix)
    else:
        yield ok("inotify", said)


def limits(
    pid: int | None, pinned_bytes: int, connections: int, proc: Path = PROC
) -> Iterator[Finding]:
    """Memory that may be locked and files that may be open, of the daemon or, without one, of us.

    `pinned_bytes` is what the card's copies want locked; 0 without a card.
    """
    whose = "the daemon" if pid else "this shell"
    found = read_limits(proc / str(pid or "self") / "limits")
    if found is None:
        yield warn("limits", f"those of {whose} cannot be read", "run doctor as the daemon's user")
        return
    locked, files = found["Max locked memory"], found["Max open files"]
    shown = "any number of bytes" if locked is None else human_bytes(locked)
    if pinned_bytes and locked is not None and locked < pinned_bytes:
        text = f"{whose} may lock {shown}, [lora] ram_cache is {human_bytes(pinned_bytes)}"
        yield warn("memlock", text, "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited")
    else:
        yield ok("memlock", f"{whose} may lock {shown}")
    if files is not None and files < connections + 256:
        text = f"{whose} may open {files} files, [limits] connections is {connections}"
        yield warn("open files", text, f"LimitNOFILE={2 * connections} in the unit, or ulimit -n")
    else:
        yield ok("open files", f"{whose} may open {'any' if files is None else files}")


def read_limits(path: Path) -> dict[str, int | None] | None:
    """Soft limits by name; None is unlimited.  None instead of all if the file cannot be read."""
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:
        return None
    found: dict[str, int | None] = {}
    for line in lines:
        match = re.match(r"(Max [a-z ]+?)\s{2,}(\S+)", line)
        if match:
            found[match[1]] = int(match[2]) if match[2].isdecimal() else None
    return found
