"""Snapshot: one plain picture of the daemon for CLI, TUI and health checks.

Goes in: the link, the picture of the engine, the listing.  Comes out: `wire.Status`, and whether
requests are taken, with the reason if not.  Reads only.
"""

import os
import time
from collections.abc import Callable, Mapping

from lorad import wire
from lorad.config import Settings
from lorad.service.adapters import AdapterService
from lorad.service.engine_link import EngineLink
from lorad.service.listing import Listing
from lorad.service.picture import Picture


class Snapshot:
    """What the routes call `listing`: pages from Listing, and the state of the whole."""

    def __init__(
        self,
        settings: Settings,
        link: EngineLink,
        picture: Picture,
        listing: Listing,
        adapters: AdapterService,
        *,
        version: str,
        instance_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._link, self._picture = settings, link, picture
        self._listing, self._adapters = listing, adapters
        self._version, self._instance_id = version, instance_id
        self._clock = clock
        self._started = clock()
        self.page = listing.page
        self.detail = listing.detail
        self.slots = listing.slots
        self.counts = listing.counts
        self.look = picture.look

    def ready(self) -> tuple[bool, str]:
        """Are requests taken?  Else the error code that they get."""
        if self._adapters.gate.closed or self._link.state == "stopped":
            return False, "draining"
        if self._link.state == "ready":
            return True, ""
        return False, "loading_base" if self._link.state == "starting" else self._link.state

    def status(self, counts: Mapping[str, int] | None = None) -> wire.Status:
        """`counts`: names by state, for who has asked the registry already."""
        settings, info, snapshot = self._settings, self._link.info, self._picture.snapshot
        ready, code = self.ready()
        statuses = self._picture.by_rev.values()
        return wire.Status(
            version=self._version,
            instance_id=self._instance_id,
            pid=os.getpid(),
            state="ready" if ready else code,
            reason="" if ready else self._adapters.gate.closed or self._link.progress,
            uptime_seconds=self._clock() - self._started,
            base=settings.model.base,
            model=settings.model.name,
            device=info.device if info else settings.model.device,
            device_name=info.device_name if info else "",
            dtype=info.dtype if info else settings.model.dtype,
            max_model_len=info.max_model_len if info else settings.model.max_model_len,
            inference_socket=settings.inference.socket,
            admin_socket=settings.admin.socket,
            inbox=settings.watch.dir if settings.watch.mode != "off" else None,
            state_dir=settings.registry.dir,
            store_dir=settings.store.dir,
            adapters=self._listing.counts() if counts is None else dict(counts),
            slots_total=snapshot.slots_total if snapshot else 0,
            slots_used=snapshot.slots_used if snapshot else 0,
            pinned=sum(status.pinned for status in statuses),
            running=snapshot.running if snapshot else 0,
            waiting=snapshot.waiting if snapshot else 0,
            ram_used_bytes=snapshot.ram_used_bytes if snapshot else 0,
            ram_limit_bytes=snapshot.ram_limit_bytes if snapshot else 0,
            pool=_pool(self._picture),
            prefix=prefix_of(self._picture),
            generated_tokens=snapshot.generated_tokens if snapshot else 0,
            prompt_tokens=snapshot.prompt_tokens if snapshot else 0,
            forward_passes=snapshot.forward_passes if snapshot else 0,
            preemptions=snapshot.preemptions if snapshot else 0,
            thrashes=snapshot.thrashes if snapshot else 0,
            engine_pid=self._link.pid,
            drained=tuple(sorted(self._adapters.gate.held)),
            engine_restarts=self._link.restarts,
            tasks=settings.model.tasks,
            pooling=self._listing.pooling(),
        )


def prefix_of(picture: Picture) -> wire.PrefixPicture:
    """The engine's counts in the words of the wire; zeros without an engine."""
    if picture.snapshot is None:
        return wire.PrefixPicture()
    prefix = picture.snapshot.prefix
    return wire.PrefixPicture(
        **{name: getattr(prefix, name) for name in wire.PrefixPicture.__struct_fields__}
    )


def _pool(picture: Picture) -> wire.PoolPicture:
    if picture.snapshot is None:
        return wire.PoolPicture()
    pool = picture.snapshot.pool
    return wire.PoolPicture(
        **{name: getattr(pool, name) for name in wire.PoolPicture.__struct_fields__}
    )
