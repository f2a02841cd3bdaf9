"""The adapters' part of a sheet: who has a label, and what is shown under it.

Goes in: the sources, and counters by name.  Comes out: values on a sheet.  Keeps the series of
counters from one scrape to the next, so that each only grows; one scrape at a time.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.adapters.states import RESIDENT, State
from engine.status_messages import RevisionStatus
from lorad.metrics import requests
from lorad.metrics.churn import Churn
from lorad.metrics.engine_counts import EngineCounts
from lorad.metrics.labels import Key, Labelled, Series, summed
from lorad.metrics.metric import OTHER
from lorad.metrics.sheet import Sheet
from lorad.metrics.sources import Sources
from lorad.metrics.table import GATEWAY
from lorad.service.meter import NameCounts
from lorad.service.whose import Whose

#: Counters with an adapter label.
SERIES = (
    *requests.series({}),
    *("adapter_loads_total", "adapter_evictions_total", "adapter_thrash_total"),
    *("prefix_cache_query_tokens_total", "prefix_cache_hit_tokens_total"),
    *("speculation_draft_tokens_total", "speculation_accepted_tokens_total"),
)


@dataclass(frozen=True, slots=True)
class Named:
    """Every name at this moment, with what the engine says of its revision."""

    revs: Mapping[str, str]  # name -> revision; names that serve nothing are left out
    pinned: frozenset[str]
    status: Mapping[str, RevisionStatus]  # name -> status, of those that the engine knows
    known: frozenset[str]
    resident: frozenset[str]


def named(sources: Sources) -> Named:
    """As it is now."""
    entries = list(sources.catalog)
    by_rev = sources.picture.by_rev
    revs = {e.name: e.rev for e in entries if e.rev is not None}
    status = {name: by_rev[rev] for name, rev in revs.items() if rev in by_rev}
    return Named(
        revs=revs,
        pinned=frozenset(e.name for e in entries if e.pinned and e.rev is not None),
        status=status,
        known=frozenset(e.name for e in entries),
        resident=frozenset(name for name, s in status.items() if s.state in RESIDENT),
    )


class AdapterMetrics:
    """One a daemon."""

    def __init__(self, limit: int) -> None:
        self._labelled = Labelled(limit)
        self._moved = requests.Moved()
        self._series = {name: Series() for name in SERIES}

    def write(
        self,
        sheet: Sheet,
        sources: Sources,
        now: Named,
        churn: Churn,
        engines: Collection[EngineCounts],
    ) -> None:
        """All that has an adapter label."""
        moved = self._moved.since(dict(sources.meter.names))
        labelled = self._labelled.choose(
            now.known, now.pinned, now.resident, requests.uses(moved), time.monotonic()
        )
        bases = frozenset(sources.meter.bases)
        rest_of = partial(_rest_of, sources) if len(sources.models) > 1 else _the_rest
        self._counters(sheet, labelled | bases, now, moved, churn, engines, bases, rest_of)
        self._gauges(sheet, labelled, now)
        self._places(sheet, labelled, now, sources)
        self._traffic(sheet, labelled | bases, now, sources)

    def _counters(
        self,
        sheet: Sheet,
        labelled: frozenset[str],
        now: Named,
        moved: Mapping[str, NameCounts],
        churn: Churn,
        engines: Collection[EngineCounts],
        bases: frozenset[str],
        rest_of: Callable[[str], str],
    ) -> None:
        known = now.known | bases
        raw: dict[str, Mapping[Key, float]] = {
            "adapter_loads_total": dict(churn.loads),
            "adapter_evictions_total": dict(churn.evictions),
            "adapter_thrash_total": dict(churn.thrashes),
            "prefix_cache_query_tokens_total": _added([engine.asked for engine in engines]),
            "prefix_cache_hit_tokens_total": _added([engine.hit for engine in engines]),
            "speculation_draft_tokens_total": _added([engine.drafted for engine in engines]),
            "speculation_accepted_tokens_total": _added([engine.accepted for engine in engines]),
            **requests.series(moved),
        }
        for name, series in self._series.items():
            series.fold(raw[name], labelled, known, rest_of)
            sheet.puts(name, series)

    def _gauges(self, sheet: Sheet, labelled: frozenset[str], now: Named) -> None:
        for name in sorted(labelled & now.revs.keys()):
            status = now.status.get(name)
            on_gpu = status is not None and status.state in RESIDENT
            in_ram = status is not None and bool(status.ram_bytes)
            sheet.put("adapter_resident", float(on_gpu), name, "gpu")
            sheet.put("adapter_resident", float(in_ram), name, "ram")
            sheet.put("adapter_pinned", float(name in now.pinned), name)
            sheet.put("adapter_info", 1.0, name, now.revs[name])
            if status is not None:
                sheet.put("adapter_rank", status.max_rank, name)

    def _places(self, sheet: Sheet, labelled: frozenset[str], now: Named, sources: Sources) -> None:
        """Of adapters of models that have several engines."""
        several = {seen.name for seen in sources.models if seen.replicas}
        for name in sorted(labelled & now.revs.keys()) if several else ():
            rev = now.revs[name]
            if sources.catalog.model_of(rev) in several:
                sheet.put("adapter_replicas", len(sources.picture.places(rev)), name)

    def _traffic(
        self,
        sheet: Sheet,
        labelled: frozenset[str],
        now: Named,
        sources: Sources,
    ) -> None:
        """A revision that has lost its name still runs: it counts with its model's others."""
        several = len(sources.models) > 1
        whose, names_of = Whose(sources.crowd), sources.catalog.names_of
        working = {
            name: whose.of(name, s, names)
            for name, s in now.status.items()
            if (s.running or s.waiting) and name in (names := names_of(s.rev))
        }
        models = {e.name: e.model for e in sources.catalog if e.name in working} if several else {}
        for gauge in ("running", "waiting"):
            values = {name: n for name, s in working.items() if (n := getattr(s, gauge))}
            shown = dict.fromkeys(labelled & now.status.keys(), 0.0)
            for seen, base in zip(sources.models, sources.meter.bases, strict=True):
                if (one := seen.picture.snapshot) is None:
                    shown |= {base: 0.0} if sources.picture.snapshot is not None else {}
                    continue
                mine = (n for n in values if not several or models.get(n) == seen.name)
                own = {base: getattr(one.base, gauge), **{n: values[n] for n in mine}}
                own[""] = max(getattr(one, gauge) - sum(own.values()), 0)
                shown |= summed(own, labelled, _rest(seen.name) if several else OTHER)
            sheet.puts(f"requests_{gauge}", (((name,), n) for name, n in sorted(shown.items())))


def gateway(sheet: Sheet, now: Named, slots: int) -> None:
    """vLLM's one series.  A comma stands between names only."""
    resident = now.resident
    waiting = {name for name, s in now.status.items() if s.waiting and name not in resident}
    joined = (
        ",".join(name.replace(",", "%2C") for name in sorted(names))
        for names in (resident, waiting)
    )
    sheet.put(GATEWAY, time.time(), *joined, str(slots))


def _the_rest(name: str) -> str:
    return OTHER


def _rest_of(sources: Sources, name: str) -> str:
    """Of several models, the rest of those on the same one as `name`."""
    entry = sources.catalog.get(name)
    return OTHER if entry is None else _rest(entry.model)


def _rest(model: str) -> str:
    """As `Metrics` reads it, and shows it as __other__ of that model."""
    return f"{OTHER}:{model}"


def _added(counts: Sequence[Counter[Key]]) -> Mapping[Key, float]:
    """Of all engines; an adapter's are of one, as long as it is there."""
    if len(counts) == 1:
        return counts[0]
    summed = Counter[Key]()
    for one in counts:
        summed.update(one)  # adding Counters would lose those that are 0
    return summed


def counted_states(counts: Mapping[str, int]) -> Counter[str]:
    """Every state has a series, though nobody is in it."""
    shown = Counter({state.value: 0 for state in State})
    shown.update(counts)
    return shown
