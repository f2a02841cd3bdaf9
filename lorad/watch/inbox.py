"""What a folder of the inbox means: its adapter's name, and the wishes in its `lorad.toml`.

Goes in: a path below the inbox, and the text of a lorad.toml.  Comes out: an `InboxFolder`, always:
an illegal name is replaced by one that is made from the path, and a wrong lorad.toml becomes a
`problem` of that folder.  Opens nothing; `look.py` reads the disk.
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorad.spelling import MAX_LABELS, is_label

#: `inbox/name/` and `inbox/tenant/name/`; an adapter one level deeper is reported as misnamed.
MAX_DEPTH = 2
OPTIONS_FILE = "lorad.toml"
#: So many folders in an adapter's are told of; a saved project may hold thousands.
MAX_NESTED = 16
MAX_OPTIONS_BYTES = 64 * 1024

_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_KEYS = ("labels", "model", "pin", "priority")


@dataclass(frozen=True, slots=True)
class InboxOptions:
    """What lorad.toml asks for; None is "as it is"."""

    model: str | None = None
    pin: bool | None = None
    priority: int | None = None  # 0-100
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InboxFolder:
    """One adapter's folder.  `display_name` is the path below the inbox in printable ASCII;
    `problem`, if any, says in one line why the folder cannot be taken as it is."""

    path: Path
    name: str  # "name", "tenant/name", or "inbox:<12 hex>"
    tenant: str | None
    legal: bool
    display_name: str
    options: InboxOptions = field(default_factory=InboxOptions)
    problem: str = ""
    signature: str = ""  # of names, sizes, times and inodes: equal means unchanged
    nested: tuple[str, ...] = ()  # folders in it that look like adapters, in printable ASCII
    with_inbox: bool = False  # it is gone because the inbox itself is, or is another one


def describe(
    inbox: Path,
    folder: Path,
    toml: bytes | None,
    signature: str = "",
    nested: Sequence[str] = (),
) -> InboxFolder:
    """`toml` is the content of the folder's lorad.toml, None when there is none."""
    parts = folder.relative_to(inbox).parts
    legal = len(parts) <= MAX_DEPTH and all(_PART.fullmatch(part) for part in parts)
    options, problem = read_options(toml)
    return InboxFolder(
        path=folder,
        name="/".join(parts) if legal else _made_up("/".join(parts)),
        tenant=parts[0] if legal and len(parts) == 2 else None,
        legal=legal,
        display_name=printable("/".join(parts)),
        options=options,
        problem=problem,
        signature=signature,
        nested=tuple(map(printable, nested[:MAX_NESTED])),
    )


def printable(text: str) -> str:
    """ASCII without control characters, so that a name cannot drive a terminal; undecodable bytes
    show as \\xNN."""
    raw = "".join(f"\\x{ord(c) - 0xDC00:02x}" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)
    return "".join(
        c if " " <= c <= "~" else c.encode("unicode_escape", "surrogatepass").decode() for c in raw
    )


def read_options(toml: bytes | None) -> tuple[InboxOptions, str]:
    """(options, problem); with a problem the options are the default ones."""
    if toml is None:
        return InboxOptions(), ""
    if len(toml) > MAX_OPTIONS_BYTES:
        return InboxOptions(), f"{OPTIONS_FILE} has more than {MAX_OPTIONS_BYTES} bytes"
    try:
        return _options(tomllib.loads(toml.decode("utf-8"))), ""
    except (ValueError, RecursionError) as error:
        line = printable(" ".join(str(error).split()))[:200]
        return InboxOptions(), f"{OPTIONS_FILE}: {line or type(error).__name__}"


def _options(table: Mapping[str, Any]) -> InboxOptions:
    unknown = sorted(table.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    model, pin, priority = table.get("model"), table.get("pin"), table.get("priority")
    labels = table.get("labels", {})
    _need(model is None or isinstance(model, str), "model", "the name of a served model")
    _need(pin is None or isinstance(pin, bool), "pin", "true or false")
    _need(
        priority is None or (type(priority) is int and 0 <= priority <= 100),
        "priority",
        "a whole number from 0 to 100",
    )
    _need(
        isinstance(labels, dict)
        and len(labels) <= MAX_LABELS
        and all(is_label(*item) for item in labels.items()),
        "labels",
        f"a table of at most {MAX_LABELS} short texts",
    )
    return InboxOptions(model=model, pin=pin, priority=priority, labels=dict(labels))


def _need(holds: bool, key: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{key} must be {wanted}")


def _made_up(relative: str) -> str:
    """A stable name for a folder whose own is illegal."""
    return f"inbox:{hashlib.sha256(os.fsencode(relative)).hexdigest()[:12]}"
