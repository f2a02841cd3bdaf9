"""Every change of the registry, as a function of an open write transaction.

Goes in: a connection that holds the write lock, a `Stamp`, plain values.  Comes out: what was
done.  Each leaves the rows whole, one audit row, and an event if something changed; the caller
commits.  model_not_found for a name that is not there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from engine.adapters.states import State
from lorad.errors import LoradError
from lorad.registry import failpoints, queries, rows
from lorad.registry.journal import Stamp, note
from lorad.registry.models import adapters, facts, history, packed, revisions
from lorad.registry.models import tombstones as tombstones_table
from lorad.registry.records import AdapterRecord, Registered, Removed, RevisionRecord, TextFacts
from lorad.registry.store import Store

DEFAULT_PRIORITY = 50
#: Columns of a revision that the base's files decide, too.
TEXT_FACTS = tuple(field.name for field in fields(TextFacts))


# ----------------------------------------------------------------- names and revisions
def register(
    connection: Connection,
    at: Stamp,
    *,
    name: str,
    tenant: str | None,
    model: str,
    source: str,
    labels: Mapping[str, str] | None,
    pin: bool | None,
    priority: int | None,
    revision: RevisionRecord,
    as_candidate: bool,
) -> Registered:
    """Point `name` at `revision`, as its candidate or at once.  None leaves a setting as it is."""
    before = queries.adapter(connection, name)
    _add_revision(connection, at, revision)
    failpoints.hit("register.revision_inserted")
    rev = revision.rev
    serves = before is not None and before.serving_rev == rev
    waits = before is not None and before.candidate_rev == rev
    candidate = as_candidate and not serves
    # a name whose files are gone stays missing until the candidate takes over
    gone = candidate and before is not None and before.stored_state is State.MISSING
    values: dict[str, Any] = {
        "tenant": tenant or "",
        "model": model,
        "source": source,
        "state": State.MISSING if gone else State.REGISTERED,
        "reason": None,
        "reason_message": None,
        "display_name": None,
        "candidate_rev": rev if candidate else None,
    }
    if not candidate:
        values["serving_rev"] = rev
    values |= rows.of_settings(labels, pin, priority)
    if before is None:
        defaults = {"labels": "{}", "pinned": False, "priority": DEFAULT_PRIORITY}
        row = defaults | values | {"name": name, "created_at": at.now, "generation": at.generation}
        connection.execute(insert(adapters).values(row))
    else:
        _update(connection, at, name, values)
    if before is not None and not candidate and not serves:
        _remember(connection, at, before)
    _unbury(connection, name, source)
    new, unchanged = before is None, serves or (candidate and waits)
    note(
        connection,
        at,
        "adapter.added" if new else "adapter.candidate" if candidate else "adapter.replaced",
        name,
        rev,
        action="register",
        cause=source,
        message=f"rank {revision.rank}, {revision.file_bytes} bytes",
        changed=not unchanged,
    )
    return Registered(
        name=name,
        rev=rev,
        created=new,
        unchanged=unchanged,
        serving=not candidate,
        replaced_rev=before.serving_rev if before and not candidate and not serves else None,
    )


def promote(connection: Connection, at: Stamp, name: str, rev: str) -> bool:
    """The candidate `rev` serves from now on; False if it does already.  conflict for another."""
    before = _need(connection, name)
    if before.serving_rev == rev and before.candidate_rev is None:
        note(connection, at, "", name, rev, action="promote", changed=False)
        return False
    if rev not in (before.candidate_rev, before.serving_rev):
        raise LoradError(
            "conflict",
            f"{rev[:12]} is not the candidate of {name!r}",
            hint=f"loractl show {name}",
        )
    values: dict[str, Any] = {
        "serving_rev": rev,
        "candidate_rev": None,
        "state": State.REGISTERED,
        "reason": None,
        "reason_message": None,
    }
    _update(connection, at, name, values)
    if before.serving_rev != rev:
        _remember(connection, at, before)
    old = before.serving_rev
    kind, text = ("adapter.replaced", f"was {old[:12]}") if old else ("adapter.promoted", "")
    note(connection, at, kind, name, rev, action="promote", message=text)
    return True


def fail_candidate(connection: Connection, at: Stamp, name: str, reason: str, message: str) -> bool:
    """Drop the candidate and keep the reason; what serves goes on.  True if a name serves still.

    A name with nothing but its candidate is quarantined.
    """
    before = _need(connection, name)
    state = before.stored_state if before.serving_rev else State.QUARANTINED
    values = {
        "candidate_rev": None,
        "state": state,
        "reason": reason,
        "reason_message": message,
    }
    _update(connection, at, name, values)
    note(
        connection,
        at,
        "adapter.rejected",
        name,
        before.candidate_rev or "",
        action="fail_candidate",
        level="warn",
        cause=reason,
        message=message,
    )
    return before.serving_rev is not None


def quarantine(
    connection: Connection,
    at: Stamp,
    *,
    name: str,
    source: str,
    reason: str,
    message: str,
    display_name: str | None,
    tenant: str | None,
    model: str,
) -> bool:
    """File what was refused under `name`.  True if the name serves an earlier revision still."""
    before = queries.adapter(connection, name)
    if before is not None:
        return fail_candidate(connection, at, name, reason, message)
    row = {
        "name": name,
        "tenant": tenant or "",
        "model": model,
        "state": State.QUARANTINED,
        "pinned": False,
        "priority": DEFAULT_PRIORITY,
        "labels": "{}",
        "source": source,
        "reason": reason,
        "reason_message": message,
        "display_name": display_name,
        "created_at": at.now,
        "generation": at.generation,
    }
    connection.execute(insert(adapters).values(row))
    note(
        connection,
        at,
        "adapter.rejected",
        name,
        "",
        action="quarantine",
        level="warn",
        cause=reason,
        message=message,
    )
    return False


def set_presence(
    connection: Connection, at: Stamp, name: str, *, present: bool, only: str | None = None
) -> bool:
    """missing and back; False if it was so already, or is quarantined.  Pointers stay.

    `only`: nothing changes if the name serves another revision by now.
    """
    before = _need(connection, name)
    after = State.REGISTERED if present else State.MISSING
    word = "present" if present else "missing"
    level = "info" if present else "warn"
    rev = before.serving_rev or ""
    moved_on = only is not None and before.serving_rev != only
    if moved_on or before.stored_state in (after, State.QUARANTINED):
        note(connection, at, "", name, rev, action=f"mark_{word}", changed=False)
        return False
    _update(connection, at, name, {"state": after})
    note(connection, at, f"adapter.{word}", name, rev, action=f"mark_{word}", level=level)
    return True


def condemn(
    connection: Connection, at: Stamp, name: str, rev: str, reason: str, message: str
) -> bool:
    """What `name` serves cannot be served: quarantined, pointers stay.  False if it serves another
    revision by now."""
    before = _need(connection, name)
    if before.serving_rev != rev or before.stored_state is not State.REGISTERED:
        note(connection, at, "", name, rev, action="condemn", changed=False)
        return False
    values = {"state": State.QUARANTINED, "reason": reason, "reason_message": message}
    _update(connection, at, name, values)
    note(
        connection,
        at,
        "adapter.rejected",
        name,
        rev,
        action="condemn",
        level="warn",
        cause=reason,
        message=message,
    )
    return True


def change_settings(
    connection: Connection,
    at: Stamp,
    name: str,
    *,
    labels: Mapping[str, str] | None = None,
    pin: bool | None = None,
    priority: int | None = None,
) -> bool:
    """Set what is not None; `labels` replaces the whole mapping.  False if nothing differs."""
    before = _need(connection, name)
    if priority is not None and not 0 <= priority <= 100:
        raise LoradError(
            "invalid_value", f"priority {priority}: must be 0 to 100", param="priority"
        )
    words = []
    if pin is not None and pin != before.pinned:
        words.append("pin.set" if pin else "pin.cleared")
    if priority is not None and priority != before.priority:
        words.append("priority.set")
    if labels is not None and dict(labels) != dict(before.labels):
        words.append("labels.set")
    if words:
        _update(connection, at, name, rows.of_settings(labels, pin, priority))
    rev = before.serving_rev or ""
    for word in words or ["settings.unchanged"]:
        text = f"priority {before.priority} -> {priority}" if word == "priority.set" else ""
        note(connection, at, word, name, rev, action=word, message=text, changed=bool(words))
    return bool(words)


def remove(connection: Connection, at: Stamp, name: str, digest: str | None) -> Removed:
    """Forget `name`; `digest` of the source's content keeps that from coming back by itself.

    Its revisions stay until they are collected.
    """
    before = _need(connection, name)
    connection.execute(delete(adapters).where(adapters.c.name == name))
    if digest is not None:
        values = {"source": before.source, "digest": digest, "removed_at": at.now}
        row = upsert(tombstones_table).values(name=name, **values)
        connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=values))
    rev = before.serving_rev or ""
    note(connection, at, "adapter.removed", name, rev, action="remove")
    return Removed(name=name, serving_rev=before.serving_rev, candidate_rev=before.candidate_rev)


def note_texts(
    connection: Connection, at: Stamp, found: Mapping[str, TextFacts]
) -> tuple[str, ...]:
    """Whose tokenizer each revision has, as its files say beside the present base's; those of which
    something else was known.  They alone are told: all others are as they were."""
    changed = []
    for rev, text in found.items():
        this = revisions.c.rev == rev
        row = connection.execute(select(revisions).where(this)).first()
        if row is None:
            continue
        connection.execute(update(revisions).where(this).values(asdict(text)))
        if (row.num_tokens, row.own_tokenizer) != (text.num_tokens, text.own_tokenizer):
            changed.append(rev)
            kind, said = "adapter.tokenizer", text.told
            note(connection, at, kind, "", rev, action="note_texts", message=said)
    return tuple(changed)


def drop_unused(connection: Connection, at: Stamp, leased: set[str]) -> tuple[str, ...]:
    """Forget the revisions that no name points to and nobody has leased; returns them."""
    unused = queries.unused_revs(connection, leased)
    for rev in sorted(unused):
        connection.execute(delete(revisions).where(revisions.c.rev == rev))
    if unused:  # every start looks: that there was nothing is no news
        text = f"{len(unused)} revisions"
        note(connection, at, "store.collected", "", "", action="collect", message=text)
    return tuple(sorted(unused))


def settle_files(
    connection: Connection, at: Stamp, store: Store, missing: Iterable[str]
) -> tuple[str, ...]:
    """Names whose serving files are gone become missing; forget packed files that are gone."""
    for rev, layout in connection.execute(select(packed.c.rev, packed.c.layout)).all():
        if not store.packed(rev, layout).is_file():
            lost = (packed.c.rev == rev) & (packed.c.layout == layout)
            connection.execute(delete(packed).where(lost))
    names = []
    for rev in missing:
        serving = select(adapters.c.name).where(adapters.c.serving_rev == rev)
        for name in connection.execute(serving).scalars().all():
            if set_presence(connection, at, name, present=False):
                names.append(name)
    return tuple(names)


def touch_used(connection: Connection, used: Mapping[str, float]) -> None:
    """Raise the time of last use; names that are gone are ignored.  Not a change: no audit row."""
    for name, time in used.items():
        later = (adapters.c.name == name) & (adapters.c.last_used_at < time)
        connection.execute(update(adapters).where(later).values(last_used_at=time))


# ----------------------------------------------------------------- restoring
def restore(
    connection: Connection, generation: int, record: AdapterRecord, found: Iterable[RevisionRecord]
) -> None:
    """Write a name as it was, with its revisions, in place of what is there."""
    for revision in found:
        _add_revision(connection, Stamp(revision.created_at, generation, ""), revision)
    values = rows.of_adapter(record, generation)
    row = upsert(adapters).values(name=record.name, **values)
    connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=values))


def discard_name(connection: Connection, name: str) -> bool:
    """Take a name away without a word: it was removed once already."""
    return connection.execute(delete(adapters).where(adapters.c.name == name)).rowcount > 0


def set_generation(connection: Connection, value: int) -> None:
    connection.execute(update(facts).where(facts.c.key == "generation").values(value=value))


# ----------------------------------------------------------------- pieces
def _need(connection: Connection, name: str) -> AdapterRecord:
    found = queries.adapter(connection, name)
    if found is None:
        raise LoradError("model_not_found", f"no adapter named {name!r}", hint="loractl ls")
    return found


def _update(connection: Connection, at: Stamp, name: str, values: Mapping[str, Any]) -> None:
    change = dict(values) | {"generation": at.generation}
    connection.execute(update(adapters).where(adapters.c.name == name).values(change))


def _add_revision(connection: Connection, at: Stamp, revision: RevisionRecord) -> None:
    """The same content under two names is one row: the first stays.  Whose vocabulary it has is
    what was found last, beside the base's files as they are now."""
    row = rows.of_revision(revision, at.now)
    new = upsert(revisions).values(row)
    found = {name: row[name] for name in TEXT_FACTS}
    connection.execute(new.on_conflict_do_update(index_elements=["rev"], set_=found))


def _remember(connection: Connection, at: Stamp, before: AdapterRecord) -> None:
    if before.serving_rev is not None:
        row = {"name": before.name, "rev": before.serving_rev, "replaced_at": at.now}
        connection.execute(insert(history).values(row))


def _unbury(connection: Connection, name: str, source: str) -> None:
    """A tombstone holds for the source that it was made for."""
    same = (tombstones_table.c.name == name) & (tombstones_table.c.source == source)
    connection.execute(delete(tombstones_table).where(same))
