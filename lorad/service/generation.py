"""One running request: what the engine sends for its answers, kept until somebody pulls it.

Goes in: SequenceDeltas through `deliver`, failures through `fail`.  Comes out: `pull`, then
`usage`.  Whoever listens hears at once of everything that there is to pull: no task is woken for a
token.  However it ends, `close` aborts what still runs and tells the owner once.  Knows no HTTP.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.messages import SequenceDelta
from lorad.errors import LoradError
from lorad.service.ask import Ask, Count, Piece
from lorad.service.choice import Choice
from lorad.service.plan import COMPLETION_MAX_TOKENS
from lorad.service.seams import Text


@dataclass(frozen=True, slots=True)
class Owner:
    """What a Generation tells the world: abort this id; `count` sequences were answered; closed."""

    abort: Callable[[str], None]
    answered: Callable[[int], None]
    closed: Callable[["Generation"], None]


class Generation:
    """`pull` until it is `over`, or `close` it; closing twice is harmless.  Event loop only.

    The first answer that fails ends the others too: its exception is `error`, told after whatever
    there is still to pull.
    """

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
        seconds_left: float,
    ) -> None:
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.ask, self.rev, self.fingerprint = ask, rev, fingerprint
        self.text, self.prompts, self.choices = text, prompts, choices
        self.moves = ask.moves  # as long as its client has seen nothing at all
        self.error: Exception | None = None
        self._on_news: Callable[[], None] = lambda: None
        self._owner = owner
        self._open = len(choices)
        self.over = False  # nothing more will come
        self._over = asyncio.Event()
        self._closed = False
        self._deadline = asyncio.get_running_loop().call_later(max(seconds_left, 0), self._expire)

    # ----------------------------------------------------------------- the reader's side
    def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` whenever there is something to pull or it is over; now too, if so."""
        self._on_news = on_news
        if self.over or any(choice.has_news for choice in self.choices):
            on_news()

    async def wait(self) -> None:
        """Until it is over."""
        await self._over.wait()

    def pull(self) -> list[Piece]:
        """What came since the last call, of each answer in order."""
        if len(self.choices) == 1:
            return self.choices[0].pull()
        return [piece for choice in self.choices for piece in choice.pull()]

    @property
    def endpoint(self) -> str:
        return "chat_completions" if self.ask.chat else "completions"

    @property
    def begun(self) -> bool:
        """Has the engine answered anything of it?"""
        return any(choice.started for choice in self.choices)

    @property
    def most_tokens(self) -> int | None:
        """Of all its answers together; None: what the context has room for."""
        most = self.ask.max_tokens
        if most is None and not self.ask.chat:
            most = COMPLETION_MAX_TOKENS
        return None if most is None else most * len(self.choices)

    def usage(self) -> Count:
        """A prompt counts once, however many answers it gets."""
        return Count(
            prompt=sum(map(len, self.prompts)),
            completion=sum(choice.num_tokens for choice in self.choices),
            cached=sum(choice.cached_tokens for choice in self.choices[:: self.ask.n]),
        )

    def close(self) -> None:
        """Abort what still runs and give everything back."""
        if self._closed:
            return
        self._closed = True
        self._deadline.cancel()
        self._on_news = lambda: None
        self._owner.answered(sum(not choice.started for choice in self.choices))
        for choice in self.choices:
            choice.started = True
            self._abort(choice)
        self._owner.closed(self)

    # ----------------------------------------------------------------- the engine's side
    def deliver(self, choice: Choice, delta: SequenceDelta) -> None:
        """The next delta of one answer.  Never raises: one request's trouble is no other's."""
        if not choice.started:
            choice.started = True
            self._owner.answered(1)
        if delta.finish_reason is not None:
            choice.settled = True
        if self._closed or choice.ended or self.error is not None:
            return
        try:
            news = choice.take(delta)
        except Exception as error:
            self.fail(_named(error, self.ask))
            return
        if choice.ended:
            self._end(choice)
        if news:
            self._on_news()

    def fail(self, error: Exception) -> None:
        """End it now; the reader gets `error`."""
        if self._closed or self.over:
            return
        self.error = error
        for choice in self.choices:
            self._abort(choice)
        self._finish()
        self._on_news()

    # ----------------------------------------------------------------- inside
    def _end(self, choice: Choice) -> None:
        self._abort(choice)  # a stop string: the engine does not know yet
        self._open -= 1
        if self._open == 0:
            self._finish()

    def _finish(self) -> None:
        self.over = True
        self._over.set()

    def _expire(self) -> None:
        self.fail(LoradError("deadline_exceeded", "the request ran into its deadline"))

    def _abort(self, choice: Choice) -> None:
        if not choice.settled:
            choice.settled = True
            self._owner.abort(choice.request_id)


def _named(error: Exception, ask: Ask) -> Exception:
    """The engine knows no names: what it says of a client's prompt and adapter is completed."""
    if not isinstance(error, LoradError) or error.code != "invocation_missing":
        return error
    param = "messages" if ask.chat else "prompt"
    return LoradError(error.code, f"{ask.model}: {error.message}", param=param)
