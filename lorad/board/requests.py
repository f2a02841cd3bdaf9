"""Requests: a row for each that has not ended, those that run longest first.

Goes in: the crowd of RequestService, when somebody looks.  Comes out: `RequestRow`s.  How fast one
is now is seen from one look to the next; until there are two, it is the mean of its life.
"""

from dataclasses import dataclass
from itertools import islice

from lorad.service.live import Crowd, Live, Running
from lorad.wire_stream import MAX_REQUESTS, RequestRow

#: Two looks that are nearer than this say little of how fast it is.
MARK_SECONDS = 1.0


@dataclass(slots=True)
class _Mark:
    at: float
    tokens: int
    rate: float


class RequestRows:
    """`crowd` is looked at, on the event loop.  `several`: there is more than one model, and each
    row says whose it is."""

    def __init__(self, crowd: Crowd, *, several: bool = False) -> None:
        self._crowd, self._several = crowd, several
        self._marks: dict[str, _Mark] = {}

    def look(self, now: float) -> dict[str, RequestRow]:
        """By id.  `now`: of the clock of RequestService."""
        rows = {
            running.id: self._row(running, live, now)
            for running, live in islice(self._crowd, MAX_REQUESTS)
        }
        self._marks = {id: mark for id, mark in self._marks.items() if id in rows}
        return rows

    def _row(self, running: Running, live: Live, now: float) -> RequestRow:
        used, age = running.usage(), now - live.received
        return RequestRow(
            id=running.id,
            adapter=live.name or "",
            model=live.model if self._several else "",
            replica=live.where(),
            rev=running.rev or "",
            state="running" if running.begun else "queued",
            endpoint=running.endpoint,
            age_seconds=age,
            prompt_tokens=used.prompt,
            cached_tokens=used.cached,
            generated_tokens=used.completion,
            max_tokens=running.most_tokens,
            tokens_per_second=round(self._rate(running.id, used.completion, age, now), 1),
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
