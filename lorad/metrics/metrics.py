"""Metrics: the one owner of what /metrics shows.

Goes in: every snapshot and transition of the engine and every ended pull, on the event loop; and
scrapes.  Comes out: Prometheus text, or OpenMetrics if the `Accept` header asks for it.  A scrape
runs in a thread of its own, one at a time: the loop is never kept from its streams for longer than
Python's switch interval.  Changes nothing of what it looks at.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from engine.histogram import LOAD_SECONDS, Histogram
from engine.messages import AdapterEvent
from engine.status_messages import EngineSnapshot
from lorad.metrics import collect
from lorad.metrics.adapters import AdapterMetrics, gateway, named
from lorad.metrics.churn import DRAIN_OUTCOMES, DRAIN_REASONS, Churn
from lorad.metrics.engine_counts import EngineCounts
from lorad.metrics.labels import Key
from lorad.metrics.metric import OTHER
from lorad.metrics.sheet import Sheet
from lorad.metrics.sources import Sources
from lorad.metrics.tenants import TenantMetrics
from lorad.registry.records import OperationRecord
from lorad.service.meter import BASE
from lorad.service.names import tenant_of
from lorad.service.snapshot import Seen

#: What removed adapters left behind is swept up this often, though nobody scrapes.
SWEEP_SECONDS = 60.0


class Pulled:
    """Ended pulls, from wherever."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_bytes = 0
        self.seconds = Histogram(LOAD_SECONDS)

    def take(self, record: OperationRecord) -> None:
        """An operation has ended."""
        if record.kind != "pull":
            return
        self.outcomes[record.state] += 1
        self.num_bytes += record.done_bytes
        if record.state == "done":
            self.seconds.observe(max(record.updated_at - record.created_at, 0.0))

    def write(self, sheet: Sheet) -> None:
        for outcome in ("done", "failed", "cancelled"):
            sheet.put("hub_pulls_total", dict(self.outcomes).get(outcome, 0), outcome)
        sheet.put("hub_pull_bytes_total", self.num_bytes)
        sheet.observe("hub_pull_seconds", self.seconds)


class Metrics:
    """`started`: the daemon's start, in seconds since the epoch."""

    def __init__(self, sources: Sources, *, started: float) -> None:
        self.sources = sources
        self.pulled = Pulled()
        self._started = started
        each = zip(sources.models, sources.meter.bases, strict=True)
        self._engines = {
            (seen.name, one.replica): EngineCounts(base)
            for seen, base in each
            for one in seen.engines
        }
        self._churn = Churn(self._named, sources.meter.drained)
        self._adapters = AdapterMetrics(sources.settings.metrics.adapter_labels)
        wanted = sources.settings.metrics
        self._tenant_of = _tenant if wanted.tenant_label else None
        self._tenants = TenantMetrics(wanted.adapter_labels) if wanted.tenant_label else None
        self._process = ProcessCollector(registry=None)  # of this process: memory, CPU, files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lorad-metrics")

    # ------------------------------------------------------------- what happens
    def take_snapshot(self, snapshot: EngineSnapshot, model: str, replica: str = "") -> None:
        self._engines[model, replica].take(snapshot)

    def take_transition(self, event: AdapterEvent) -> None:
        self._churn.take(event)

    def note_reload(self, error: Exception | None) -> None:
        """The configuration was read anew, or refused."""
        reloads = self.sources.reloads
        reloads["success" if error is None else "failure"] += 1
        reloads["last"] = error is None

    async def run(self) -> None:
        """Forget removed adapters now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """On the event loop."""
        names = {entry.name for entry in self.sources.catalog}
        self.sources.meter.keep(names)
        self.sources.meter.keep_tenants(self.sources.tenants() | set(map(_tenant, names)))
        self._churn.keep(names)

    # ------------------------------------------------------------- scrapes
    async def scrape(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics as they are now, and the type of the text."""
        drains = self._churn.drains()
        work: Callable[[], tuple[bytes, str]] = partial(self._expose, accept, drains)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _expose(self, accept: str, drains: Counter[Key]) -> tuple[bytes, str]:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._fill(drains))
        registry.register(self._process)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def _fill(self, drains: Counter[Key]) -> Sheet:
        sources = self.sources
        sheet = Sheet(
            self._tenant_of,
            self._model_of if len(sources.models) > 1 else None,
            replicas=any(seen.replicas for seen in sources.models),
        )
        now = named(sources)
        collect.daemon(sheet, sources, self._started)
        collect.http(sheet, sources)
        collect.refused(sheet, sources)
        for seen in sources.models:
            sheet.model = seen.name
            collect.requests(sheet, sources.meter.kinds(seen.name))
            collect.base(sheet, seen)
            for one in seen.engines:
                sheet.replica = one.replica
                self._fill_engine(sheet, one, now.known)
        collect.machine(sheet, sources)
        collect.registry(sheet, sources)
        collect.watch(sheet, sources)
        self._adapters.write(sheet, sources, now, self._churn, self._engines.values())
        if self._tenants is not None:
            self._tenants.write(sheet, sources.meter)
        self._write_churn(sheet, drains)
        self.pulled.write(sheet)
        snapshot = sources.picture.snapshot
        slots = sources.settings.lora.slots * len(self._engines)
        gateway(sheet, now, snapshot.slots_total if snapshot else slots)
        collect.gateway_load(sheet, snapshot)
        return sheet

    def _fill_engine(self, sheet: Sheet, seen: Seen, known: frozenset[str]) -> None:
        """What one engine has counted and holds."""
        engine, snapshot = self._engines[seen.name, seen.replica], seen.picture.snapshot
        totals = engine.totals(self.sources.catalog.name_of)
        engine.keep(known)
        collect.engine(sheet, seen)
        collect.routed(sheet, seen)
        collect.steps(sheet, totals)
        collect.memory(sheet, snapshot)
        collect.prefix(sheet, totals, snapshot)

    def _model_of(self, name: str) -> tuple[str, str]:
        """An adapter, a base among several or the rest of its adapters: how it is called, and its
        model."""
        label, colon, model = name.partition(":")
        if label in (BASE, OTHER) and colon:
            return label, model
        entry = self.sources.catalog.get(name)
        return name, entry.model if entry is not None else ""

    def _write_churn(self, sheet: Sheet, drains: Counter[Key]) -> None:
        churn = self._churn
        sheet.put("adapter_load_bytes_total", churn.load_bytes)
        for source, histogram in churn.load_seconds.items():
            sheet.observe("adapter_load_seconds", histogram, source)
        for reason in ("load_failed", "adapter_damaged"):
            sheet.put("adapter_load_failures_total", dict(churn.failures).get(reason, 0), reason)
        for reason, outcome in product(DRAIN_REASONS, DRAIN_OUTCOMES):
            sheet.put("adapter_drains_total", drains[reason, outcome], reason, outcome)
        sheet.observe("adapter_drain_seconds", churn.drain_seconds)

    def _named(self, rev: str) -> tuple[str, bool] | None:
        catalog = self.sources.catalog
        name = catalog.name_of(rev)
        return None if name is None else (name, bool(catalog.names_of(rev)))


def _tenant(name: str) -> str:
    return tenant_of(name) or ""
