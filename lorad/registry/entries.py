"""Names as lines that can be taken to another host: what an import of one would do.

Goes in: records of the registry, lines of an export.  Comes out: entries, and for each what it
comes to against what is there.  Writes nothing.
"""

from lorad.errors import LoradError
from lorad.registry.records import AdapterRecord
from lorad.wire_registry import Imported, RegistryEntry


def entry_of(record: AdapterRecord) -> RegistryEntry:
    """What an export says of a name."""
    return RegistryEntry(
        name=record.name,
        tenant=record.tenant,
        model=record.model,
        source=record.source,
        rev=record.serving_rev,
        state=record.stored_state.value,
        pinned=record.pinned,
        priority=record.priority,
        labels=dict(record.labels),
    )


def outcome(item: RegistryEntry, before: AdapterRecord | None, *, creatable: bool) -> Imported:
    """What taking `item` in comes to.  `creatable`: the files of its revision are here."""
    if before is None and not creatable:
        rev = f"the files of {item.rev[:12]} are" if item.rev else "its files are"
        return Imported(
            name=item.name,
            ok=False,
            action="lacking",
            code="not_found",
            message=f"{item.name}: there is no such adapter, and {rev} not here",
            hint=f"loractl add DIR --name {item.name}, then import again",
        )
    if before is None:
        return Imported(name=item.name, ok=True, action="created")
    if item.rev and before.serving_rev != item.rev:
        serving = (before.serving_rev or "nothing")[:12]
        message = f"{item.name} serves {serving}, not {item.rev[:12]}; only settings are taken"
        return Imported(name=item.name, ok=True, action="other_rev", message=message)
    same = (before.pinned, before.priority, dict(before.labels)) == (
        item.pinned,
        item.priority,
        item.labels,
    )
    return Imported(name=item.name, ok=True, action="unchanged" if same else "changed")


def failed(item: RegistryEntry, error: LoradError) -> Imported:
    """An entry that was refused."""
    return Imported(
        name=item.name,
        ok=False,
        action="failed",
        code=error.code,
        message=error.message,
        hint=error.hint,
    )
