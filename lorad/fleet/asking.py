"""Asking: admin routes of one member, or of several at once, with typed answers.

Goes in: a route and a body.  Comes out: its Struct; LoradError with the member's name, or Lost.
Whoever asks several gets every answer, and what became of those that gave none.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from lorad.errors import LoradError
from lorad.fleet.members import BRIEF_SECONDS, Answer, Lost, Member, Members
from lorad.fleet.taking import V1, admin_ask, named, read, refusal

T = TypeVar("T")
K = TypeVar("K")

__all__ = ["V1", "alive", "ask_each", "call", "each", "get", "given"]


async def call(
    members: Members,
    member: str,
    method: str,
    path: str,
    body: object = None,
    *,
    query: str = "",
    seconds: float | None = BRIEF_SECONDS,
) -> Answer:
    """Raises LoradError for what it refuses, with its name; Lost."""
    answer = await members.ask(member, admin_ask(method, path, body, query), seconds=seconds)
    if answer.status >= 400:
        raise named(refusal(answer), member)
    return answer


async def get(
    members: Members,
    member: str,
    path: str,
    kind: type[T],
    *,
    query: str = "",
    seconds: float | None = BRIEF_SECONDS,
) -> T:
    return read(await call(members, member, "GET", path, query=query, seconds=seconds), kind)


async def each(
    items: Iterable[K], act: Callable[[K], Awaitable[T]]
) -> dict[K, T | LoradError | Lost]:
    """`act` on all at once: what each gave, or why it gave nothing."""

    async def caught(item: K) -> T | LoradError | Lost:
        try:
            return await act(item)
        except (LoradError, Lost) as error:
            return error

    asked = list(items)
    return dict(zip(asked, await asyncio.gather(*map(caught, asked)), strict=True))


async def ask_each(
    members: Members, path: str, kind: type[T], *, query: str = ""
) -> dict[str, T | LoradError | Lost]:
    """A picture of every member that is known, lost ones without waiting for them."""

    async def one(member: Member) -> T:
        if member.state == "lost":
            raise Lost(member.name, member.reason)
        return await get(members, member.name, path, kind, query=query)

    seen = {member.name: member for member in members.seen()}
    return await each(seen, lambda name: one(seen[name]))


def alive(members: Members) -> list[Member]:
    """Those that take requests."""
    return [member for member in members.seen() if member.state == "ready"]


def given(answers: Mapping[K, T | LoradError | Lost]) -> dict[K, T]:
    """Without those that failed."""
    return {k: v for k, v in answers.items() if not isinstance(v, LoradError | Lost)}
