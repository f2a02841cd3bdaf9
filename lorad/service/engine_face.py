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


def not_ready(state: LinkState, progress: str, *, gave_up: bool) -> LoradError:
    """What a request is told by one that is not ready; `gave_up`: and is not tried again."""
    if state == "stopped" and gave_up:
        hint = "it is back after a restart of lorad"
        return LoradError("engine_restarting", f"the engine is gone: {progress}", hint=hint)
    if state == "stopped":
        return LoradError("draining", "lorad is stopping")
    code = "loading_base" if state == "starting" else state
    return LoradError(code, f"the engine is not ready: {progress}")


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
