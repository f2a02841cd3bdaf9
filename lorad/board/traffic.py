"""Traffic: what is asked of the daemon and how fast it answers, over the last minute.

Goes in: a tick about once a second, with the engine's snapshot if there is an engine.  Comes out: a
`Load`.  Reads counters that grow anyway; nothing is counted for it.
"""

from collections.abc import Callable

from engine.histogram import SECONDS, Histogram
from engine.status_messages import EngineSnapshot
from lorad.board.windows import Growing, Window, spread
from lorad.service.meter import Meter
from lorad.wire_stream import WINDOW_SECONDS, Load, Spread

#: Of each engine: tokens generated, of prompts, pooled, looked up and found.
_COUNTS = 5


class Traffic:
    """`begun`: how many requests were accepted so far."""

    def __init__(self, meter: Meter, begun: Callable[[], int]) -> None:
        self._meter, self._begun = meter, begun
        self._engines: list[list[Growing]] = []
        self._counts = Window()
        self._first_token, self._inter_token, self._queue = Window(), Window(), Window()

    def tick(self, now: float, *snapshots: EngineSnapshot | None) -> None:
        """`now` in seconds of a monotonic clock; one snapshot a model, always in the same order,
        None: it has no engine now."""
        while len(self._engines) < len(snapshots):
            self._engines.append([Growing() for _ in range(_COUNTS)])
        for engine, snapshot in zip(self._engines, snapshots, strict=False):
            if snapshot is not None:
                prefix = snapshot.prefix
                shown = (snapshot.generated_tokens, snapshot.prompt_tokens, snapshot.pooled_tokens)
                values = (*shown, prefix.query_tokens, prefix.hit_tokens)
                for growing, value in zip(engine, values, strict=True):
                    growing.take(value)
        refused = sum(self._meter.refused.values())
        totals = [sum(engine[n].total for engine in self._engines) for n in range(_COUNTS)]
        self._counts.add(now, (self._begun(), refused, *totals))
        kinds = [k for each in self._meter.by_model.values() for k in each.values()]
        self._first_token.add(now, _summed([k.first_token_seconds for k in kinds]))
        self._inter_token.add(now, _summed([k.inter_token_seconds for k in kinds]))
        self._queue.add(now, _summed([k.queue_seconds for k in kinds]))

    def load(self) -> Load:
        none = (0,) * (2 + _COUNTS)
        requests, refused, generated, prompt, pooled, *_ = self._counts.rates() or none
        *_, query_tokens, hit_tokens = self._counts.grown() or none
        return Load(
            requests_per_second=round(requests, 3),
            refused_per_second=round(refused, 3),
            tokens_per_second=round(generated, 2),
            prompt_tokens_per_second=round(prompt, 2),
            pooled_tokens_per_second=round(pooled, 2),
            first_token=_spread(self._first_token),
            inter_token=_spread(self._inter_token),
            queue=_spread(self._queue),
            query_tokens=query_tokens,
            hit_tokens=hit_tokens,
            tokens_history=tuple(round(n, 1) for n in self._counts.history(2)[-WINDOW_SECONDS:]),
        )


def _summed(histograms: list[Histogram]) -> list[int]:
    return [sum(counts) for counts in zip(*(h.counts for h in histograms), strict=True)]


def _spread(window: Window) -> Spread:
    return spread(SECONDS, window.grown())
