"""Churn of the last ten minutes: loads and evictions in buckets of ten seconds.

Goes in: every AdapterEvent, on the event loop.  Comes out: a `wire_stream.Churn`.  A replaced
revision counts for the name that it served.  An event costs microseconds; sums are kept as events
come and go, and nothing is added up for who looks.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from engine.messages import AdapterEvent
from lorad.metrics.churn import Named, is_eviction, reason_of
from lorad.wire_stream import CHURN_BUCKET_SECONDS, CHURN_BUCKETS, Churn, Loaded

#: Names and loads that are told.
TOP, RECENT = 10, 20


@dataclass(slots=True)
class _Bucket:
    loads: int = 0
    evictions: int = 0
    thrashes: int = 0
    load_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)


class RecentChurn:
    """`named` knows names.  Times are seconds of one monotonic clock."""

    def __init__(self, named: Named, began: float) -> None:
        self._named = named
        self._number = int(began // CHURN_BUCKET_SECONDS)  # of the bucket that fills
        self._buckets = deque([_Bucket() for _ in range(CHURN_BUCKETS)], maxlen=CHURN_BUCKETS)
        self._reasons: Counter[str] = Counter()
        self._names: Counter[str] = Counter()
        self._recent: deque[tuple[float, str, AdapterEvent]] = deque(maxlen=RECENT)

    def take(self, event: AdapterEvent, now: float) -> None:
        """One transition."""
        if not event.source and not is_eviction(event):
            return
        self._pass_time(now)
        bucket = self._buckets[-1]
        named = self._named(event.rev)
        if event.source:
            bucket.loads += 1
            bucket.load_bytes += event.num_bytes
            bucket.thrashes += event.away_seconds is not None
            name = event.rev[:12] if named is None else named[0]
            bucket.names[name] += 1
            self._names[name] += 1
            self._recent.append((now, name, event))
        else:
            reason = reason_of(event, meant=named is not None and named[1])
            bucket.evictions += 1
            bucket.reasons[reason] += 1
            self._reasons[reason] += 1

    def look(self, now: float) -> Churn:
        """As it is at `now`; the last bucket fills still."""
        self._pass_time(now)
        buckets = self._buckets
        return Churn(
            loads=tuple(bucket.loads for bucket in buckets),
            evictions=tuple(bucket.evictions for bucket in buckets),
            thrashes=sum(bucket.thrashes for bucket in buckets),
            reasons=dict(self._reasons),
            top=tuple(self._names.most_common(TOP)),
            load_bytes=sum(bucket.load_bytes for bucket in buckets),
            recent=tuple(
                Loaded(
                    name=name,
                    source="disk" if event.source == "disk" else "ram",
                    num_bytes=event.num_bytes,
                    seconds=event.load_seconds,
                    ago_seconds=now - then,
                )
                for then, name, event in reversed(self._recent)
            ),
        )

    def _pass_time(self, now: float) -> None:
        number = int(now // CHURN_BUCKET_SECONDS)
        for _ in range(min(number - self._number, CHURN_BUCKETS)):
            oldest = self._buckets[0]
            _take_out(self._reasons, oldest.reasons)
            _take_out(self._names, oldest.names)
            self._buckets.append(_Bucket())
        self._number = max(number, self._number)


def _take_out(sums: Counter[str], counts: Counter[str]) -> None:
    for key, count in counts.items():
        sums[key] -= count
        if not sums[key]:
            del sums[key]
