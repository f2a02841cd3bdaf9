"""Served: one [[models]] entry, and all that belongs to its model alone.

Goes in: settings, the model's place among them, and what all models share.  Comes out: its engine's
link and picture, its text, its adapters' files and revisions.  Nothing of it runs yet, and nothing
of it knows another model.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.client import EncoderSpec, EngineClient
from lorad.base import fingerprint_of, folder_of, spec_of
from lorad.config import Model, Settings, model_key
from lorad.pairs import engine_config, pair_form
from lorad.registry.registry import Registry
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.files import AdapterFiles
from lorad.service.guides import Guides
from lorad.service.intake import Intake
from lorad.service.lineup import ModelAdapters
from lorad.service.names import Names
from lorad.service.picture import Picture
from lorad.service.pins import PinRoom
from lorad.service.pooling import PoolBackend
from lorad.service.pooling_facts import PoolingFacts
from lorad.service.registration import Registration
from lorad.service.revisions import Revisions
from lorad.service.seams import Backend
from lorad.service.shelf import Shelf
from lorad.service.snapshot import Seen
from lorad.service.tasks import Tasks
from lorad.service.text import TextService


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
        self.text = TextService(self.base, store.path, key=model_key(index, "base"))
        self._pairs = pair_form(settings, self.text.base, index)
        self.link = EngineLink(
            engine_config(settings, self._pairs, index),
            shared.events,
            new_client=partial(EngineClient, stall_seconds=self.entry.stall_after),
            replace_after=self.entry.replace_after,
            model=self.name if len(settings.models) > 1 else "",
        )
        self.picture = Picture(self.link)
        self.files = AdapterFiles(settings, self.base, self.spec, self.link, index)
        inspect, pack = self.files.inspect, self.files.pack
        if intake is None:
            self.intake = Intake(store, inspect=inspect, pack=pack)
        else:
            self.intake = intake.alike(inspect=inspect, pack=pack)
        self._know_adapters(shared, refresh)
        self.guides = Guides(self.base)

    def _know_adapters(self, shared: Shared, refresh: Callable[[], Awaitable[None]]) -> None:
        names, link, events, tasks = shared.names, self.link, shared.events, shared.tasks
        registry, catalog, name = shared.registry, names.catalog, self.name
        self.revisions = Revisions(
            registry, link, self.intake, catalog, events, tasks, shared.shelf, model=name
        )
        self.pins = PinRoom(registry, catalog, link, shared.settings.lora, model=name)
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
        self.revisions.on_retired = self.text.forget

    @property
    def asks(self) -> str:
        """Whose form a pair of texts is put into; "": the tokenizer's own."""
        return self._pairs.asks.origin if self._pairs.asks is not None else ""

    def seen(self) -> Seen:
        """As it is looked at."""
        return Seen(self.entry, self.link, self.picture)

    def backend(self) -> Backend:
        """For requests that generate."""
        return Backend(self.link, self.text, fingerprint_of(self.base), self.guides)

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
        )
        return PoolBackend(self.link, facts)
