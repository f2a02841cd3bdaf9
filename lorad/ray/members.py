"""Replicas of a Serve deployment as the gateway's `Members`.

Goes in: requests for a revision, or for one replica.  Comes out: its answer as it comes, or Lost,
whether the actor died under a request or its daemon.  Where a request goes is the request router's
business (`lorad.ray.router`), whose picture of the replicas this hands on.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from itertools import count
from typing import Any
from uuid import uuid4

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet.local import nobody
from lorad.fleet.members import BRIEF_SECONDS, Answer, Ask, Head, Lost, Member, Order
from lorad.fleet.taking import refusal
from lorad.ray.desk import desk
from lorad.ray.messages import Call, Gone


class RayMembers:
    """`handle`: of the replicas' deployment.  Use it from the ingress' event loop."""

    def __init__(self, handle: Any) -> None:
        self._desk = desk(handle.app_name, handle.deployment_name)
        self._numbers, self._origin = count(), uuid4().hex[:8]
        self._stream = handle.options(method_name="stream", stream=True)
        self._ask = handle.options(method_name="ask")
        self._take_in = handle.options(method_name="take_in")

    def start(self) -> None:
        """Have Serve make its router, which it does with the first call: nobody is seen before."""
        self._first = _sent(self._ask, self._call(Ask("GET", "/livez"), member="any"))

    def seen(self) -> Sequence[Member]:
        return self._desk.members

    async def ask(self, member: str, ask: Ask, *, seconds: float | None = BRIEF_SECONDS) -> Answer:
        answer = await self._of_one(self._ask, member, ask, seconds)
        assert isinstance(answer, Answer)
        return answer

    async def stream(
        self, ask: Ask, rev: str | None, *, without: Collection[str] = ()
    ) -> AsyncGenerator[Head | bytes, None]:
        seen = self.seen()
        left = [one for one in seen if one.state == "ready" and one.name not in without]
        if seen and not left:
            raise LoradError("engine_restarting", nobody(seen))
        call = self._call(ask, rev=rev, without=tuple(without))
        handle = self._stream.options(multiplexed_model_id=ask.model) if ask.model else self._stream
        answer = _sent(handle, call)
        began = False
        try:
            while True:
                with self._told(call, began=began):
                    part = await anext(answer, None)
                if part is None:
                    return
                if isinstance(part, Gone):
                    raise Lost(part.member, part.why, began=began)
                if not began:
                    began = True
                    self._desk.news.append(call.id)
                yield part
        finally:
            answer.cancel()  # of no effect where it has ended
            self._desk.where.pop(call.id, None)

    async def take_in(self, member: str, order: Order) -> wire.Added:
        told = await self._of_one(self._take_in, member, Ask("POST", ""), None, order)
        if isinstance(told, Answer):
            raise refusal(told)
        assert isinstance(told, wire.Added)
        return told

    # ------------------------------------------------------------- inside
    def _call(self, ask: Ask, **more: Any) -> Call:
        return Call(
            id=f"{self._origin}-{next(self._numbers)}", origin=self._origin, ask=ask, **more
        )

    async def _of_one(
        self, handle: Any, member: str, ask: Ask, seconds: float | None, *more: object
    ) -> Any:
        """What that replica returns.  Raises Lost."""
        if not any(one.name == member and one.state != "lost" for one in self.seen()):
            raise Lost(member, "there is no such replica")
        call = self._call(ask, member=member, seconds=seconds)
        response = _sent(handle, call, *more)
        try:
            with self._told(call, began=False):
                async with asyncio.timeout(seconds):
                    told = await response
        except TimeoutError:
            raise Lost(member, "it does not answer") from None
        finally:
            response.cancel()
        if isinstance(told, Gone):
            raise Lost(told.member, told.why)
        return told

    @contextmanager
    def _told(self, call: Call, *, began: bool) -> Iterator[None]:
        """Ray's errors as Lost, with the replica that the call was at."""
        try:
            yield
        except (RayError, RayServeException) as error:
            member = call.member or self._desk.where.get(call.id, "")
            died = isinstance(error, RayActorError)
            why = "the replica died" if died else f"{type(error).__name__}: {_first_line(error)}"
            raise Lost(member, why, began=began) from error


def _sent(handle: Any, *what: object) -> Any:
    """Serve gives all calls of one HTTP request the same id, by the context, and finds what waits
    for a replica by that id: of several at once it would send one where another belongs."""
    return Context().run(handle.remote, *what)


def _first_line(told: object) -> str:
    return next((line for line in str(told).splitlines() if line.strip()), "")
