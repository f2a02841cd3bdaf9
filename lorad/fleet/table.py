"""Table: what every adapter's name means in the whole cluster, at one generation.

Goes in: a table, and what is to change.  Comes out: the next one, or its bytes and back.  A table
never changes; damage is refused in one line, whatever was cut or turned over.  So is a field that a
later lorad wrote: the next table from here would be without it.  Pure.
"""

import hashlib
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lorad.errors import LoradError
from lorad.spelling import is_reference, nearest, split_digest

SCHEMA = "lorad/catalog-table.v1"
#: Earlier contents of a name that are kept, for going back.
KEPT = 4


def unknown(name: str, known: Iterable[str]) -> LoradError:
    """What is told of a name that the catalog does not have."""
    near = nearest(name, known)
    return LoradError(
        "model_not_found",
        f"no adapter named {name!r} in the catalog",
        hint=f"did you mean {near}?" if near else "loractl ls",
    )


class Content(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some files, and the revision that daemons make of them."""

    content: str  # digest of the files
    rev: str


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One name."""

    name: str
    content: str
    rev: str
    model: str
    source: str = "upload"
    pin: bool = False
    priority: int | None = None  # None: the daemons' own
    labels: dict[str, str] = {}
    drained: bool = False  # by an operator: no gateway takes requests for it
    rank: int | None = None
    num_bytes: int | None = None  # packed
    targets: tuple[str, ...] = ()
    created_at: str = ""
    moved_at: str = ""  # when the name came to mean this
    generation: int = 0  # of the table that first said so
    before: tuple[Content, ...] = ()  # the newest first

    @property
    def id(self) -> str:
        return f"{self.name}@{self.rev}"


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`entries` by name."""

    schema: str = SCHEMA
    generation: int = 0
    time: str = ""
    author: str = ""  # the gateway that wrote it, and once of its own: no two have the same bytes
    what: str = ""  # in words, for people
    entries: dict[str, Entry] = {}

    def contents(self) -> set[str]:
        """Digests of all files that are needed, for going back too."""
        found = {entry.content for entry in self.entries.values()}
        return found | {c.content for entry in self.entries.values() for c in entry.before}


def find(table: Table, model: str) -> Entry | None:
    """What a request means that asks for `model`: a name, or name@digest of what it means now."""
    entry = table.entries.get(model)
    if entry is not None or is_reference(model):
        return entry
    name, digest = split_digest(model)
    entry = table.entries.get(name)
    if entry is None or len(digest) < 8 or not entry.rev.startswith(digest):
        return None
    return entry


def moved(table: Table, entry: Entry) -> Mapping[str, Entry]:
    """The entries with this one; what it replaces is remembered in it."""
    old = table.entries.get(entry.name)
    before: tuple[Content, ...] = ()
    if old is not None:
        entry = replace(entry, created_at=old.created_at)
        earlier = (Content(content=old.content, rev=old.rev), *old.before)
        before = tuple(c for c in earlier if c.content != entry.content)[:KEPT]
    entry = replace(entry, generation=table.generation + 1, before=before)
    return {**table.entries, entry.name: entry}


def without(table: Table, name: str) -> Mapping[str, Entry]:
    return {n: entry for n, entry in table.entries.items() if n != name}


def encode(table: Table) -> bytes:
    """A line with the digest of the rest, and the rest."""
    body = msgspec.json.encode(table)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(data: bytes, what: str) -> Table:
    """Raises LoradError source_corrupt."""
    digest, newline, body = data.partition(b"\n")
    if not newline or hashlib.sha256(body).hexdigest().encode() != digest:
        raise damaged(what)
    try:
        table = msgspec.json.decode(body, type=Table)
    except msgspec.DecodeError:
        raise damaged(what, "it is of another version of lorad") from None
    if table.schema != SCHEMA:
        raise damaged(what, f"it is {table.schema[:40]!r}, and this lorad reads {SCHEMA}")
    return table


def damaged(what: str, why: str = "it was cut off or changed") -> LoradError:
    hint = "what was served is served on; restore the file, or remove it to go back one generation"
    return LoradError("source_corrupt", f"{what} cannot be used: {why}", hint=hint)
