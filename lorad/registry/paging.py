"""Pages of names: filters, order and cursors, all of them in SQLite and over indexes.

Goes in: what a list is asked for.  Comes out: a page, which continues after the last row of the one
before, so that it costs the same at row 10 and at row 10,000.
"""

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, func, select, tuple_
from sqlalchemy.sql import literal

from engine.adapters.states import STORED
from lorad.errors import LoradError
from lorad.registry.models import adapters, packed, revisions
from lorad.registry.records import Packing, Page
from lorad.registry.rows import adapter_of, select_adapters
from lorad.registry.sqlite import any_of

MAX_PAGE = 1000

#: `sort=` -> the column; a leading "-" turns the order round, and the name breaks ties.
SORTS: Mapping[str, ColumnElement[Any]] = {
    "name": adapters.c.name,
    "tenant": adapters.c.tenant,
    "state": adapters.c.state,
    "pinned": adapters.c.pinned,
    "priority": adapters.c.priority,
    "created": adapters.c.created_at,
    "last_used": adapters.c.last_used_at,
    "rank": func.coalesce(revisions.c.rank, 0),
    "size": func.coalesce(revisions.c.file_bytes, 0),
}


def page(
    connection: Connection,
    *,
    state: str | None = None,
    tenant: str | None = None,
    model: str | None = None,
    q: str | None = None,
    labels: Mapping[str, str] | None = None,
    revs: Collection[str] | None = None,
    without_revs: Collection[str] | None = None,
    sort: str = "name",
    limit: int = 100,
    cursor: str | None = None,
    packing: Packing | None = None,
) -> Page:
    """One page of names.  invalid_value for an unknown state or sort, or a broken cursor."""
    filters = _filters(state, tenant, model, q, labels, revs, without_revs)
    total = connection.execute(select(func.count()).select_from(adapters).where(*filters)).scalar()
    limit = max(1, min(limit, MAX_PAGE))
    statement, key = page_statement(filters, sort=sort, limit=limit, cursor=cursor, packing=packing)
    found = connection.execute(statement).all()
    more = len(found) > limit
    found = found[:limit]
    following = _encode_cursor(sort, found[-1]._mapping[key], found[-1].name) if more else None
    return Page(items=tuple(map(adapter_of, found)), total=total or 0, cursor=following)


def page_statement(
    filters: Sequence[ColumnElement[bool]],
    *,
    sort: str,
    limit: int,
    cursor: str | None,
    packing: Packing | None = None,
) -> tuple[Select[Any], str]:
    """The SELECT of one page, one row more than `limit`; and the label of its sort key.

    With `packing`, size is that of a revision's blocks where it is packed, as the list shows it.
    """
    word = sort.removeprefix("-")
    if word not in SORTS:
        raise _invalid("sort", f"unknown sort {sort!r}; known: {', '.join(SORTS)}")
    column, descending = SORTS[word], sort.startswith("-")
    if word == "size" and packing is not None:
        column = func.coalesce(_blocks(packing) * packing.block_bytes, column)
    statement = select_adapters().add_columns(column.label("sort_key")).where(*filters)
    if word in ("rank", "size"):
        statement = statement.outerjoin(revisions, revisions.c.rev == adapters.c.serving_rev)
    by = [adapters.c.name] if word == "name" else [column, adapters.c.name]
    if cursor is not None:
        value, name = _decode_cursor(cursor, sort)
        last = [literal(name)] if word == "name" else [literal(value), literal(name)]
        here, there = tuple_(*by), tuple_(*last)
        statement = statement.where(here < there if descending else here > there)
    order = [c.desc() for c in by] if descending else by
    return statement.order_by(*order).limit(limit + 1), "sort_key"


def _blocks(packing: Packing) -> ColumnElement[Any]:
    """Blocks of a row's serving revision; null if it is not packed for that engine."""
    files = select(func.max(packed.c.num_blocks)).where(
        packed.c.rev == revisions.c.rev, packed.c.layout.in_(packing.streams)
    )
    return files.correlate(revisions).scalar_subquery()


def _filters(
    state: str | None,
    tenant: str | None,
    model: str | None,
    q: str | None,
    labels: Mapping[str, str] | None,
    revs: Collection[str] | None,
    without_revs: Collection[str] | None,
) -> list[ColumnElement[bool]]:
    filters: list[ColumnElement[bool]] = []
    if state is not None:
        if state not in STORED:
            raise _invalid("state", f"{state!r} is not stored; stored: {', '.join(sorted(STORED))}")
        filters.append(adapters.c.state == state)
    if tenant is not None:
        filters.append(adapters.c.tenant == tenant)
    if model is not None:
        filters.append(adapters.c.model == model)
    if q:
        filters.append(func.instr(adapters.c.name, q.lower()) > 0)
    for key, value in (labels or {}).items():
        pairs = func.json_each(adapters.c.labels).table_valued("key", "value")
        filters.append(
            select(literal(1)).where(pairs.c.key == key, pairs.c.value == value).exists()
        )
    if revs is not None:
        filters.append(adapters.c.serving_rev.in_(any_of(revs)))
    if without_revs is not None:
        rev = func.coalesce(adapters.c.serving_rev, "")
        filters.append(rev.not_in(any_of(without_revs)))
    return filters


def _encode_cursor(sort: str, value: object, name: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((sort, value, name))).decode()


def _decode_cursor(cursor: str, sort: str) -> tuple[str | int | float | bool, str]:
    try:
        data = base64.urlsafe_b64decode(cursor.encode())
        made_for, value, name = msgspec.json.decode(
            data, type=tuple[str, str | int | float | bool, str]
        )
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise _invalid("cursor", "not a cursor of this list") from error
    if made_for != sort:
        raise _invalid("cursor", f"the cursor belongs to sort={made_for}")
    return value, name


def _invalid(param: str, message: str) -> LoradError:
    return LoradError("invalid_value", message, param=param)
