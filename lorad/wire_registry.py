"""JSON bodies of `/admin/v1/registry/...`, and the lines that `loractl registry export` writes.

Sizes are bytes, times RFC 3339.  Fields are only ever added within v1.  Knows no SQL.
"""

from typing import Literal

from msgspec import Struct

CHECK_SCHEMA = "lorad/registry-check.v1"
EXPORT_SCHEMA = "lorad/registry-export.v1"
IMPORT_SCHEMA = "lorad/registry-import.v1"
RESTORE_SCHEMA = "lorad/registry-restore.v1"


class RegistryEntry(Struct, frozen=True, kw_only=True):
    """One name, as a line of an export.  `rev` is what it serves; None serves nothing."""

    name: str
    tenant: str | None = None
    model: str = ""
    source: str = ""
    rev: str | None = None
    state: str = ""  # as stored: registered, quarantined or missing
    pinned: bool = False
    priority: int = 50
    labels: dict[str, str] = {}


class RegistryExport(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/registry/export`, by name."""

    schema: str = EXPORT_SCHEMA
    items: tuple[RegistryEntry, ...]


class RegistryImport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /admin/v1/registry/import`."""

    items: tuple[RegistryEntry, ...]
    dry_run: bool = False


class Imported(Struct, frozen=True, kw_only=True):
    """What became of an entry.  `lacking`: neither the name nor the files of its revision are
    here; `other_rev`: the name serves other content, and only its settings were taken."""

    name: str
    ok: bool
    action: Literal["created", "changed", "unchanged", "other_rev", "lacking", "failed"]
    code: str = ""
    message: str = ""
    hint: str = ""


class RegistryImported(Struct, frozen=True, kw_only=True):
    """Answer to an import, in the order of its lines."""

    schema: str = IMPORT_SCHEMA
    items: tuple[Imported, ...]
    dry_run: bool = False


class RegistryBackup(Struct, frozen=True, kw_only=True):
    """One of the rolling copies beside the registry, newest first."""

    file: str
    num_bytes: int
    good: bool


class RegistryCheck(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/registry/check`.  `problems` [] is a sound registry."""

    schema: str = CHECK_SCHEMA
    ok: bool
    path: str
    version: int  # of the schema of its tables
    generation: int  # of its last change
    adapters: int
    revisions: int
    num_bytes: int
    backups: tuple[RegistryBackup, ...]
    problems: tuple[str, ...]


class RegistryRestored(Struct, frozen=True, kw_only=True):
    """What a restore or a rebuild left.  `lost` and `notes` are sentences for people."""

    schema: str = RESTORE_SCHEMA
    names: int
    kept_aside: str | None
    restored_from: str | None
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
