"""What an EngineLink is to others, and what it wants of an engine client."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal, Protocol

from engine.config import EngineConfig
from engine.messages import Answer, Command, EngineInfo, Event, Submit
from engine.pooling.config import PoolingConfig
from engine.pooling.requests import PoolRequest
from lorad.errors import TABLE, LoradError

LinkState = Literal[
    "starting", "loading_base", "ready", "engine_stalled", "engine_restarting", "stopped"
]
Turn = Callable[[], contextlib.AbstractAsyncContextManager[EngineConfig | PoolingConfig]]


async def nothing(_: object) -> None:
    """Of a listener that nobody has set."""


def refused(answer: Answer) -> LoradError:
    """An answer that is no success, as an error."""
    code = answer.code if answer.code in TABLE else "internal_error"
    details = {"reason": answer.reason} if answer.reason else {}
    return LoradError(code, answer.message, details=details)


class Client(Protocol):
    """The face of `engine.client.EngineClient` that is used here."""

    events: asyncio.Queue[Event]
    info: EngineInfo | None
    pid: int | None

    @property
    def state(self) -> str: ...
    async def start(self, config: EngineConfig | PoolingConfig) -> None: ...
    def next_id(self) -> int: ...
    def submit(self, submit: Submit) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def pool(self, request: PoolRequest) -> None: ...
    def abort_pool(self, request_id: str) -> None: ...
    def give_way(self, share: float) -> None: ...
    async def call(self, command: Command) -> Answer: ...
    async def stop(self, timeout: float = 10.0) -> None: ...
