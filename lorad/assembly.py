"""What lives between the sockets and the engine: made here, and introduced to each other.

Goes in: settings and the open registry, inside a running loop.  Comes out: `Services`, of which
nothing runs yet.  Knows no signal, no listener and no order of starting: those are the daemon's.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine, Iterable
from functools import partial
from pathlib import Path

from engine.messages import AdapterEvent, EngineInfo
from engine.status_messages import EngineSnapshot
from lorad import __version__
from lorad.api.guard import admin_uids
from lorad.board.board import Boards
from lorad.config import Settings
from lorad.engines import One, on_cards
from lorad.errors import BadConfig, LoradError
from lorad.metrics.http import HttpCounts
from lorad.metrics.metrics import Metrics
from lorad.metrics.sources import Sources
from lorad.registry.registry import Registry
from lorad.served import Served
from lorad.service.adapters import AdapterService
from lorad.service.audit import Audit
from lorad.service.callers import Callers
from lorad.service.catalog import Catalog
from lorad.service.draining import Draining
from lorad.service.dynamic import Dynamic
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.explain import Explaining
from lorad.service.fetching import Fetching, Refetch
from lorad.service.folders import Folders
from lorad.service.gate import Gate
from lorad.service.giving_way import GivingWay
from lorad.service.housekeeping import Housekeeping
from lorad.service.inbox import Inbox, Memory
from lorad.service.lineup import Lineup
from lorad.service.listing import Listing
from lorad.service.load_checks import LoadChecks
from lorad.service.making_room import RoomMaker
from lorad.service.model_revisions import ModelRevisions
from lorad.service.names import Names, entry_of
from lorad.service.operations import Operations
from lorad.service.pictures import Pictures
from lorad.service.pooling import PoolingService
from lorad.service.pulls import Pulls
from lorad.service.requests import RequestService
from lorad.service.shares import Shares
from lorad.service.shelf import Shelf
from lorad.service.snapshot import Snapshot
from lorad.service.tasks import Tasks
from lorad.service.tenancy import Tenancy
from lorad.service.text_ahead import TextAhead
from lorad.service.text_threads import TextThreads
from lorad.service.verification import Verification
from lorad.sources import choice
from lorad.sources.fetch import Fetcher
from lorad.sources.reference import Reference
from lorad.tracing.tracing import Tracing
from lorad.watch.watcher import InboxWatcher


class Services:
    """Everything that runs beside the servers.  Raises BadConfig for a folder it cannot have."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self.settings, self.registry = settings, registry
        self.started = time.time()
        self._loop = asyncio.get_running_loop()
        self.instance_id = secrets.token_hex(8)
        self.tasks = Tasks()
        self.events = EventRing(instance_id=self.instance_id)
        self.gate = Gate()
        models = tuple(model.name for model in settings.models)
        self._catalog = Catalog(entry_of(record, models) for record in registry.pointing())
        self.names = Names(registry, self._catalog, models=models)
        self.shelf = Shelf(registry, self._catalog)
        self.models: list[Served] = []
        for index in range(len(settings.models)):
            intake = self.models[0].intake if self.models else None
            refresh = self._refresh
            self.models.append(Served(self, index, intake=intake, refresh=refresh))
        self._share_the_card()
        self.pictures = Pictures({one.name: one.picture for one in self.models})
        self._know_adapters()
        self._let_arrive()
        self._answer()
        self._show()

    def background(self) -> Iterable[Coroutine[object, object, None]]:
        """What each of them does all the while; the daemon gives them a task each."""
        return (
            *(one.picture.run() for model in self.models for one in model.engines.each),
            self.housekeeping.run(),
            self.operations.run(),
            self.metrics.run(),
            self.board.run(),
            self.audit.run(),
            self.load_checks.run(),
            self._read_texts(),
        )

    def _own_tokenizers(self) -> list[str]:
        """Of files that are here: others are fetched by who asks for them."""
        away = self.registry.store.remote
        return [rev for rev in self.registry.own_tokenizers() if rev not in away]

    async def _read_texts(self) -> None:
        """Whose tokenizers adapters have is found before any of them is read."""
        for one in self.models:
            await one.look.run()
        await self.ahead.run()

    @property
    def links(self) -> tuple[EngineLink, ...]:
        """Every engine process."""
        return tuple(one.link for model in self.models for one in model.engines.each)

    def apply(self, now: Settings) -> None:
        """Those who keep a setting that may change are told."""
        self.requests.limit(now.limits)
        self.pooling.limit(now.limits)
        for one in self.models:
            one.pins.settings = now.lora
        self.callers.operators = admin_uids(now.admin.allow_uids)
        self.board.drain_timeout = now.shutdown.drain_timeout

    def _share_the_card(self) -> None:
        """Of several engines that may be on one; one alone has it all."""
        cards = on_cards([one.engines for one in self.models])
        for links in cards:
            shares = Shares(links)
            for link in links:
                link.turn = partial(shares.turn, link)
        giving_way = GivingWay(self.links, cards)
        for one in self.models:
            one.engines.agree()
            for link in [each.link for each in one.engines.each] if one.entry.pools else ():
                link.share = giving_way.join(link, one.entry.beside_generators)

    async def _refresh(self) -> None:
        await self.pictures.refresh()

    def _know_adapters(self) -> None:
        """What all models' adapters share: names, and what leaves the disk."""
        registry, every = self.registry, [one.adapters for one in self.models]
        self._lineup = lineup = Lineup(self._catalog, every)
        self._intake = self.models[0].intake
        self.housekeeping = Housekeeping(registry, self.links, self.shelf, self.events)

        def revisions_of(rev: str) -> ModelRevisions | None:
            one = lineup.get(self._catalog.model_of(rev) or "")
            return one.revisions if one is not None else None

        room = RoomMaker(registry, revisions_of, self.housekeeping.collect)
        self._intake.make_room = self.housekeeping.make_room = room.make
        self.adapters = AdapterService(
            self.names,
            lineup,
            self._intake,
            self.events,
            self.tasks,
            refresh=self.pictures.refresh,
            gate=self.gate,
        )
        by_name = {one.name: one for one in self.models}
        self.verification = Verification(
            self.names,
            lineup,
            self._intake,
            self.events,
            self.tasks,
            run=lambda model, *folders: by_name[model].files.verify(*folders),
        )
        self.load_checks = LoadChecks(
            self.settings.lora.verify_on_load,
            self.tasks,
            check=self.verification.check,
            resident=lambda rev: (of := revisions_of(rev)) is not None and of.resident(rev),
        )
        self.names.on_change = self.pictures.changed

    def _let_arrive(self) -> None:
        """From the inbox, from elsewhere by a pull, and by a request that asks for one."""
        settings, registry = self.settings, self.registry
        self.operations = Operations(registry, self.events, self.tasks)
        self.adapters.outcomes.on_left = self.operations.adopt
        fetching = Fetching(partial(_fetcher_for, settings))
        self.pulls = Pulls(self.operations, fetching, self.adapters, self.names, self._intake)
        refetch = Refetch(
            fetching, registry, self._intake, stopping=lambda: self.operations.stopping
        )
        for one in self.models:
            one.revisions.files.refetch = refetch
        self.dynamic = Dynamic(
            fetching,
            self.pulls,
            self.operations,
            self.names,
            self.events,
            self.tasks,
            allow=settings.lora.resolve_allow if settings.lora.resolve else (),
            every=settings.lora.resolve_every,
            max_waiting=max(1, min(settings.limits.queue, settings.limits.connections) // 2),
        )
        self.memory = Memory(Path(settings.registry.dir) / "inbox.json")
        self.inbox = Inbox(
            self.adapters,
            self.names,
            self._intake,
            self.events,
            self.tasks,
            self.memory,
            copy=self.models[0].files.copy,
            on_delete=settings.watch.on_delete,
        )
        self.folders = Folders(
            self.adapters,
            self._intake,
            copy=self.models[0].files.copy_named,
            vet=self.names.check_free,
        )
        self.adapters.on_removed = self.inbox.reconsider
        for one in self.models:
            one.adapters.losses.on_lost = self.inbox.recover
        self.housekeeping.on_lost = self.adapters.lose_files
        self.watcher = self._make_watcher()
        self.inbox.watcher = self.watcher

    def _answer(self) -> None:
        """Requests, and who may make them."""
        settings, registry = self.settings, self.registry
        for one in self.models:
            one.text.on_missing = self._on_missing
        self.ahead = TextAhead(
            {one.name: one.text for one in self.models if not one.entry.pools},
            self._catalog,
            self._own_tokenizers,
            loading=lambda: not any(link.informed.is_set() for link in self.links),
        )
        self.tracing = self._make_tracing()
        self.threads = TextThreads()
        self.requests = RequestService(
            self.adapters,
            {one.name: one.backend() for one in self.models},
            limits=settings.limits,
            version=__version__,
            threads=self.threads,
            finder=self.dynamic,
            gate=self.gate,
            trace=self.tracing.take if self.tracing else None,
        )
        self.pooling = PoolingService(
            self.requests.reception,
            {one.name: one.pool_backend(registry) for one in self.models},
            limits=settings.limits,
            meter=self.requests.meter,
            crowd=self.requests.crowd,
            threads=self.threads,
            trace=self.tracing.take_pooled if self.tracing else None,
        )
        self.audit = Audit(registry, settings.admin.audit_log)
        self.callers = Callers(
            self.names.models,
            operators=admin_uids(settings.admin.allow_uids),
            tenants=registry.tenants.all(),
        )
        self.tenancy = Tenancy(registry, self.callers, self.events)
        self.tenancy.on_change = self.requests.rates.forget
        self.draining = Draining(self.gate, self.names, self.requests, self.events)

    def _show(self) -> None:
        """What is so, to operators and to Prometheus."""
        links = {one.name: one.link for one in self.models}

        def info(model: str) -> EngineInfo | None:
            link = links.get(model)
            return link.info if link is not None else None

        asks = {one.name: one.asks for one in self.models}
        crowd = self.requests.crowd
        listing = Listing(self.names, self.pictures, self.events, info=info, asks=asks, crowd=crowd)
        nearest = {one.name: one.nearest for one in self.models}
        self.explaining = Explaining(self.names, nearest, gate=self.gate)
        self.snapshot = Snapshot(
            self.settings,
            [one.seen() for one in self.models],
            self.pictures,
            listing,
            self.adapters,
            self._catalog,
            version=__version__,
            instance_id=self.instance_id,
        )
        self.metrics, self.board = self._make_metrics()

    def _make_metrics(self) -> tuple[Metrics, Boards]:
        """Made, and told of what happens."""
        sources = Sources(
            settings=self.settings,
            version=__version__,
            models=tuple(one.seen() for one in self.models),
            picture=self.pictures,
            catalog=self._catalog,
            registry=self.registry,
            meter=self.requests.meter,
            aborted=self.requests.aborted,
            http=HttpCounts(),
            ready=self.snapshot.ready,
            counts=self.snapshot.counts,
            draining=lambda: self.adapters.draining,
            watcher=lambda: self.watcher,
            tenants=lambda: self.callers.names,
            crowd=self.requests.crowd,
        )
        metrics = Metrics(sources, started=self.started)
        board = Boards(sources, self.snapshot, self.requests, self.gate, self.tenancy, self.events)

        for one in self.models:
            for engine in one.engines.each:
                self._tell(one, engine, metrics, board)
        self.operations.on_end = metrics.pulled.take
        self.draining.on_begin = board.note_drain
        return metrics, board

    def _tell(self, one: Served, engine: One, metrics: Metrics, board: Boards) -> None:
        """Of what one engine does."""
        revisions = one.revisions_on(engine.replica)

        def on_adapter(event: AdapterEvent) -> None:
            metrics.take_transition(event)  # first: it may be the last that bears its name
            board.take_transition(event)
            revisions.take_transition(event)
            self.load_checks.take_transition(event)

        def on_snapshot(snapshot: EngineSnapshot) -> None:
            metrics.take_snapshot(snapshot, one.name, engine.replica)
            board.take_snapshot()

        engine.link.on_adapter, engine.picture.on_snapshot = on_adapter, on_snapshot

    def note_reload(self, error: LoradError | None) -> None:
        """The configuration was read anew, or refused."""
        self.metrics.note_reload(error)
        self.board.note_reload(error)

    def _make_tracing(self) -> Tracing | None:
        otel = self.settings.otel
        if not otel.endpoint:
            return None
        return Tracing(otel, base=", ".join(self.names.models), instance=self.instance_id)

    def _make_watcher(self) -> InboxWatcher | None:
        watch = self.settings.watch
        if watch.mode == "off":
            return None
        inbox = Path(watch.dir)
        try:
            inbox.mkdir(mode=0o770, parents=True, exist_ok=True)
        except OSError as error:
            raise BadConfig(
                f"watch.dir: cannot make {inbox}: {error.strerror}",
                hint="make it for the daemon's user, or set another watch.dir",
            ) from error
        return InboxWatcher(
            inbox,
            settle=watch.settle,
            rescan=watch.rescan,
            mode=watch.mode,
            known=self.inbox.known(),
            on_folder=self.inbox.on_folder,
            on_gone=self.inbox.on_gone,
            on_warning=self._on_watch_warning,
        )

    def _on_missing(self, rev: str) -> None:
        """From a thread that wanted to read its chat template."""
        lose = self.adapters.lose_files
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self.tasks.spawn(lose(rev)))

    def _on_watch_warning(self, message: str) -> None:
        """From the watcher's thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(
                lambda: self.events.publish("watch.warning", level="warn", message=message)
            )


def _fetcher_for(
    settings: Settings, reference: Reference, /, *, token: str, offline: bool
) -> Fetcher:
    return choice.fetcher_for(reference, settings, token=token, offline=offline)
