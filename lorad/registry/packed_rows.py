"""What the registry is told of packed files: there is one, or it has gone.

Goes in: as for `commands.py`.  Comes out: rows and an audit row.  Looks into no file.
"""

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from engine.messages import PackedModule
from lorad.errors import LoradError
from lorad.registry import rows
from lorad.registry.journal import Stamp, note
from lorad.registry.models import packed, revisions


def record_packed(
    connection: Connection,
    at: Stamp,
    *,
    rev: str,
    layout: str,
    num_blocks: int,
    true_bytes: int,
    modules: Sequence[PackedModule] | None = None,
) -> None:
    """A packed file is in the store, of `modules` if it has others than what was registered: older
    files of the revision are forgotten then.  not_found for a revision that is not registered."""
    if modules is not None:
        values = {"modules": rows.encode_modules(modules)}
        connection.execute(update(revisions).where(revisions.c.rev == rev).values(values))
        connection.execute(delete(packed).where(packed.c.rev == rev))
    if connection.execute(select(revisions.c.rev).where(revisions.c.rev == rev)).first() is None:
        raise LoradError("not_found", f"no revision {rev[:12]} in the registry")
    told = {"num_blocks": num_blocks, "true_bytes": true_bytes, "created_at": at.now}
    row = upsert(packed).values(rev=rev, layout=layout, **told)
    connection.execute(row.on_conflict_do_update(index_elements=["rev", "layout"], set_=told))
    text = f"{num_blocks} blocks, layout {layout}"
    note(connection, at, "adapter.packed", "", rev, action="record_packed", message=text)


def forget_packed(connection: Connection, at: Stamp, rev: str, layouts: Iterable[str]) -> None:
    """These packed files of `rev` left the store."""
    gone = (packed.c.rev == rev) & packed.c.layout.in_(tuple(layouts))
    connection.execute(delete(packed).where(gone))
    note(connection, at, "adapter.unpacked", "", rev, action="forget_packed")
