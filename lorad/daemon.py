"""The daemon: in which order it starts, what a signal does, and how it ends.

    ground     state lock → registry → reconcile → sockets bound
    Daemon     → livez → engine → warm-up → pinned adapters → READY
               → signals: drain, then abort → everything closed → exit status

Goes in: Settings, which `checks.check_start` found nothing against.  Comes out: an exit status.
What runs is made in `assembly.py`, and served by `faces.py`.  StartError is printed
as one line with the next step.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.collector import spare_what_is_there
from lorad import __version__, logs, paths
from lorad.assembly import Services
from lorad.checks import doubts
from lorad.config import Settings
from lorad.dump import dump_state
from lorad.errors import LoradError, RegistryUnusable, StartError
from lorad.faces import Faces
from lorad.ground import Ground, ground
from lorad.log_ring import LogRing
from lorad.progress import Progress
from lorad.pulse import Pulse
from lorad.reload import Reload
from lorad.service.threads import bound_pool
from lorad.spelling import several
from lorad.systemd import Notifier
from lorad.wire_operate import Reloaded

log = logging.getLogger("lorad")

FLUSH_SECONDS = 10.0
#: After an abort, streams get this long to send their error event.
FAREWELL_SECONDS = 2.0
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
    """From the first socket to the last write.  Built inside the loop by `run`."""

    def __init__(
        self, ground: Ground, notifier: Notifier, reload: Callable[[], Settings], ring: LogRing
    ) -> None:
        self.ground, self.settings = ground, ground.settings
        self.notifier, self._read, self.log_ring = notifier, reload, ring

    async def run(self) -> None:
        """Start, serve, drain, stop.  Raises StartError if the engine cannot be had."""
        bound_pool(asyncio.get_running_loop())
        self._build()
        self._handle_signals()
        await self.faces.start()
        inference, admin = self.settings.inference.socket, self.settings.admin.socket
        self.progress.say(
            f"listening on {inference} and, for loractl, {admin}; loading the base model"
        )
        try:
            if not self.stopping.is_set():
                await self._serve()
        finally:
            self.services.events.close()
            self.log_ring.shut()
            await self.faces.stop(FAREWELL_SECONDS)
            await self._close()

    def _build(self) -> None:
        self.stopping = asyncio.Event()  # the first signal
        self.aborting = asyncio.Event()  # the second one
        self.log_ring.attach(asyncio.get_running_loop())
        self.services = services = Services(self.settings, self.ground.registry)
        links = {
            f"{one.name} replica {engine.replica}" if engine.replica else one.name: engine.link
            for one in services.models
            for engine in one.engines.each
        }
        self.progress = Progress(self.notifier, links, services.names.models)
        for name, link in links.items():
            link.on_progress, link.on_state = partial(self.progress.take, name), self._on_state
        self.pulse = Pulse(self.notifier, lambda: all(link.tended for link in services.links))
        self.reload = Reload(self.settings, self.ground.as_read, self._read, services.events)
        self.faces = Faces(self.ground, services, self.log_ring, self._reload, self.reload.describe)
        self.reload.prepare, self.reload.apply = self.faces.read_keys, self._apply
        self.reload.on_outcome = services.note_reload

    # ------------------------------------------------------------- serving
    async def _serve(self) -> None:
        """From the engine's start to the end of the drain."""
        for link in self.services.links:
            link.start()
        for work in (*self.services.background(), self._flush(), self.pulse.run()):
            self.services.tasks.spawn(work)
        if self.services.watcher is not None:
            self.services.watcher.start()
        self._tell_of_the_start()
        await self.services.operations.resume()
        if await self._started():
            spare_what_is_there()
            self.notifier.ready(self.progress.state())
            log.info("ready: %s", self.progress.state())
            await self._served()
        await self._drain()

    def _tell_of_the_start(self) -> None:
        publish = self.services.events.publish
        publish("daemon.start", message=f"lorad {__version__}, pid {os.getpid()}")
        for level, text in self.ground.registry.report.messages():
            publish("registry.recovered", level=level, message=text)
        for model, number in self.services.names.unserved().items():
            text = f"{number} adapters are of {model!r}, which no [[models]] is called: not served"
            publish("config.warning", level="warn", message=text)
        for name in self.services.names.shadowed():
            text = f"an adapter is called {name!r} as a base is: requests mean the base"
            publish("config.warning", level="warn", message=text)
        for text in doubts(self.settings):
            publish("config.warning", level="warn", message=text)

    async def _all_ready(self) -> None:
        """Returns when every engine takes requests at the same moment."""
        while away := [link for link in self.services.links if not link.ready.is_set()]:
            await away[0].ready.wait()

    async def _started(self) -> bool:
        """Wait for the engines, unless a signal or one that cannot be had comes first; True if they
        are there."""
        ready = asyncio.ensure_future(self._all_ready())
        stopping = asyncio.ensure_future(self.stopping.wait())
        failures = [link.failed for link in self.services.links]
        waited: set[asyncio.Future[Any]] = {ready, stopping, *failures}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for failed in failures:
                if failed.done():
                    failed.result()
            return not self.stopping.is_set()
        finally:
            ready.cancel()
            stopping.cancel()

    async def _served(self) -> None:
        """Until a signal comes, or no engine is left: of several models, the others go on without
        one that nothing brings back."""
        stopping = asyncio.ensure_future(self.stopping.wait())
        left: set[asyncio.Future[Any]] = {link.failed for link in self.services.links}
        try:
            while not self.stopping.is_set():
                await asyncio.wait({stopping, *left}, return_when=asyncio.FIRST_COMPLETED)
                gone = {failed for failed in left if failed.done()}
                left -= gone
                for failed in gone:
                    if failed.exception() is not None and not left:
                        failed.result()
        finally:
            stopping.cancel()

    async def _drain(self) -> None:
        """No new work; what runs may end within `drain_timeout`, or until the second signal."""
        timeout = self.settings.shutdown.drain_timeout
        requests, publish = self.services.requests, self.services.events.publish
        requests.drain()
        self.services.dynamic.close()
        self.notifier.stopping(
            f"draining, {several(requests.active, 'request')} in flight",
            extend_seconds=timeout + FAREWELL_SECONDS + CLOSE_SECONDS,
        )
        publish("drain.start", message=f"{several(requests.active, 'request')} in flight")
        idle = asyncio.ensure_future(requests.wait_idle(timeout))
        second = asyncio.ensure_future(self.aborting.wait())
        await asyncio.wait({idle, second}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        second.cancel()
        if left := requests.active:
            publish("drain.forced", level="warn", message=f"{several(left, 'request')} aborted")
            requests.abort_all("draining", "lorad is shutting down")
            await requests.wait_idle(FAREWELL_SECONDS)

    async def _close(self) -> None:
        self.notifier.stopping("stopping", extend_seconds=CLOSE_SECONDS)
        if self.services.watcher is not None:
            await asyncio.to_thread(self.services.watcher.stop)
        self.services.operations.close()
        await asyncio.gather(*(link.stop() for link in self.services.links))
        await self.services.tasks.cancel()
        await self._save()
        self.services.threads.close()
        for one in self.services.models:
            one.guides.close()
        self.services.metrics.close()
        if self.services.tracing is not None:
            await self.services.tracing.close()
        self.progress.say("stopped")

    # ------------------------------------------------------------- signals
    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        stops = {signal.SIGTERM, signal.SIGINT}
        if signal.sigpending() & stops:  # it came before anybody listened: nothing is begun
            self.stopping.set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, *stops})
        loop.add_signal_handler(signal.SIGUSR1, self._on_dump)

    def _on_stop(self) -> None:
        if self.stopping.is_set():
            self.aborting.set()
        self.stopping.set()

    def _on_hangup(self) -> None:
        async def reload() -> None:
            with contextlib.suppress(LoradError):  # the events have told of it
                await self._reload()

        self.services.tasks.spawn(reload())

    async def _reload(self) -> Reloaded:
        """What may change changes, the inbox is looked at, pinned adapters are tried once more."""
        self.notifier.reloading()
        try:
            done = await self.reload()
        finally:
            self.notifier.reloaded(self.progress.state())
            if self.services.watcher is not None:
                self.services.watcher.rescan_now()
        for one in self.services.models:
            if one.link.info is not None:
                self.services.tasks.spawn(one.adapters.finishing.raise_pinned())
        return done

    def _on_dump(self) -> None:
        dump_state(self.services.snapshot.status())

    def _on_state(self) -> None:
        if not self.stopping.is_set():
            self.notifier.status(self.progress.state())

    def _apply(self, now: Settings) -> None:
        """Those who keep a setting are told; all others read it here when they need it."""
        self.settings = now
        logs.set_level(now.log.level)
        self.services.apply(now)
        self.faces.apply(now)

    # ------------------------------------------------------------- in the background
    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._save()

    async def _save(self) -> None:
        """What may be lost: times of last use, how the inbox looked.  A full disk stops neither."""
        try:
            await self.services.adapters.flush()
            await self.services.tenancy.flush()
            await self.services.audit.flush()
        except (LoradError, RegistryUnusable) as error:
            log.warning("times of last use are not written now: %s", error)
        try:
            await asyncio.to_thread(self.services.memory.save)
        except OSError as error:
            log.warning("what was seen of the inbox is not written now: %s", error)
