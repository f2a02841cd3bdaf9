"""A Metrics over fakes: names in a real catalog, and an engine whose snapshots a test writes."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.status_messages import EngineSnapshot, PoolStatus, RevisionStatus
from lorad.config import Settings
from lorad.config_sections import Metrics as MetricsSection
from lorad.config_sections import Model, RegistrySection, StoreSection
from lorad.metrics.http import HttpCounts
from lorad.metrics.metrics import Metrics
from lorad.metrics.sources import Sources
from lorad.registry.counts import Counts
from lorad.service.catalog import Catalog, Entry
from lorad.service.meter import Meter
from lorad.service.snapshot import Seen

POOL = PoolStatus(
    total=100,
    free=40,
    kv_active=20,
    kv_cached=10,
    adapter_active=20,
    adapter_idle=10,
    block_bytes=1024,
    block_size=16,
)
BASE = RevisionStatus(rev="", state="idle")


def snapshot(*revisions, pid=1, **fields):
    """As the engine with that pid tells it."""
    return EngineSnapshot(
        **{
            "step": 1,
            "running": sum(r.running for r in revisions),
            "waiting": sum(r.waiting for r in revisions),
            "pool": POOL,
            "slots_total": 8,
            "slots_used": 0,
            "ram_used_bytes": 0,
            "ram_limit_bytes": 1,
            "base": BASE,
            "pid": pid,
            **fields,
        },
        revisions=revisions,
    )


def status(name, state="idle", **fields):
    return RevisionStatus(rev=rev_of(name), state=state, **fields)


def rev_of(name):
    return f"rev-{name}"


class World:
    """`names` exist; `scrape` gives (sample, sorted labels) -> value."""

    def __init__(self, folder, *, limit=200, tenant_label=False):
        self.catalog = Catalog()
        self.meter, self.crowd = Meter(), []
        self.picture = SimpleNamespace(snapshot=None, by_rev={})
        self.watcher = None
        settings = Settings(
            models=(Model(base="/models/tiny", name="tiny"),),
            metrics=MetricsSection(adapter_labels=limit, tenant_label=tenant_label),
            registry=RegistrySection(dir=str(folder)),
            store=StoreSection(dir=str(folder)),
        )
        registry = SimpleNamespace(
            transactions=Counts(),
            quarantined=lambda: {"E_NAN": 2},
            file_bytes=lambda: 4096,
            backed_up_at=lambda: 0.0,
        )
        link = SimpleNamespace(state="ready", info=None, restarts=0, last_step_at=0.0)
        self.sources = Sources(
            settings=settings,
            version="0.1.0",
            models=(Seen(settings.models[0], link, self.picture),),
            picture=self.picture,
            catalog=self.catalog,
            registry=registry,
            meter=self.meter,
            aborted={},
            http=HttpCounts(),
            ready=lambda: (True, ""),
            counts=lambda: {"registered": len(list(self.catalog))},
            draining=lambda: False,
            watcher=lambda: self.watcher,
            crowd=self.crowd,
        )
        self.metrics = Metrics(self.sources, started=1_700_000_000.0)

    def add(self, *names, **fields):
        for name in names:
            self.catalog.put(Entry(name, rev_of(name), **fields))

    def take(self, taken):
        self.picture.snapshot = taken
        self.picture.by_rev = {r.rev: r for r in taken.revisions}
        self.metrics.take_snapshot(taken, "tiny")

    def use(self, name, tokens=1):
        """A sequence that has ended."""
        counts = self.meter.names.setdefault(name, type(self.meter.names["__base__"])())
        counts.sequences += 1
        counts.generated_tokens += tokens
        counts.finished["stop"] += 1

    def text(self, accept=""):
        return asyncio.run(self.metrics.scrape(accept))[0].decode()

    def scrape(self):
        families = text_string_to_metric_families(self.text())
        return {
            (s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples
        }

    def value(self, name, **labels):
        return self.scrape().get((f"lorad_{name}", tuple(sorted(labels.items()))))

    def adapters(self, name, **labels):
        """Adapter -> value of one metric whose other labels hold these."""
        wanted = set(labels.items())
        return {
            dict(key)["adapter"]: value
            for (n, key), value in self.scrape().items()
            if n == f"lorad_{name}" and wanted <= set(key)
        }


@pytest.fixture
def make_world(tmp_path):
    """make_world(limit=..., tenant_label=...)"""
    made = []

    def make(**options):
        made.append(World(tmp_path, **options))
        return made[-1]

    yield make
    for world in made:
        world.metrics.close()


@pytest.fixture
def world(make_world):
    return make_world()


@pytest.fixture
def told():
    """The makers of what an engine tells: `snapshot`, `status`, `rev_of`."""
    return SimpleNamespace(snapshot=snapshot, status=status, rev_of=rev_of)
