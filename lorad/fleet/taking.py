"""Taking: one daemon registers an adapter from the catalog, over its own upload routes.

Goes in: an Order.  Comes out: what the daemon says, or why it refuses.  Bytes go from the catalog
to the daemon as they are read, and are committed only if every file was what its list says.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TypeVar
from urllib.parse import quote

import msgspec

from lorad import wire
from lorad.errors import TABLE, LoradError
from lorad.fleet.catalog import File, Store
from lorad.fleet.line import Line
from lorad.fleet.members import Answer, Ask, Lost, Order
from lorad.fleet.table import Entry
from lorad.wire_operate import HoldAsk

T = TypeVar("T")

V1 = "/admin/v1"
#: Where a daemon says that an adapter is from.
SOURCE = "catalog"
#: For packing and loading one adapter.
TAKE_SECONDS = 600.0
_BRIEF = 10.0


def order_for(entry: Entry, *, load: bool = False, hold_seconds: float = 0.0) -> Order:
    """To have what the table says."""
    return Order(
        name=entry.name,
        content=entry.content,
        rev=entry.rev,
        model=entry.model,
        pin=entry.pin,
        load=load,
        priority=entry.priority,
        labels=entry.labels,
        hold_seconds=hold_seconds,
    )


async def take_in(line: Line, store: Store, order: Order) -> wire.Added:
    """Raises Lost; LoradError as the daemon says it, or the catalog."""
    files = await asyncio.to_thread(store.files, order.content)
    await hold(line, order)
    start = wire.UploadStart(
        name=order.name,
        replace=True,
        pin=order.pin,
        load=order.load,
        priority=order.priority,
        labels=dict(order.labels),
        dry_run=order.dry_run,
        source=SOURCE,
        model=order.model,
    )
    opened = read(await call(line, "POST", f"{V1}/uploads", start), wire.UploadOpen)
    path = f"{V1}/uploads/{opened.upload_id}"
    try:
        for file in files:
            if file.name in opened.files:
                chunks = store.chunks(order.content, file)
                await _put(line, f"{path}/files/{quote(file.name, safe='')}", file, chunks)
        commit = wire.UploadCommit(timeout_s=TAKE_SECONDS)
        answer = await call(line, "POST", f"{path}/commit", commit, TAKE_SECONDS + _BRIEF)
    except BaseException:
        with suppress(Lost, LoradError):
            await asyncio.shield(call(line, "DELETE", path))
        raise
    added = read(answer, wire.Added)
    if order.rev and added.rev != order.rev:
        raise LoradError(
            "conflict",
            f"{line.site.name} makes {added.rev[:12]} of {order.name!r}, "
            f"where others made {order.rev[:12]}",
            hint="have the same lorad and the same base on all members",
        )
    return added


async def hold(line: Line, order: Order) -> None:
    """What the name serves before it is carried out, if that is wished."""
    if order.hold_seconds and not order.dry_run:
        ask = HoldAsk(name=order.name, seconds=order.hold_seconds)
        await call(line, "POST", f"{V1}/hold", ask)


async def call(
    line: Line,
    method: str,
    path: str,
    body: object = None,
    seconds: float | None = _BRIEF,
    *,
    query: str = "",
) -> Answer:
    """One admin route; raises LoradError for what it refuses."""
    answer = await line.ask(admin_ask(method, path, body, query), seconds)
    if answer.status >= 400:
        raise refusal(answer)
    return answer


def admin_ask(method: str, path: str, body: object = None, query: str = "") -> Ask:
    """Of operators' routes, with a body in JSON or none."""
    content = b"" if body is None else msgspec.json.encode(body)
    headers = () if body is None else (("content-type", "application/json"),)
    return Ask(method, path, query, headers, content, face="admin")


def read(answer: Answer, kind: type[T]) -> T:
    """Its body; raises Lost for what is no lorad's."""
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.DecodeError:
        raise Lost(answer.head.member, "what answers there is no lorad", began=True) from None


def refusal(answer: Answer) -> LoradError:
    """What a daemon refused, as it said it."""
    try:
        said = msgspec.json.decode(answer.body, type=wire.ErrorEnvelope).error
    except msgspec.DecodeError:
        message = f"{answer.head.member} answers {answer.status} without an explanation"
        return LoradError("internal_error", message)
    code = said.code if said.code in TABLE else "internal_error"
    details = dict(said.details)
    hint = details.pop("hint", "")
    return LoradError(code, said.message, param=said.param, details=details, hint=hint)


def named(error: LoradError, member: str) -> LoradError:
    """The same, with the member whose word it is: a command that it advises is meant there."""
    hint = f"on {member}: {error.hint}" if error.hint.startswith("loractl ") else error.hint
    return error.told_as(f"{member}: {error.message}", hint=hint, member=member)


async def _put(line: Line, path: str, file: File, chunks: Iterator[bytes]) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        while (piece := await asyncio.to_thread(next, chunks, None)) is not None:
            yield piece

    size = (("content-length", str(file.num_bytes)),)
    answer = await line.ask(Ask("PUT", path, headers=size, face="admin"), None, pieces())
    if answer.status >= 400:
        raise refusal(answer)


def lacks(answer: Answer) -> bool:
    """Does it say that there is no such model?"""
    return answer.status == 404 and refusal(answer).code == "model_not_found"
