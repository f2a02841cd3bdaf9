"""Snapshot: one plain picture of the daemon for CLI, TUI and health checks.

Goes in: the models with their links and pictures, the listing.  Comes out: `wire_status.Status`,
and whether requests are taken, with the reason if not.  Reads only.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.status_messages import EngineSnapshot
from lorad.config import Settings
from lorad.config_sections import Model
from lorad.routing.affinity import Reason
from lorad.service.adapters import AdapterService
from lorad.service.catalog import Catalog
from lorad.service.listing import Listing
from lorad.service.pictures import Looked, Pictures
from lorad.service.seams import ModelLink
from lorad.wire_status import (
    DraftPicture,
    ModelStatus,
    PoolingPicture,
    PoolPicture,
    PrefixPicture,
    ReplicaStatus,
    Status,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One model, as it is looked at, or one replica of it; `replicas`: where it has several.
    `fingerprint` tells its base from another."""

    settings: Model
    link: ModelLink
    picture: Looked
    replicas: "tuple[Seen, ...]" = ()
    replica: str = ""
    routed: Mapping[Reason, int] | None = None  # to one replica, and why
    fingerprint: str = ""

    @property
    def engines(self) -> "tuple[Seen, ...]":
        """Each engine process of it."""
        return self.replicas or (self,)

    @property
    def name(self) -> str:
        return self.settings.name


class Snapshot:
    """What the routes call `listing`: pages from Listing, and the state of the whole."""

    def __init__(
        self,
        settings: Settings,
        models: Sequence[Seen],
        pictures: Pictures,
        listing: Listing,
        adapters: AdapterService,
        catalog: Catalog,
        *,
        version: str,
        instance_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._models, self._pictures = settings, tuple(models), pictures
        self._listing, self._adapters, self._catalog = listing, adapters, catalog
        self._version, self._instance_id = version, instance_id
        self._clock = clock
        self._started = clock()
        self.page = listing.page
        self.detail = listing.detail
        self.slots = listing.slots
        self.counts = listing.counts
        self.look = pictures.look

    def ready(self, model: str | None = None) -> tuple[bool, str]:
        """Are requests for all models taken, or for one of them?  Else the error code that those
        get which are not."""
        asked = [one for one in self._models if model in (None, one.name)]
        states = [one.link.state for one in asked]
        if self._adapters.gate.closed or all(state == "stopped" for state in states):
            return False, "draining"
        state = next((state for state in states if state != "ready"), "ready")
        if state == "ready":
            return True, ""
        codes = {"starting": "loading_base", "stopped": "engine_restarting"}
        return False, codes.get(state, state)

    def waiting(self) -> str:
        """Which of several models are not ready, by name."""
        if len(self._models) == 1:
            return ""
        return ", ".join(one.name for one in self._models if one.link.state != "ready")

    def _reason(self) -> str:
        """How far those are that are not ready."""
        if len(self._models) == 1:
            return self._models[0].link.progress
        away = [one for one in self._models if one.link.state != "ready"]
        return "; ".join(f"{one.name}: {one.link.progress}" for one in away)

    def status(self, counts: Mapping[str, int] | None = None) -> Status:
        """`counts`: names by state, for who has asked the registry already."""
        settings, snapshot, first = self._settings, self._pictures.snapshot, self._models[0]
        info = first.link.info
        ready, code = self.ready()
        statuses = self._pictures.by_rev.values()
        return Status(
            version=self._version,
            instance_id=self._instance_id,
            pid=os.getpid(),
            state="ready" if ready else code,
            reason="" if ready else self._adapters.gate.closed or self._reason(),
            uptime_seconds=self._clock() - self._started,
            base=first.settings.base,
            model=first.name,
            device=info.device if info else first.settings.device,
            device_name=info.device_name if info else "",
            dtype=info.dtype if info else first.settings.dtype,
            max_model_len=info.max_model_len if info else first.settings.max_model_len,
            extra_vocab=info.extra_vocab if info else 0,
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
            pool=_pool(snapshot) or PoolPicture(),
            prefix=prefix_of(snapshot),
            generated_tokens=snapshot.generated_tokens if snapshot else 0,
            prompt_tokens=snapshot.prompt_tokens if snapshot else 0,
            forward_passes=snapshot.forward_passes if snapshot else 0,
            preemptions=snapshot.preemptions if snapshot else 0,
            thrashes=snapshot.thrashes if snapshot else 0,
            engine_pid=first.link.pid,
            drained=tuple(sorted(self._adapters.gate.held)),
            engine_restarts=sum(one.link.restarts for one in self._models),
            tasks=first.settings.tasks,
            pooling=self._listing.pooling(first.name),
            models=self._each(),
        )

    def _each(self) -> tuple[ModelStatus, ...]:
        return tuple(
            _model(
                one,
                self._catalog.count(one.name),
                self._listing.pooling(one.name),
                self._listing.vocabularies(one.name),
            )
            for one in self._models
        )


def _model(
    seen: Seen, num_adapters: int, pooling: PoolingPicture | None, vocabularies: tuple[int, int]
) -> ModelStatus:
    link, settings, snapshot = seen.link, seen.settings, seen.picture.snapshot
    info = link.info
    return ModelStatus(
        name=settings.name,
        base=settings.base,
        fingerprint=seen.fingerprint,
        state=link.state,
        reason="" if link.state == "ready" else link.progress,
        tasks=settings.tasks,
        device=info.device if info else settings.device,
        device_name=info.device_name if info else "",
        dtype=info.dtype if info else settings.dtype,
        max_model_len=info.max_model_len if info else settings.max_model_len,
        extra_vocab=info.extra_vocab if info else 0,
        most_extra_tokens=vocabularies[0],
        own_tokenizers=vocabularies[1],
        num_adapters=num_adapters,
        slots_total=snapshot.slots_total if snapshot else 0,
        slots_used=snapshot.slots_used if snapshot else 0,
        running=snapshot.running if snapshot else 0,
        waiting=snapshot.waiting if snapshot else 0,
        ram_used_bytes=snapshot.ram_used_bytes if snapshot else 0,
        ram_limit_bytes=snapshot.ram_limit_bytes if snapshot else 0,
        pool=_pool(snapshot),
        prefix=prefix_of(snapshot),
        generated_tokens=snapshot.generated_tokens if snapshot else 0,
        prompt_tokens=snapshot.prompt_tokens if snapshot else 0,
        forward_passes=snapshot.forward_passes if snapshot else 0,
        engine_pid=link.pid,
        engine_restarts=link.restarts,
        pooling=pooling,
        drafts=_drafts(settings, snapshot),
        device_share=snapshot.share if snapshot else 1.0,
        replicas=tuple(map(_replica, seen.replicas)),
    )


def _replica(seen: Seen) -> ReplicaStatus:
    link, snapshot = seen.link, seen.picture.snapshot
    return ReplicaStatus(
        name=seen.replica,
        state=link.state,
        reason="" if link.state == "ready" else link.progress,
        device_name=link.info.device_name if link.info else "",
        slots_total=snapshot.slots_total if snapshot else 0,
        slots_used=snapshot.slots_used if snapshot else 0,
        running=snapshot.running if snapshot else 0,
        waiting=snapshot.waiting if snapshot else 0,
        pool=_pool(snapshot),
        engine_pid=link.pid,
        engine_restarts=link.restarts,
    )


def _drafts(model: Model, snapshot: EngineSnapshot | None) -> DraftPicture | None:
    if model.speculation == "off":
        return None
    base, known = (snapshot.base, snapshot.revisions) if snapshot else (None, ())
    return DraftPicture(
        kind=model.speculation,
        longest=model.speculation_tokens,
        base_draft_tokens=base.draft_tokens if base else 0,
        base_accepted_tokens=base.accepted_tokens if base else 0,
        lora_draft_tokens=sum(status.draft_tokens for status in known),
        lora_accepted_tokens=sum(status.accepted_tokens for status in known),
    )


def prefix_of(snapshot: EngineSnapshot | None) -> PrefixPicture:
    """The engine's counts in the words of the wire; zeros without an engine."""
    if snapshot is None:
        return PrefixPicture()
    return PrefixPicture(
        **{name: getattr(snapshot.prefix, name) for name in PrefixPicture.__struct_fields__}
    )


def _pool(snapshot: EngineSnapshot | None) -> PoolPicture | None:
    if snapshot is None:
        return None
    return PoolPicture(
        **{name: getattr(snapshot.pool, name) for name in PoolPicture.__struct_fields__}
    )
