"""Inputs: what is under way in an engine that pools, or on its way to it.

Goes in: PoolRequests, results.  Comes out: to each request its result, once, whatever ends it: the
engine's word, a revision that cannot be prepared, a dead process.  Starts and watches no engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container
from typing import Protocol

from engine.errors import EngineError
from engine.pooling.requests import PoolRequest, PoolResult, unpacked
from engine.pooling_messages import Pooled
from lorad.errors import TABLE, LoradError, from_engine


class Sender(Protocol):
    """The face of the engine's client that is used here."""

    def pool(self, request: PoolRequest) -> None: ...
    def abort_pool(self, request_id: str) -> None: ...


class Inputs:
    """`sender` is the present engine's, or raises LoradError; `known` has what it knows, and
    `prepare` makes it know a revision."""

    def __init__(
        self,
        sender: Callable[[], Sender],
        known: Container[str],
        prepare: Callable[[str], Awaitable[None]],
    ) -> None:
        self._sender, self._known, self._prepare = sender, known, prepare
        self._owed: dict[str, asyncio.Future[Pooled]] = {}
        self._preparing: dict[str, asyncio.Timeout] = {}

    def __len__(self) -> int:
        return len(self._owed)

    async def run(self, request: PoolRequest) -> PoolResult:
        """Its result.  Raises LoradError; cancelling it takes it back from the engine."""
        future: asyncio.Future[Pooled] = asyncio.get_running_loop().create_future()
        if self._owed.setdefault(request.request_id, future) is not future:
            raise LoradError("invalid_value", "a request of this id is under way")
        try:
            pooled = await self._send(request, future)
        finally:
            self._owed.pop(request.request_id, None)
        if pooled.code:
            code = pooled.code if pooled.code in TABLE else "internal_error"
            raise LoradError(code, pooled.message)
        return unpacked(pooled)

    def deliver(self, pooled: Pooled) -> None:
        """To whoever waits for it."""
        future = self._owed.get(pooled.request_id)
        if future is not None and not future.done():
            future.set_result(pooled)

    def end_all(self, code: str, message: str) -> None:
        """Each with that error."""
        for request_id in list(self._owed):
            self.deliver(Pooled(request_id=request_id, code=code, message=message))

    def take_back(self, request_id: str, code: str, message: str) -> None:
        """End it with that error, and the engine needs to do it no more.  Unknown ids are
        ignored."""
        if request_id in self._owed:
            self.deliver(Pooled(request_id=request_id, code=code, message=message))
            if (preparing := self._preparing.get(request_id)) is not None:
                preparing.reschedule(asyncio.get_running_loop().time())
            else:
                self._sender().abort_pool(request_id)

    async def _send(self, request: PoolRequest, future: asyncio.Future[Pooled]) -> Pooled:
        if request.rev is not None and request.rev not in self._known:
            await self._prepare_for(request, request.rev)
        sender = self._sender()
        try:
            if not future.done():  # everybody was ended while it was prepared
                sender.pool(request)
            return await future
        except EngineError as error:
            raise from_engine(error) from error
        except asyncio.CancelledError:
            sender.abort_pool(request.request_id)
            raise

    async def _prepare_for(self, request: PoolRequest, rev: str) -> None:
        """Unless it is taken back meanwhile: an engine that hangs makes nothing known."""
        try:
            async with asyncio.timeout(None) as limit:
                self._preparing[request.request_id] = limit
                await self._prepare(rev)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            del self._preparing[request.request_id]
