"""Lineup: the models that are served, and what the adapters of each have of their own.

Goes in: one `ModelAdapters` a model, in the order of the configuration.  Comes out: the one that a
name, a revision or an operator means.  An adapter is of one model, and so is its content.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence

from lorad.errors import LoradError
from lorad.service.catalog import Catalog
from lorad.service.events import EventRing
from lorad.service.finishing import Finishing
from lorad.service.intake import Intake
from lorad.service.losses import Losses
from lorad.service.model_revisions import ModelRevisions
from lorad.service.name_settings import NameSettings
from lorad.service.names import Names
from lorad.service.registration import Registration
from lorad.service.seams import CheckPin, ModelLink
from lorad.service.tasks import Tasks


class ModelAdapters:
    """`model` is the base's name and `link` that of its engine; `intake` inspects and packs for
    it.  `check_pin` is PinRoom's; `refresh` makes what is shown next show a change."""

    def __init__(
        self,
        model: str,
        names: Names,
        link: ModelLink,
        intake: Intake,
        revisions: ModelRevisions,
        registration: Registration,
        events: EventRing,
        tasks: Tasks,
        *,
        check_pin: CheckPin,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self.model, self.link, self.intake = model, link, intake
        self.revisions, self.registration = revisions, registration
        self.check_pin, self.refresh = check_pin, refresh
        self.settings = NameSettings(names, revisions.standing, events)
        self.losses = Losses(names, revisions, events)
        self.finishing = Finishing(model, names, revisions, registration, tasks, refresh)
        revisions.when_up(self.finishing.bring_up)


class Lineup:
    """At least one."""

    def __init__(self, catalog: Catalog, models: Sequence[ModelAdapters]) -> None:
        self._catalog = catalog
        self._models = {one.model: one for one in models}
        self.first = models[0]

    def __iter__(self) -> Iterator[ModelAdapters]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def get(self, model: str) -> ModelAdapters | None:
        return self._models.get(model)

    def __getitem__(self, model: str) -> ModelAdapters:
        return self._models[model]

    def of(self, rev: str) -> ModelAdapters:
        """Whose content it is, or was until it is forgotten; raises model_not_found."""
        if len(self._models) == 1:
            return self.first
        found = self._models.get(self._catalog.model_of(rev) or "")
        if found is None:
            raise LoradError("model_not_found", f"{rev[:12]} was removed meanwhile")
        return found
