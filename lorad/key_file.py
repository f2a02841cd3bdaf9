"""Keys in a file: who may use a plane over TCP, where no kernel says who is at the other end.

Goes in: a path.  Comes out: `Keys`, or BadConfig that names the setting and the line, never a key.
A file that others may read is refused.  One key a line, perhaps with a name before it; `#` begins a
comment.  Kept as digests.
"""

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lorad.config import Settings
from lorad.errors import BadConfig

#: Where systemd puts credentials: readable by one service alone, whatever the mode says.
CREDENTIALS = Path("/run/credentials")
SHORTEST = 20
_LINE = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]{1,64})\s+)?(?P<key>[\x21-\x7e]{1,512})")


@dataclass(frozen=True, slots=True)
class Keys:
    """Digest -> name.  Looking up a digest tells nothing of a key by the time it takes."""

    names: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.names)

    def name_of(self, key: str) -> str | None:
        """None: no such key."""
        return self.names.get(_digest(key)) if key else None


NONE = Keys({})


def of_settings(settings: Settings) -> tuple[Keys, Keys]:
    """For the inference and the admin routes; none where TCP is off.  Raises BadConfig."""
    tcp = settings.tcp
    if not tcp.enabled:
        return NONE, NONE
    return (
        read(tcp.api_keys_file, "tcp.api_keys_file"),
        read(tcp.admin_keys_file, "tcp.admin_keys_file"),
    )


def read(path: str, setting: str) -> Keys:
    """The keys of a file; "" has none.  Raises BadConfig."""
    if not path:
        return NONE
    lines = _lines(Path(path), setting)
    names: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.partition(" #")[0].strip()) or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        where = f"{setting}: line {number} of {path}"
        if match is None:
            raise BadConfig(f"{where} is no key", hint="write KEY, or NAME KEY")
        if len(match["key"]) < SHORTEST:
            raise BadConfig(
                f"{where} is shorter than {SHORTEST} characters", hint="openssl rand -base64 32"
            )
        names[_digest(match["key"])] = match["name"] or f"line {number}"
    if not names:
        raise BadConfig(f"{setting}: {path} holds no key", hint="openssl rand -base64 32 > FILE")
    return Keys(names)


def _lines(path: Path, setting: str) -> list[str]:
    try:
        with open(path, encoding="ascii", opener=_without_waiting) as file:
            _check_private(os.fstat(file.fileno()), path, setting)
            return file.read(1 << 20).splitlines()
    except OSError as error:
        raise BadConfig(
            f"{setting}: {path}: {error.strerror or error}",
            hint="check the path, and who may read it",
        ) from None
    except UnicodeError:
        raise BadConfig(
            f"{setting}: {path}: keys are ASCII text", hint="openssl rand -base64 32"
        ) from None


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to would hold up the start, and every reload after this one."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_private(found: os.stat_result, path: Path, setting: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BadConfig(f"{setting}: {path} is not a file", hint="name a file with a key a line")
    if found.st_uid not in (0, os.geteuid()):
        raise BadConfig(
            f"{setting}: {path} belongs to uid {found.st_uid}", hint=f"chown it to {os.geteuid()}"
        )
    allowed = 0o440 if CREDENTIALS in path.parents else 0o600
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~(allowed | 0o600):
        raise BadConfig(
            f"{setting}: others may read {path} (mode {mode:04o})", hint=f"chmod 600 {path}"
        )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
