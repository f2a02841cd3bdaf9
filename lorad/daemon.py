"""The daemon: what exists, in which order it starts, and how it ends.

    ground     state lock → registry → reconcile → sockets bound
    Daemon     → livez → engine → warm-up → pinned adapters → READY
               → signals: drain, then abort → everything closed → exit status

The composition root: the only module that knows all the others.  Goes in: Settings.  Comes out: an
exit status.  StartError is printed as one line with the next step.
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from engine.client import EngineClient
from engine.messages import AdapterEvent
from lorad import __version__, config, descriptors, key_file, logs, paths
from lorad.api.app import (
    admin_app,
    admin_tcp_app,
    inference_app,
    inference_tcp_app,
    limit,
    metrics_app,
)
from lorad.api.deps import Deps
from lorad.api.guard import admin_uids
from lorad.api.server import HttpServer
from lorad.api.tcp import TcpKeys
from lorad.api.uploads import Uploads
from lorad.base import spec_of
from lorad.config import Settings
from lorad.dump import dump_state
from lorad.errors import BadConfig, LoradError, RegistryUnusable, StartError
from lorad.ground import Ground, ground
from lorad.log_ring import LogRing
from lorad.metrics.http import HttpCounts
from lorad.metrics.metrics import Metrics
from lorad.metrics.sources import Sources
from lorad.pulse import Pulse
from lorad.reload import Reload
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
from lorad.service.files import AdapterFiles
from lorad.service.gate import Gate
from lorad.service.housekeeping import Housekeeping
from lorad.service.inbox import Inbox, Memory
from lorad.service.intake import Intake
from lorad.service.ledger import Ledger
from lorad.service.listing import Listing
from lorad.service.making_room import RoomMaker
from lorad.service.names import Names, entry_of
from lorad.service.operations import Operations
from lorad.service.picture import Picture
from lorad.service.pins import PinRoom
from lorad.service.pulls import Pulls
from lorad.service.registration import Registration
from lorad.service.requests import RequestService
from lorad.service.revisions import Revisions
from lorad.service.snapshot import Snapshot
from lorad.service.tasks import Tasks
from lorad.service.tenancy import Tenancy
from lorad.service.text import TextService
from lorad.service.verification import Verification
from lorad.sources import fetch
from lorad.sources.reference import Reference
from lorad.systemd import Notifier
from lorad.watch.watcher import InboxWatcher
from lorad.wire_operate import Reloaded

log = logging.getLogger("lorad")

TOKENIZER_THREADS = 4
FLUSH_SECONDS = 10.0
#: After an abort, streams get this long to send their error event.
FAREWELL_SECONDS = 2.0
#: systemd is asked for this much more time while the engine's start makes progress, so often.
EXTEND_SECONDS, EXTEND_EVERY = 120.0, 5.0
#: What a stop takes beside the drain: farewells, the engine's end, the last writes.
CLOSE_SECONDS = 20.0


def run(
    settings: Settings,
    places: paths.Paths,
    env: Mapping[str, str],
    reload: Callable[[], Settings],
) -> int:
    """Serve until a signal says otherwise; returns the exit status.

    `reload` reads the configuration anew, for SIGHUP; it raises BadConfig.
    """
    ring = LogRing()
    logs.setup(settings.log.level, settings.log.format, env, ring)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        with ground(settings, places, env) as held:
            asyncio.run(Daemon(held, Notifier(env), reload, ring).run())
    except StartError as error:
        error.print(logs.error_mark(env))
        return error.exit
    except Exception:  # the last border: a fault of ours is logged whole, and is exit 1
        log.critical("lorad failed", exc_info=True)
        return 1
    return 0


class Daemon:
    """Everything that runs.  Built inside the loop by `run`."""

    def __init__(
        self, ground: Ground, notifier: Notifier, reload: Callable[[], Settings], ring: LogRing
    ) -> None:
        self.ground, self.settings = ground, ground.settings
        self.notifier, self._read, self.log_ring = notifier, reload, ring
        self._told: tuple[str, int] | None = None  # progress that was reported last
        self._extended = 0.0  # when systemd was last asked for more time

    async def run(self) -> None:
        """Start, serve, drain, stop.  Raises StartError if the engine cannot be had."""
        self._build()
        self._handle_signals()
        servers = self._servers()
        for server in servers:
            await server.start()
        inference, admin = self.settings.inference.socket, self.settings.admin.socket
        self._say(f"listening on {inference} and, for loractl, {admin}; loading the base model")
        try:
            await self._serve()
        finally:
            self.events.close()
            self.log_ring.shut()
            for server in servers:
                await server.stop(FAREWELL_SECONDS)
            await self._close()

    # ------------------------------------------------------------- building
    def _build(self) -> None:
        settings, registry = self.settings, self.ground.registry
        loop = asyncio.get_running_loop()
        self.instance_id = secrets.token_hex(8)
        self.stopping = asyncio.Event()  # the first signal
        self.aborting = asyncio.Event()  # the second one
        self.tasks = Tasks()
        self.events = EventRing(instance_id=self.instance_id)
        self.gate = Gate()
        self.text = TextService(Path(settings.model.base), registry.store.path)
        self.link = EngineLink(
            settings.engine_config(),
            self.events,
            new_client=partial(EngineClient, stall_seconds=settings.model.stall_after),
            replace_after=settings.model.replace_after,
        )
        self.link.on_progress, self.link.on_state = self._on_progress, self._on_state
        self.pulse = Pulse(self.notifier, lambda: self.link.tended)
        catalog = Catalog(map(entry_of, registry.pointing()))
        self.names = Names(registry, catalog, model=settings.model.name)
        self.picture = Picture(self.link)
        files = AdapterFiles(settings, spec_of(settings), self.link)
        intake = Intake(registry.store, inspect=files.inspect, pack=files.pack)
        revisions = Revisions(registry, self.link, intake, catalog, self.events, self.tasks)
        self.housekeeping = Housekeeping(registry, self.link, revisions, self.events)
        room = RoomMaker(registry, revisions, self.housekeeping.collect)
        intake.make_room = self.housekeeping.make_room = room.make
        self.pins = pins = PinRoom(registry, catalog, self.link, settings.lora)
        registration = Registration(
            self.names, self.link, intake, revisions, self.events, check_pin=pins.check
        )
        self.adapters = AdapterService(
            self.names,
            self.link,
            intake,
            revisions,
            registration,
            self.events,
            self.tasks,
            check_pin=pins.check,
            refresh=self.picture.refresh,
            gate=self.gate,
        )
        self.verification = Verification(
            self.names, self.link, intake, revisions, self.events, self.tasks, run=files.verify
        )
        self.operations = Operations(registry, self.events, self.tasks)
        self.adapters.on_left = self.operations.adopt
        fetching = Fetching(partial(_fetcher_for, settings))
        self.pulls = Pulls(self.operations, fetching, self.adapters, self.names, intake)
        revisions.refetch = Refetch(
            fetching, registry, intake, stopping=lambda: self.operations.stopping
        )
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
        self.names.on_change = revisions.on_change = self.picture.changed
        revisions.on_retired = self.text.forget
        self.memory = Memory(Path(settings.registry.dir) / "inbox.json")
        self.inbox = Inbox(
            self.adapters,
            self.names,
            intake,
            self.events,
            self.tasks,
            self.memory,
            copy=files.copy,
            on_delete=settings.watch.on_delete,
        )
        self.adapters.on_removed = self.inbox.reconsider
        self.adapters.on_lost = self.inbox.recover
        self.housekeeping.on_lost = self.adapters.lose_files
        self.text.on_missing = self._on_missing
        self.pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="lorad-text")
        self.requests = RequestService(
            self.adapters,
            self.link,
            self.text,
            limits=settings.limits,
            version=__version__,
            base_digest=_base_digest(Path(settings.model.base)),
            pool=self.pool,
            finder=self.dynamic,
            gate=self.gate,
        )
        self.audit = Audit(registry, settings.admin.audit_log)
        self.callers = Callers(
            settings.model.name,
            operators=admin_uids(settings.admin.allow_uids),
            tenants=registry.tenants.all(),
        )
        self.tenancy = Tenancy(registry, self.callers, self.events)
        self.tenancy.on_change = self.requests.rates.forget
        self.draining = Draining(self.gate, self.names, self.requests, self.events)
        listing = Listing(self.names, self.picture, self.events, info=lambda: self.link.info)
        self.explaining = Explaining(
            self.names, self.link, info=lambda: self.link.info, gate=self.gate
        )
        self.snapshot = Snapshot(
            settings,
            self.link,
            self.picture,
            listing,
            self.adapters,
            version=__version__,
            instance_id=self.instance_id,
        )
        self.watcher = self._watcher()
        self.inbox.watcher = self.watcher
        self._loop = loop
        self.log_ring.attach(loop)
        self.metrics = self._metrics(catalog, revisions)
        self.reload = Reload(settings, self.ground.as_read, self._read, self.events)
        self.tcp_keys, self._fresh_keys = TcpKeys(), TcpKeys()
        self._read_keys(settings)
        self._take_keys()
        self.reload.prepare, self.reload.apply = self._read_keys, self._apply
        self.reload.on_outcome = self.metrics.note_reload

    def _metrics(self, catalog: Catalog, revisions: Revisions) -> Metrics:
        """And let it hear of what happens."""
        sources = Sources(
            settings=self.settings,
            version=__version__,
            link=self.link,
            picture=self.picture,
            catalog=catalog,
            registry=self.ground.registry,
            meter=self.requests.meter,
            aborted=self.requests.aborted,
            http=HttpCounts(),
            ready=self.snapshot.ready,
            counts=self.snapshot.counts,
            draining=lambda: self.adapters.draining,
            watcher=lambda: self.watcher,
        )
        metrics = Metrics(sources, started=time.time())

        def on_adapter(event: AdapterEvent) -> None:
            metrics.take_transition(event)  # first: it may be the last that bears its name
            revisions.take_transition(event)

        self.link.on_adapter = on_adapter
        self.picture.on_snapshot = metrics.take_snapshot
        self.operations.on_end = metrics.pulled.take
        return metrics

    def _servers(self) -> list[HttpServer]:
        limits = self.settings.limits
        deps = Deps(
            settings=self.settings,
            requests=self.requests,
            adapters=self.adapters,
            verification=self.verification,
            explaining=self.explaining,
            housekeeping=self.housekeeping,
            ledger=Ledger(self.ground.registry, self.adapters),
            pulls=self.pulls,
            operations=self.operations,
            audit=self.audit,
            callers=self.callers,
            tenancy=self.tenancy,
            listing=self.snapshot,
            events=self.events,
            link=self.link,
            uploads=Uploads(
                self.adapters,
                max_bytes=self.settings.watch.max_adapter_bytes,
                vet=self.names.check_free,
            ),
            metrics=self.metrics,
            http=self.metrics.sources.http,
            log=self.log_ring,
            draining=self.draining,
            reload=self._reload,
            version=__version__,
            started=time.time(),
        )
        self.deps = deps
        faces = {
            "inference": (inference_app(deps), self.ground.inference),
            "admin": (admin_app(deps), self.ground.admin),
        }
        on_tcp = {
            "metrics": lambda: metrics_app(deps),
            "tcp": lambda: inference_tcp_app(deps, self.tcp_keys),
            "tcp-admin": lambda: admin_tcp_app(deps, self.tcp_keys),
        }
        for face, listener in self.ground.tcp.items():
            faces[face] = (on_tcp[face](), listener)
        connections = descriptors.share(limits.connections, listeners=len(faces))
        servers = {
            name: HttpServer(
                app,
                listener,
                receipt_seconds=limits.request_receipt,
                idle_seconds=limits.idle,
                connections=connections,
                header_bytes=limits.headers,
                on_refused=deps.note_refused,
            )
            for name, (app, listener) in faces.items()
        }
        self.faces = [(faces[name][0], server) for name, server in servers.items()]
        for name, server in servers.items():
            self.metrics.sources.connections[name] = partial(getattr, server, "num_connections")
        return list(servers.values())

    def _watcher(self) -> InboxWatcher | None:
        watch = self.settings.watch
        if watch.mode == "off":
            return None
        inbox = Path(watch.dir)
        try:
            inbox.mkdir(mode=0o770, parents=True, exist_ok=True)
        except OSError as error:
            raise BadConfig(f"watch.dir: cannot make {inbox}: {error.strerror}") from error
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

    # ------------------------------------------------------------- serving
    async def _serve(self) -> None:
        """From the engine's start to the end of the drain."""
        self.link.start()
        for work in (
            *(self.picture.run(), self.housekeeping.run()),
            *(self._flush(), self.pulse.run(), self.operations.run(), self.metrics.run()),
            self.audit.run(),
        ):
            self.tasks.spawn(work)
        if self.watcher is not None:
            self.watcher.start()
        self.events.publish("daemon.start", message=f"lorad {__version__}, pid {os.getpid()}")
        for level, text in self.ground.registry.report.messages():
            self.events.publish("registry.recovered", level=level, message=text)
        for text in config.doubts(self.settings):
            self.events.publish("config.warning", level="warn", message=text)
        await self.operations.resume()
        if await self._first_of(self.link.ready.wait()):
            _spare_the_collector()
            self.notifier.ready(self._state())
            log.info("ready: %s", self._state())
            await self._first_of()
        await self._drain()

    async def _first_of(self, *work: object) -> bool:
        """Wait for `work`, unless a signal or a dead engine comes first; True if it was done."""
        waiting = [asyncio.ensure_future(w) for w in (*work, self.stopping.wait())]  # type: ignore[call-overload]
        try:
            await asyncio.wait({*waiting, self.link.failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.link.failed.done():
                self.link.failed.result()
            return not self.stopping.is_set()
        finally:
            for future in waiting:
                future.cancel()

    async def _drain(self) -> None:
        """No new work; what runs may end within `drain_timeout`, or until the second signal."""
        timeout = self.settings.shutdown.drain_timeout
        self.requests.drain()
        self.dynamic.close()
        self.notifier.stopping(
            f"draining, {self.requests.active} requests in flight",
            extend_seconds=timeout + FAREWELL_SECONDS + CLOSE_SECONDS,
        )
        self.events.publish("drain.start", message=f"{self.requests.active} requests in flight")
        idle = asyncio.ensure_future(self.requests.wait_idle(timeout))
        second = asyncio.ensure_future(self.aborting.wait())
        await asyncio.wait({idle, second}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        second.cancel()
        if left := self.requests.active:
            self.events.publish("drain.forced", level="warn", message=f"{left} requests aborted")
            self.requests.abort_all("draining", "lorad is shutting down")
            await self.requests.wait_idle(FAREWELL_SECONDS)

    async def _close(self) -> None:
        self.notifier.stopping("stopping", extend_seconds=CLOSE_SECONDS)
        if self.watcher is not None:
            await asyncio.to_thread(self.watcher.stop)
        self.operations.close()
        await self.link.stop()
        await self.tasks.cancel()
        await self._save()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.metrics.close()
        self._say("stopped")

    # ------------------------------------------------------------- signals
    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        loop.add_signal_handler(signal.SIGUSR1, self._on_dump)

    def _on_stop(self) -> None:
        if self.stopping.is_set():
            self.aborting.set()
        self.stopping.set()

    def _on_hangup(self) -> None:
        async def reload() -> None:
            with contextlib.suppress(LoradError):  # the events have told of it
                await self._reload()

        self.tasks.spawn(reload())

    async def _reload(self) -> Reloaded:
        """What may change changes, the inbox is looked at, pinned adapters are tried once more."""
        self.notifier.reloading()
        try:
            done = await self.reload()
        finally:
            self.notifier.reloaded(self._state())
            if self.watcher is not None:
                self.watcher.rescan_now()
        if self.link.info is not None:
            self.tasks.spawn(self.adapters.raise_pinned())
        return done

    def _read_keys(self, settings: Settings) -> None:
        """Raises BadConfig; `_take_keys` puts them into effect."""
        self._fresh_keys = TcpKeys(*key_file.of_settings(settings))

    def _take_keys(self) -> None:
        """The apps hold `tcp_keys`.  What listens does not change before a restart."""
        keys, fresh = self.tcp_keys, self._fresh_keys
        keys.inference, keys.admin = fresh.inference, fresh.admin
        keys.open = all(_is_loopback(s) for f, s in self.ground.tcp.items() if f == "tcp")

    def _apply(self, now: Settings) -> None:
        """Those who keep a setting are told; all others read it here when they need it."""
        self.settings = self.deps.settings = now
        self._take_keys()
        logs.set_level(now.log.level)
        self.requests.limit(now.limits)
        self.pins.settings = now.lora
        self.callers.operators = admin_uids(now.admin.allow_uids)
        self.deps.uploads.max_bytes = now.watch.max_adapter_bytes
        limits = now.limits
        connections = descriptors.share(limits.connections, listeners=len(self.faces))
        for app, server in self.faces:
            limit(app, now)
            server.limit(
                receipt_seconds=limits.request_receipt,
                idle_seconds=limits.idle,
                connections=connections,
                header_bytes=limits.headers,
            )

    def _on_dump(self) -> None:
        dump_state(self.snapshot.status())

    # ------------------------------------------------------------- in the background
    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._save()

    async def _save(self) -> None:
        """What may be lost: times of last use, how the inbox looked.  A full disk stops neither."""
        try:
            await self.adapters.flush()
            await self.tenancy.flush()
            await self.audit.flush()
        except (LoradError, RegistryUnusable) as error:
            log.warning("times of last use are not written now: %s", error)
        try:
            await asyncio.to_thread(self.memory.save)
        except OSError as error:
            log.warning("what was seen of the inbox is not written now: %s", error)

    def _on_progress(self, phase: str, fraction: float) -> None:
        """Weights report every tensor; systemd hears of it now and then, the log of each quarter.

        A quarter of a large model on a slow disk takes longer than systemd waits.
        """
        step, now = (phase, int(fraction * 4)), time.monotonic()
        if step == self._told and now - self._extended < EXTEND_EVERY:
            return
        text = f"loading the base model: {phase} {fraction:.0%}"
        self.notifier.status(text, extend_seconds=EXTEND_SECONDS)
        self._extended = now
        if step != self._told:
            self._told = step
            log.info("%s", text)

    def _state(self) -> str:
        """One line for `systemctl status`."""
        if self.link.state == "ready":
            return f"serving {self.settings.model.name}"
        return f"{self.link.state}: {self.link.progress}"

    def _on_state(self) -> None:
        if not self.stopping.is_set():
            self.notifier.status(self._state())

    def _on_missing(self, rev: str) -> None:
        """From a thread that wanted to read its chat template."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self.tasks.spawn(self.adapters.lose_files(rev)))

    def _on_watch_warning(self, message: str) -> None:
        """From the watcher's thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(
                lambda: self.events.publish("watch.warning", level="warn", message=message)
            )

    def _say(self, text: str) -> None:
        log.info("%s", text)
        self.notifier.status(text)


def _is_loopback(listener: socket.socket) -> bool:
    return ip_address(listener.getsockname()[0]).is_loopback


def _spare_the_collector() -> None:
    """What is there now stays: no collection need walk through it, 50 ms with no adapter yet."""
    gc.collect()
    gc.freeze()


def _base_digest(folder: Path) -> str:
    """Tells two bases apart in `system_fingerprint`, without reading gigabytes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for weights in sorted(folder.glob("*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}".encode())
    return digest.hexdigest()


def _fetcher_for(
    settings: Settings, reference: Reference, /, *, token: str, offline: bool
) -> fetch.Fetcher:
    return fetch.fetcher_for(reference, settings, token=token, offline=offline)
