"""Rows and records: how what the registry knows lies in its tables, both ways.

Goes in: rows of a SELECT, or records.  Comes out: frozen records, or the values of a row.  Asks
nothing and changes nothing.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import Row, Select, select

from engine.adapters.states import State
from engine.messages import PackedModule
from lorad.registry.models import adapters
from lorad.registry.models import tombstones as tombstones_table
from lorad.registry.records import AdapterRecord, PackedRecord, RevisionRecord


class _ModuleRow(msgspec.Struct, array_like=True):
    """A PackedModule in the `modules` column."""

    layer: int
    module: str
    rank: int
    scaling: float
    bias: bool = False
    gain: bool = False
    tokens: tuple[int, ...] = ()


# ----------------------------------------------------------------- rows to records
def select_adapters() -> Select[Any]:
    """The rows that `adapter_of` reads."""
    joined = adapters.outerjoin(tombstones_table, tombstones_table.c.name == adapters.c.name)
    return select(adapters, tombstones_table.c.digest).select_from(joined)


def adapter_of(row: Row[Any]) -> AdapterRecord:
    return AdapterRecord(
        name=row.name,
        tenant=row.tenant or None,
        model=row.model,
        stored_state=State(row.state),
        pinned=row.pinned,
        priority=row.priority,
        labels=msgspec.json.decode(row.labels, type=dict[str, str]),
        source=row.source,
        serving_rev=row.serving_rev,
        candidate_rev=row.candidate_rev,
        reason=row.reason,
        reason_message=row.reason_message,
        display_name=row.display_name,
        created_at=row.created_at,
        last_used_at=row.last_used_at or None,
        tombstone_digest=row.digest,
    )


def revision_of(row: Row[Any], files: Mapping[str, PackedRecord]) -> RevisionRecord:
    return RevisionRecord(
        rev=row.rev,
        rank=row.rank,
        ranks=msgspec.json.decode(row.ranks, type=dict[str, int]),
        alpha=row.alpha,
        rslora=row.rslora,
        targets=msgspec.json.decode(row.targets, type=tuple[str, ...]),
        num_layers=row.num_layers,
        dtype=row.dtype,
        file_bytes=row.file_bytes,
        changes_kv=row.changes_kv,
        modules=decode_modules(row.modules),
        alora_tokens=msgspec.json.decode(row.alora_tokens, type=tuple[int, ...]),
        num_tokens=row.num_tokens,
        own_tokenizer=row.own_tokenizer,
        base_text=row.base_text,
        warnings=msgspec.json.decode(row.warnings, type=tuple[str, ...]),
        packed=files,
        created_at=row.created_at,
    )


@lru_cache(maxsize=512)
def decode_modules(text: str) -> tuple[PackedModule, ...]:
    """Adapters of one recipe share one tuple: 10,000 of them would be millions of objects."""
    rows = msgspec.json.decode(text, type=list[_ModuleRow])
    return tuple(PackedModule(*msgspec.structs.astuple(row)) for row in rows)


# ----------------------------------------------------------------- records to rows
def of_adapter(record: AdapterRecord, generation: int) -> dict[str, Any]:
    """All but its name."""
    return {
        "tenant": record.tenant or "",
        "model": record.model,
        "state": record.stored_state,
        "pinned": record.pinned,
        "priority": record.priority,
        "labels": msgspec.json.encode(record.labels).decode(),
        "source": record.source,
        "serving_rev": record.serving_rev,
        "candidate_rev": record.candidate_rev,
        "reason": record.reason,
        "reason_message": record.reason_message,
        "display_name": record.display_name,
        "created_at": record.created_at,
        "last_used_at": record.last_used_at or 0.0,
        "generation": generation,
    }


def of_revision(revision: RevisionRecord, now: float) -> dict[str, Any]:
    """`now` is when a new one was made, in seconds since the epoch."""
    return {
        "rev": revision.rev,
        "rank": revision.rank,
        "ranks": msgspec.json.encode(dict(revision.ranks)).decode(),
        "alpha": revision.alpha,
        "rslora": revision.rslora,
        "targets": msgspec.json.encode(revision.targets).decode(),
        "num_layers": revision.num_layers,
        "dtype": revision.dtype,
        "file_bytes": revision.file_bytes,
        "changes_kv": revision.changes_kv,
        "warnings": msgspec.json.encode(revision.warnings).decode(),
        "modules": encode_modules(revision.modules),
        "alora_tokens": msgspec.json.encode(revision.alora_tokens).decode(),
        "num_tokens": revision.num_tokens,
        "own_tokenizer": revision.own_tokenizer,
        "base_text": revision.base_text,
        "created_at": revision.created_at or now,
    }


def of_settings(
    labels: Mapping[str, str] | None, pin: bool | None, priority: int | None
) -> dict[str, Any]:
    """Of those that are not None."""
    values: dict[str, Any] = {}
    if labels is not None:
        values["labels"] = msgspec.json.encode(dict(labels)).decode()
    if pin is not None:
        values["pinned"] = pin
    if priority is not None:
        values["priority"] = priority
    return values


def encode_modules(modules: Iterable[PackedModule]) -> str:
    """The `modules` column: rows without field names, a tenth of the bytes that matter."""
    found = [
        (m.layer, m.module, m.rank, m.scaling)
        + ((m.bias, m.gain) if m.bias or m.gain or m.tokens else ())
        + ((m.tokens,) if m.tokens else ())
        for m in modules
    ]
    return msgspec.json.encode(found).decode()
