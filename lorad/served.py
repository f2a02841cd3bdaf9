"""Served: one [[models]] entry, and all that belongs to its model alone.

Goes in: settings, the model's place among them, and what all models share.  Comes out: its engine's
link and picture, its text, its adapters' files and revisions.  Nothing of it runs yet, and nothing
of it knows another model.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.client import EncoderSpec
from lorad.base import fingerprint_of, folder_of, spec_of
from lorad.config import Settings, model_key
from lorad.config_sections import Model
from lorad.engines import Engines
from lorad.pairs import engine_config, pair_form
from lorad.registry.registry import Registry
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.files import AdapterFiles
from lorad.service.guides import Guides
from lorad.service.intake import Intake
from lorad.service.lineup import ModelAdapters
from lorad.service.names import Names
from lorad.service.pins import PinRoom
from lorad.service.pooling import PoolBackend
from lorad.service.pooling_facts import PoolingFacts
from lorad.service.registration import Registration
from lorad.service.replica_revisions import ReplicaRevisions
from lorad.service.revisions import Revisions
from lorad.service.seams import Backend
from lorad.service.shelf import Shelf
from lorad.service.snapshot import Seen
from lorad.service.tasks import Tasks
from lorad.service.text import TextService
from lorad.service.text_look import TextLook


class Shared(Protocol):
    """What the models have in common."""

    settings: Settings
    registry: Registry
    names: Names
    shelf: Shelf
    events: EventRing
    tasks: Tasks


class Served:
    """Raises BadConfig for a base that it cannot have."""

    def __init__(
        self,
        shared: Shared,
        index: int,
        *,
        intake: Intake | None,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        """`intake`: that of another model, whose workers it shares."""
        settings = shared.settings
        self.entry: Model = settings.models[index]
        self.name = self.entry.name
        self.base, self.spec = folder_of(settings, index), spec_of(settings, index)
        store = shared.registry.store
        self.text = TextService(
            self.base, store.path, shared.registry.revision, key=model_key(index, "base")
        )
        self._pairs = pair_form(settings, self.text.base, index)
        self.engines = Engines(
            self.entry,
            engine_config(settings, self._pairs, index),
            shared.events,
            several=len(settings.models) > 1,
        )
        self.link, self.picture = self.engines.link, self.engines.picture
        self.files = AdapterFiles(
            settings, self.base, self.spec, self.link, index, tokenizers=self.text.tokenizers
        )
        inspect, pack = self.files.inspect, self.files.pack
        if intake is None:
            self.intake = Intake(store, inspect=inspect, pack=pack)
        else:
            self.intake = intake.alike(inspect=inspect, pack=pack)
        self._know_adapters(shared, refresh)
        self.guides = Guides(self.base)
        self.fingerprint = fingerprint_of(self.base)

    def _know_adapters(self, shared: Shared, refresh: Callable[[], Awaitable[None]]) -> None:
        names, link, events, tasks = shared.names, self.link, shared.events, shared.tasks
        registry, catalog, name = shared.registry, names.catalog, self.name
        self.revisions = self._track_revisions(shared)
        self.pins = PinRoom(
            registry, catalog, link, shared.settings.lora, model=name, keeps=self._keeps
        )
        registration = Registration(
            name, names, link, self.intake, self.revisions, events, check_pin=self.pins.check
        )
        self.adapters = ModelAdapters(
            name,
            names,
            link,
            self.intake,
            self.revisions,
            registration,
            events,
            tasks,
            check_pin=self.pins.check,
            refresh=refresh,
        )
        self.revisions.on_change = self.picture.changed
        self.look = TextLook(
            registry,
            name,
            self.revisions.news,
            base_text=self.files.base_text,
            look=self.files.look_at_text,
            alone=len(shared.settings.models) == 1,
        )
        self.look.on_change = self.text.forget
        self.revisions.files.look = self.look
        self.revisions.retiring.on_retired = self._forget

    def _forget(self, rev: str) -> None:
        """It has retired."""
        self.text.forget(rev)
        self.look.forget(rev)

    def _track_revisions(self, shared: Shared) -> Revisions | ReplicaRevisions:
        """Each engine's, and those of several as one."""
        catalog, events, tasks = shared.names.catalog, shared.events, shared.tasks
        replicas = self.engines.replicas
        team = (
            ReplicaRevisions(
                shared.registry,
                replicas,
                self.intake,
                catalog,
                events,
                tasks,
                shared.shelf,
                model=self.name,
            )
            if replicas is not None
            else None
        )
        each = [
            Revisions(
                shared.registry,
                one.link,
                self.intake,
                catalog,
                events,
                tasks,
                shared.shelf,
                model=self.name,
                team=team,
                replica=one.replica,
            )
            for one in self.engines.each
        ]
        if team is None:
            return each[0]
        for one, revisions in zip(self.engines.each, each, strict=True):
            team.join(revisions)
            one.link.on_ready = partial(self._join, team, one.replica)
            if replicas is not None:
                one.link.on_stalled = partial(replicas.leave, one.replica)
        return team

    def _join(self, team: ReplicaRevisions, replica: str) -> None:
        """One of several engines takes requests now."""
        team.settle_pins()
        if self.engines.replicas is not None:
            self.engines.replicas.join(replica)

    def _keeps(self, rev: str) -> str:
        """Which replica a pin is for; all the same where there is one."""
        replicas = self.engines.replicas
        return replicas.keeper(rev) if replicas is not None else ""

    def revisions_on(self, replica: str) -> Revisions:
        """Of one of its engines."""
        one = self.revisions
        return one if isinstance(one, Revisions) else one[replica]

    def nearest(self, rev: str | None) -> tuple[EngineLink, str]:
        """The engine that a request for `rev` would go to now, and its name among the replicas."""
        replicas, each = self.engines.replicas, self.engines.each
        name = "" if replicas is None else replicas.nearest(rev)
        return next((one.link, name) for one in each if one.replica == name)

    @property
    def asks(self) -> str:
        """Whose form a pair of texts is put into; "": the tokenizer's own."""
        return self._pairs.asks.origin if self._pairs.asks is not None else ""

    def seen(self) -> Seen:
        """As it is looked at."""
        replicas = self.engines.replicas
        each = () if replicas is None else self.engines.each
        several = tuple(
            Seen(
                self.entry,
                one.link,
                one.picture,
                replica=one.replica,
                routed=replicas[one.replica].routed if replicas is not None else None,
            )
            for one in each
        )
        return Seen(self.entry, self.link, self.picture, several, fingerprint=self.fingerprint[:12])

    def backend(self) -> Backend:
        """For requests that generate."""
        files = self.revisions.files
        return Backend(self.link, self.text, self.fingerprint, self.guides, files)

    def pool_backend(self, registry: Registry) -> PoolBackend:
        """For requests for vectors and scores."""
        facts = PoolingFacts(
            Path(self.entry.base),
            self.text.base.tokenizer,
            lambda: self.link.info,
            registry.revision,
            tasks=self.entry.tasks,
            asks=self._pairs.asks,
            num_types=self.spec.num_types if isinstance(self.spec, EncoderSpec) else 0,
            truncate=self.entry.truncate,
            texts=self.text if self.spec.generates else None,
        )
        return PoolBackend(self.link, facts, self.revisions.files)
