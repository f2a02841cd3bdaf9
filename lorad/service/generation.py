"""One running request: what the engine sends for its answers, read as pieces until the end.

Goes in: SequenceDeltas through `deliver`, errors through `fail`.  Comes out: `pieces`, then
`usage`.  However it ends, `close` aborts what still runs and tells the owner once.  Knows no HTTP.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from engine.messages import SequenceDelta
from lorad.errors import LoradError
from lorad.service.ask import Ask, Count, Piece
from lorad.service.choice import Choice
from lorad.service.seams import Text


@dataclass(frozen=True, slots=True)
class Owner:
    """What a Generation tells the world: abort this id; `count` sequences were answered; closed."""

    abort: Callable[[str], None]
    answered: Callable[[int], None]
    closed: Callable[["Generation"], None]


class Generation:
    """Read `pieces` to the end, or `close` it; closing twice is harmless.  Event loop only."""

    def __init__(
        self,
        owner: Owner,
        ask: Ask,
        *,
        rev: str | None,
        fingerprint: str,
        text: Text,
        prompts: Sequence[tuple[int, ...]],
        choices: Sequence[Choice],
        seconds_left: Callable[[], float],
    ) -> None:
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.ask, self.rev, self.fingerprint = ask, rev, fingerprint
        self.text, self.prompts, self.choices = text, prompts, choices
        self._owner = owner
        self._seconds_left = seconds_left
        self._inbox: asyncio.Queue[tuple[Choice, SequenceDelta] | LoradError] = asyncio.Queue()
        self._closed = False

    async def pieces(self, idle: float | None = None) -> AsyncGenerator[Piece | None, None]:
        """Pieces of all answers as they come; None after each `idle` seconds without one.

        Raises the LoradError of the first answer that fails, which ends the others too.
        """
        try:
            while not all(choice.ended for choice in self.choices):
                item = await self._next(idle)
                if item is None:
                    yield None
                elif (piece := self._settle(*item)) is not None:
                    yield piece
        finally:
            self.close()

    def usage(self) -> Count:
        """A prompt counts once, however many answers it gets."""
        return Count(
            prompt=sum(map(len, self.prompts)),
            completion=sum(choice.num_tokens for choice in self.choices),
            cached=sum(choice.cached_tokens for choice in self.choices[:: self.ask.n]),
        )

    def deliver(self, choice: Choice, delta: SequenceDelta) -> None:
        """The engine's side."""
        if not choice.started:
            choice.started = True
            self._owner.answered(1)
        choice.settled |= delta.finish_reason is not None
        if not self._closed:
            self._inbox.put_nowait((choice, delta))

    def fail(self, error: LoradError) -> None:
        """End it from outside; the reader gets `error`."""
        self._inbox.put_nowait(error)

    def close(self) -> None:
        """Abort what still runs and give everything back."""
        if self._closed:
            return
        self._closed = True
        self._owner.answered(sum(not choice.started for choice in self.choices))
        for choice in self.choices:
            choice.started = True
            self._abort(choice)
        self._owner.closed(self)

    async def _next(self, idle: float | None) -> tuple[Choice, SequenceDelta] | None:
        left = self._seconds_left()
        if left <= 0:
            raise LoradError("deadline_exceeded", "the request ran into its deadline")
        try:
            async with asyncio.timeout(left if idle is None else min(idle, left)):
                item = await self._inbox.get()
        except TimeoutError:
            return None
        if isinstance(item, LoradError):
            raise item
        return item

    def _settle(self, choice: Choice, delta: SequenceDelta) -> Piece | None:
        piece = choice.take(delta)
        if choice.ended:
            self._abort(choice)  # a stop string: the engine does not know yet
        return piece

    def _abort(self, choice: Choice) -> None:
        if not choice.settled:
            choice.settled = True
            self._owner.abort(choice.request_id)
