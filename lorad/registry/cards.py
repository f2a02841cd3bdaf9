"""One small card a name, beside the store: enough to rebuild the registry without registry.db.

Goes in: what a committed write left of a name.  Comes out: the same, after the database was lost
or went back in time (a deleted WAL file, an old copy put in its place).  The database is the
truth; a card follows each commit, unsynced, and `generation` says how far the cards have come.
Knows no SQL.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from lorad.registry import failpoints
from lorad.registry.records import AdapterRecord, RevisionRecord, TenantRecord


class Card(Struct, frozen=True, kw_only=True):
    """State of `name` after write transaction `generation`; `adapter` None: it was removed."""

    name: str
    generation: int
    adapter: AdapterRecord | None


class TenantsCard(Struct, frozen=True, kw_only=True):
    """All tenants after write transaction `generation`.  Without it a lost database would mean
    that there are none, and that everybody may use everything."""

    generation: int
    tenants: tuple[TenantRecord, ...]


class Cards:
    """The folder of cards.  Written by the registry's writing thread, read before it starts."""

    def __init__(self, directory: Path) -> None:
        self._names = directory / "names"
        self._revisions = directory / "revisions"
        self._counter = directory / "generation"
        self._tenants = directory / "tenants.json"

    def prepare(self) -> None:
        """Make the folders."""
        self._names.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._revisions.mkdir(mode=0o750, exist_ok=True)

    def generation(self) -> int:
        """The last transaction that the cards have seen; 0 without any, or unreadable."""
        try:
            return int(self._counter.read_text())
        except (OSError, ValueError):
            return 0

    def write(self, cards: Iterable[Card], generation: int) -> None:
        """Replace these cards, then raise the counter: it never runs ahead of them."""
        for card in cards:
            _replace(self._path(card.name), msgspec.json.encode(card))
        failpoints.hit("cards.written")
        _replace(self._counter, str(generation).encode())

    def write_tenants(self, card: TenantsCard) -> None:
        """Replace it; it holds digests of keys, and is for the daemon's user alone."""
        _replace(self._tenants, msgspec.json.encode(card), mode=0o600)

    def read_tenants(self) -> TenantsCard | None:
        """None if there is none; raises OSError or MsgspecError for one that cannot be read."""
        if not self._tenants.exists():
            return None
        return msgspec.json.decode(self._tenants.read_bytes(), type=TenantsCard)

    def read(self) -> tuple[list[Card], list[str]]:
        """Every card that can be read, and the file names of those that cannot."""
        cards, broken = [], []
        for path in sorted(self._names.glob("*.json")):
            try:
                cards.append(msgspec.json.decode(path.read_bytes(), type=Card))
            except (OSError, msgspec.MsgspecError):
                broken.append(path.name)
        return cards, broken

    def names(self) -> set[str]:
        """Names that have a card, those of removed adapters included."""
        return {unquote(path.stem) for path in self._names.glob("*.json")}

    def write_revision(self, revision: RevisionRecord) -> None:
        """Facts of a revision, which hardly ever change: a card that says the same stays."""
        path, kept = self._revisions / f"{revision.rev}.json", replace(revision, packed={})
        if self.read_revision(revision.rev) != kept:
            _replace(path, msgspec.json.encode(kept))

    def read_revision(self, rev: str) -> RevisionRecord | None:
        """None if the card is absent or unreadable."""
        try:
            data = (self._revisions / f"{rev}.json").read_bytes()
            return msgspec.json.decode(data, type=RevisionRecord)
        except (OSError, msgspec.MsgspecError):
            return None

    def drop_revisions(self, revs: Iterable[str]) -> None:
        for rev in revs:
            (self._revisions / f"{rev}.json").unlink(missing_ok=True)

    def forget_removed(self, live: set[str], before: float) -> None:
        """Drop cards of names outside `live` that are older than `before`: no backup knows them."""
        kept = {self._path(name).name for name in live}
        for path in self._names.glob("*.json"):
            if path.name not in kept and path.stat().st_mtime < before:
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._names / f"{quote(name, safe='')}.json"


def _replace(path: Path, data: bytes, mode: int = 0o640) -> None:
    """Readers see the old or the new bytes.  Unsynced: a card may lag behind after a power cut."""
    temporary = path.with_suffix(".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
    os.replace(temporary, path)
