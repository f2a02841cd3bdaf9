"""Loading: one revision brought to the GPU or to host memory, when it has to be there.

Goes in: a wish, for a revision whose files are in the store.  Comes out: a Load to the engine,
which has been told of the revision before; after damage of its packed file a second one, once that
was packed anew; or an error that says what the operator can do.  Names are there to be told alone.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from engine.messages import Load
from lorad.errors import LoradError
from lorad.service.catalog import Catalog
from lorad.service.engine_link import EngineLink
from lorad.service.intake import Intake
from lorad.service.mending import Mending
from lorad.service.packed_files import PackedFiles


class Loading:
    """Of one engine.  `prepare` makes it know a revision, or raises; `on_change` follows each Load,
    whatever came of it."""

    def __init__(
        self,
        link: EngineLink,
        intake: Intake,
        catalog: Catalog,
        files: PackedFiles,
        mending: Mending,
        prepare: Callable[[str], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._link, self._intake, self._catalog = link, intake, catalog
        self._files, self._mending = files, mending
        self._prepare, self._on_change = prepare, on_change

    async def load(self, rev: str, tier: Literal["gpu", "ram"]) -> None:
        """Bring it to `tier`; raises no_room, load_failed, or what preparing raised.

        One whose packed file is damaged, cut or gone is packed anew and tried again, once.
        """
        heard, names = self._mending.heard(rev), self._catalog.names_of(rev)
        try:
            with self._intake.wanted(rev):
                await self._load_mended(rev, tier, heard)
        except LoradError as error:
            its_file = error.code in ("adapter_damaged", "load_failed")
            if not its_file or self._mending.heard(rev) == heard:
                raise
            raise self._beyond_mending(rev, names, error) from error

    async def _load_mended(self, rev: str, tier: Literal["gpu", "ram"], heard: int) -> None:
        try:
            await self._load(rev, tier)
        except LoradError as error:
            lost = error.code == "load_failed" and (
                self._mending.heard(rev) > heard or self._files.has_lost(rev)
            )
            if not (lost or error.code == "adapter_damaged"):
                raise
            if not await self._mending.mended(rev, heard):
                raise
            await self._load(rev, tier)

    async def _load(self, rev: str, tier: Literal["gpu", "ram"]) -> None:
        restarts = self._link.restarts
        await self._prepare(rev)
        if self._link.restarts != restarts:  # the next process may not know it
            raise LoradError("engine_restarting", "the engine was replaced meanwhile")
        try:
            await self._link.call(Load(command_id=self._link.next_id(), rev=rev, tier=tier))
        except LoradError as error:
            if error.code == "load_failed" and not self._intake.store.has(rev):
                await self._files.on_missing(rev)
            raise
        finally:
            self._on_change()

    def _beyond_mending(self, rev: str, names: Sequence[str], error: LoradError) -> LoradError:
        """Damage as it is told; `names`: before they were quarantined for it."""
        who = ", ".join(names) or self._catalog.label(rev)
        why = self._mending.failed(rev)
        again = f"it cannot be packed anew: {why}" if why else "it was packed anew before"
        name = names[0] if names else who
        mends = f"loractl rm {name}, and add it again, or touch its files in the inbox"
        hint = f"{mends}; look at the disk"
        if self._mending.may_be_tried(rev):
            hint = f"loractl load {name}, once that is mended"
        return LoradError(
            error.code,
            f"{who}: its packed file is damaged ({error.message}), and {again}",
            hint=hint,
        )
