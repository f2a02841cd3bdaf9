"""Boards: the one owner of the board, which keeps its windows and paints it for who looks.

Goes in: every snapshot and transition of the engine, on the event loop.  Comes out: a `Board`, or
messages for a reader.  While nobody looks a second costs what the windows cost; what has to be
asked of the system is asked in a thread, and only for readers.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

from engine.adapters.states import State
from engine.messages import AdapterEvent
from engine.status_messages import EngineSnapshot, RevisionStatus
from lorad.board import slots
from lorad.board.churn import RecentChurn
from lorad.board.drains import Drains
from lorad.board.health import HealthChecks
from lorad.board.machine import Sampler
from lorad.board.requests import RequestRows
from lorad.board.sharing import NameRates
from lorad.board.stream import Message, Stream
from lorad.board.tenants import TenantRows
from lorad.board.traffic import Traffic
from lorad.board_apply import MAX_EVENTS
from lorad.metrics.sources import Sources
from lorad.service.events import EventRing, rfc3339, utc_now
from lorad.service.gate import Gate
from lorad.service.requests import RequestService
from lorad.service.snapshot import Snapshot
from lorad.service.tenancy import Tenancy
from lorad.service.whose import Whose
from lorad.wire_stream import Board, Health, Machine, Slot

#: Snapshots come as often as something changes; windows take one a second of them.
TICK_SECONDS = 0.9
#: Readers share a board that is no older.
FRESH_SECONDS = 0.15
#: What is asked in a thread: how busy the machine is, and all that changes seldom.
MACHINE_SECONDS, SELDOM_SECONDS = 1.0, 5.0


class Boards:
    """`clock` is that of the requests, in seconds.  `drain_timeout`: of the daemon's own drain."""

    def __init__(
        self,
        sources: Sources,
        snapshot: Snapshot,
        requests: RequestService,
        gate: Gate,
        tenancy: Tenancy,
        events: EventRing,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._snapshot, self._events = sources, snapshot, events
        self._several = len(sources.models) > 1
        self._requests, self._tenancy, self._clock = requests, tenancy, clock
        self._ticked = clock()
        self._traffic = Traffic(requests.meter, lambda: requests.crowd.begun)
        self._slots, self._rates = slots.SlotWindows(), NameRates()
        self._churn = RecentChurn(self._named, clock())
        self.drain_timeout = sources.settings.shutdown.drain_timeout
        self._drains = Drains(gate, requests, sources.catalog, lambda: self.drain_timeout)
        self._rows = RequestRows(requests.crowd, several=self._several)
        self._tenants = TenantRows(requests.crowd)
        self._checks = HealthChecks(sources, now=utc_now)
        self._sampler = Sampler()
        self._machine, self._health = Machine(), Health()
        self._sampled = self._looked = float("-inf")  # when
        self._counts: dict[str, int] = {}
        self._sampling = asyncio.Lock()
        self._readers = 0
        self._came = asyncio.Event()  # somebody looks
        self._seen: tuple[EngineSnapshot | None, list[RevisionStatus]] | None = None
        self._painted: tuple[float, Board] | None = None
        self._stream = Stream(self.paint, events, clock)

    # ------------------------------------------------------------- what happens
    def take_snapshot(self) -> None:
        """There is a new one of some engine."""
        if self._clock() - self._ticked >= TICK_SECONDS:
            self._tick(self._sources.picture.snapshot)

    def take_transition(self, event: AdapterEvent) -> None:
        now = self._clock()
        self._churn.take(event, now)
        if event.after == State.DRAINING:
            self._drains.begin_revision(event.rev, self._sources.picture.by_rev.get(event.rev), now)

    def note_drain(self, name: str) -> None:
        """An operator drains a name, or "" all."""
        self._drains.begin(name, self._clock())

    def note_reload(self, error: Exception | None) -> None:
        self._checks.note_reload(error)

    async def run(self) -> None:
        """Keep time where no engine does, and readers' figures fresh, until it is cancelled."""
        while True:
            if not self._readers:
                self._came.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await (asyncio.sleep(TICK_SECONDS) if self._readers else self._came.wait())
            if self._clock() - self._ticked >= 2 * TICK_SECONDS:
                self._tick(None)
            if self._readers:
                await self._sample()

    def _tick(self, snapshot: EngineSnapshot | None) -> None:
        now = self._ticked = self._clock()
        engines = [one for seen in self._sources.models for one in seen.engines]
        each = [one.picture.snapshot if snapshot is not None else None for one in engines]
        self._traffic.tick(now, *each)
        if any(one.replica for one in engines):  # several may hold the same revision
            for one, its in zip(engines, each, strict=True):
                self._slots.tick(now, its, slots.held_of(its), f"{one.name} {one.replica}")
        else:
            self._slots.tick(now, snapshot, self._held(snapshot))
        self._rates.tick(now, self._sharing(snapshot), self._requests.meter.names)
        self._tenants.tick(now)

    # ------------------------------------------------------------- who looks
    async def once(self) -> Board:
        """As it is now."""
        await self._sample()
        await self._snapshot.look()
        return self.paint()

    async def follow(
        self, interval: float, after: int | None = None
    ) -> AsyncGenerator[Message, None]:
        """See Stream."""
        with self._reader():
            await self._sample()
            await self._snapshot.look()
            async with aclosing(self._stream.follow(interval, after)) as messages:
                async for message in messages:
                    yield message
                    if interval < TICK_SECONDS:
                        self._sources.picture.changed()  # oftener than it looks by itself

    def paint(self) -> Board:
        """Without waiting.  Of a stream that is yet to begin."""
        now = self._clock()
        if self._painted is not None and now - self._painted[0] < FRESH_SECONDS:
            return self._painted[1]
        snapshot = self._sources.picture.snapshot
        held = self._held(snapshot)
        board = Board(
            sequence=1,
            time=rfc3339(utc_now()),
            interval_seconds=0.0,
            status=self._snapshot.status(self._counts),
            load=self._traffic.load(),
            machine=self._machine,
            churn=self._churn.look(now),
            health=self._health,
            slots=self._slots_of(held),
            drains=self._drains.look(now, held),
            requests=self._rows.look(now),
            num_requests=self._requests.active,
            tenants=self._tenants.look(),
            events=self._events.newest(MAX_EVENTS),
        )
        self._painted = now, board
        return board

    def _held(self, snapshot: EngineSnapshot | None) -> list[RevisionStatus]:
        if self._seen is None or self._seen[0] is not snapshot:
            self._seen = snapshot, slots.held_of(snapshot)
        return self._seen[1]

    def _slots_of(self, held: Sequence[RevisionStatus]) -> dict[str, Slot]:
        return slots.rows(
            held,
            self._block_bytes,
            self._sources.catalog,
            self._slots,
            Whose(self._requests.crowd),
            self._rates,
            several=self._several,
            places=self._sources.picture.places,
        )

    def _sharing(self, snapshot: EngineSnapshot | None) -> Iterator[str]:
        """Names of those that are held, and have several."""
        for status in self._held(snapshot):
            names = self._sources.catalog.names_of(status.rev)
            yield from names if len(names) > 1 else ()

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        self._readers += 1
        self._came.set()
        try:
            yield
        finally:
            self._readers -= 1

    async def _sample(self) -> None:
        """In a thread, one at a time; what is fresh is left."""
        async with self._sampling:
            now, models = self._clock(), self._sources.models
            links = [one.link for seen in models for one in seen.engines]
            infos = [link.info for link in links]
            if now - self._sampled >= MACHINE_SECONDS * 0.8:
                gpu = next((info.device_uuid for info in infos if info is not None), "")
                pids = [link.pid for link in links if link.pid is not None]
                self._machine = await asyncio.to_thread(self._sampler.sample, pids, gpu)
                self._sampled = now
                # A registry that cannot be read is a finding of `health`: the rest goes on.
                with contextlib.suppress(Exception):
                    self._counts = await asyncio.to_thread(self._snapshot.counts)
            if now - self._looked >= SELDOM_SECONDS:
                self._health = await asyncio.to_thread(self._checks.look)
                self._looked = now
                with contextlib.suppress(Exception):
                    self._tenants.know((await asyncio.to_thread(self._tenancy.list)).items)

    def _block_bytes(self, rev: str) -> int:
        """Of the model that a revision is of; 0 before its engine is known."""
        models, model = self._sources.models, self._sources.catalog.model_of(rev)
        one = next((seen for seen in models if seen.name == model), models[0])
        return one.link.info.block_bytes if one.link.info is not None else 0

    def _named(self, rev: str) -> tuple[str, bool] | None:
        catalog = self._sources.catalog
        name = catalog.name_of(rev)
        return None if name is None else (name, bool(catalog.names_of(rev)))
