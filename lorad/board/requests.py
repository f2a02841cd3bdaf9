"""Requests: a row for each that has not ended, those that run longest first.

Goes in: the crowd of RequestService, when somebody looks.  Comes out: `RequestRow`s.  How fast one
is now is seen from one look to the next; until there are two, it is the mean of its life.
"""

from dataclasses import dataclass
from itertools import islice

from lorad.service.generation import Generation
from lorad.service.live import Crowd, Live
from lorad.wire_stream import MAX_REQUESTS, RequestRow

#: Two looks that are nearer than this say little of how fast it is.
MARK_SECONDS = 1.0
#: Of a completion that says nothing.
_COMPLETION_TOKENS = 16


@dataclass(slots=True)
class _Mark:
    at: float
    tokens: int
    rate: float


class RequestRows:
    """`crowd` is looked at, on the event loop."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._marks: dict[str, _Mark] = {}

    def look(self, now: float) -> dict[str, RequestRow]:
        """By id.  `now`: of the clock of RequestService."""
        rows = {
            generation.id: self._row(generation, live, now)
            for generation, live in islice(self._crowd, MAX_REQUESTS)
        }
        self._marks = {id: mark for id, mark in self._marks.items() if id in rows}
        return rows

    def _row(self, generation: Generation, live: Live, now: float) -> RequestRow:
        ask, used = generation.ask, generation.usage()
        running = any(choice.started for choice in generation.choices)
        age = now - live.received
        return RequestRow(
            id=generation.id,
            adapter=live.name or "",
            rev=generation.rev or "",
            state="running" if running else "queued",
            endpoint="chat_completions" if ask.chat else "completions",
            age_seconds=age,
            prompt_tokens=used.prompt,
            cached_tokens=used.cached,
            generated_tokens=used.completion,
            max_tokens=_most(generation),
            tokens_per_second=round(self._rate(generation.id, used.completion, age, now), 1),
            priority=live.account.priority,
            tenant=live.account.tenant.name,
            client=client_of(live.account.caller.who),
        )

    def _rate(self, id: str, tokens: int, age: float, now: float) -> float:
        mark = self._marks.get(id)
        if mark is None:
            mark = self._marks[id] = _Mark(now, tokens, tokens / age if age > 0 else 0.0)
        elif now - mark.at >= MARK_SECONDS:
            mark.rate = (tokens - mark.tokens) / (now - mark.at)
            mark.at, mark.tokens = now, tokens
        return mark.rate


def client_of(who: str) -> str:
    """Of an audit's words the one that tells clients apart: `uid 1000`, or `key ab12cd34`."""
    before, found, key = who.partition("key ")
    return f"key {key}" if found else before.partition(" pid")[0].strip()


def _most(generation: Generation) -> int | None:
    """Tokens of all its answers together; None: what the context has room for."""
    ask = generation.ask
    most = ask.max_tokens
    if most is None and not ask.chat:
        most = _COMPLETION_TOKENS
    return None if most is None else most * len(generation.choices)
