"""Picture: the engine's newest snapshot, at most a second old, and fresh after a change.

Goes in: `changed` from whoever changed something.  Comes out: `snapshot`, without waiting.  One
question at a time is asked of the engine, however many look.  Knows no names.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.messages import Answer, GetSnapshot
from engine.status_messages import EngineSnapshot, RevisionStatus
from lorad.errors import LoradError
from lorad.service.hanging import answered

MAX_AGE_SECONDS = 1.0
#: Transitions come in bursts: between two questions there is at least this.
MIN_PAUSE_SECONDS = 0.05
#: An operator who looks waits this long for the engine to say how it is; it answers between steps.
LOOK_SECONDS = 0.5


class Link(Protocol):
    """What is needed of EngineLink."""

    hanging: asyncio.Event

    @property
    def state(self) -> str: ...
    def next_id(self) -> int: ...
    async def call(self, command: GetSnapshot) -> Answer: ...


class Picture:
    """`run` keeps it fresh until it is cancelled."""

    def __init__(self, link: Link) -> None:
        self.snapshot: EngineSnapshot | None = None
        self.by_rev: Mapping[str, RevisionStatus] = {}
        self.on_snapshot: Callable[[EngineSnapshot], None] = lambda snapshot: None
        self._link = link
        self._changed = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    def places(self, rev: str) -> tuple[str, ...]:
        """The replicas that have it: it is one engine's, which has no name."""
        return ()

    def changed(self) -> None:
        """Something moved: look again soon."""
        self._changed.set()

    async def refresh(self) -> None:
        """Returns with a snapshot that was taken after this call, if the engine answers at all."""
        if self._asking is not None:
            await answered(self._asking, self._link)  # it was asked before this call: too old
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await answered(self._asking, self._link)

    async def look(self) -> None:
        """As `refresh`, for somebody who looks; an engine in a long step is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await asyncio.shield(self.refresh())

    async def run(self) -> None:
        while True:
            await self.refresh()
            self._changed.clear()
            await asyncio.sleep(MIN_PAUSE_SECONDS)
            try:
                async with asyncio.timeout(MAX_AGE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _ask(self) -> None:
        try:
            answer = await self._link.call(GetSnapshot(self._link.next_id()))
        except LoradError:
            self.snapshot, self.by_rev = None, {}  # no engine: nothing is resident
            return
        if answer.snapshot is not None:
            self.snapshot = answer.snapshot
            self.on_snapshot(answer.snapshot)
            self.by_rev = {status.rev: status for status in answer.snapshot.revisions}
