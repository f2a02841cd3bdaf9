"""PinRoom: may one more adapter be pinned?

Goes in: the engine's arena, and what is pinned already.  Comes out: no_room, with numbers.
Pinned adapters leave room for the KV floor plus the largest registered adapter, or `pin_limit`.
An adapter that is pinned already never counts against itself.
"""

from collections.abc import Callable, Sequence

from engine.messages import EngineInfo, PackedModule
from lorad.config_sections import Lora
from lorad.errors import LoradError
from lorad.registry.records import Packing, RevisionRecord, blocks_of
from lorad.registry.registry import Registry
from lorad.service.catalog import Catalog
from lorad.service.seams import Informed


class PinRoom:
    """Of one model.  All sizes in blocks of its arena; `keeps`: which of several arenas a pin of
    that revision is for."""

    def __init__(
        self,
        registry: Registry,
        catalog: Catalog,
        link: Informed,
        settings: Lora,
        *,
        model: str,
        keeps: Callable[[str], str] = lambda rev: "",
    ) -> None:
        self._registry, self._catalog, self._link = registry, catalog, link
        self._model, self._keeps = model, keeps
        self.settings = settings
        self._layout, self._known = "", dict[str, int]()  # rev -> blocks, of what is pinned

    def check(self, rev: str, modules: Sequence[PackedModule] = ()) -> None:
        """Raise no_room if `rev` (of `modules`, where it is not registered yet) is too much."""
        info = self._link.info
        if info is None:
            return  # what is too much shows when it is loaded
        ours = self._catalog.of(self._model)
        pinned = {e.rev for e in ours if e.pinned and e.rev is not None}
        if rev in pinned:
            return
        self._known = {r: blocks for r, blocks in self._known.items() if r in pinned}
        records = self._registry.revisions([*pinned, rev])
        beside = [r for r in pinned if r in records and self._keeps(r) == self._keeps(rev)]
        held = sum(self._sizes(info, [records[r] for r in beside]))
        record, limit = records.get(rev), self._limit(info)
        asked = record.num_blocks(info) if record is not None else blocks_of(modules, info)
        if held + asked > limit:
            block = info.block_bytes
            raise LoradError(
                "no_room",
                f"pinned adapters hold {held * block} bytes, this one takes {asked * block}"
                f", the limit is {limit * block}",
                hint="unpin another one, or raise lora.pin_limit",
            )

    def _sizes(self, info: EngineInfo, records: Sequence[RevisionRecord]) -> list[int]:
        """Each is counted once: hundreds that are pinned as they come, and are not packed yet,
        would hold up the loop for 2 ms each, again at each."""
        if self._layout != info.layout:
            self._layout, self._known = info.layout, {}
        for record in records:
            if record.rev not in self._known:
                self._known[record.rev] = record.num_blocks(info)
        return [self._known[record.rev] for record in records]

    def _limit(self, info: EngineInfo) -> int:
        if self.settings.pin_limit:
            return self.settings.pin_limit // info.block_bytes
        floor = self._floor(info)
        others = any(entry.model != self._model for entry in self._catalog)
        model = self._model if others else None  # a model that is alone may have been renamed
        packing = Packing.of(info, info.packed_block_bytes)
        largest = self._registry.list(sort="-size", limit=1, model=model, packing=packing).items
        rev = largest[0].serving_rev if largest else None
        record = self._registry.revision(rev) if rev is not None else None
        return info.num_blocks - floor - (record.num_blocks(info) if record else 0)

    def _floor(self, info: EngineInfo) -> int:
        """What KV keeps to itself; a model that pools has none."""
        if not info.block_size:
            return 0
        longest = -(-info.max_model_len // info.block_size)
        floor = -(-self.settings.kv_floor // info.block_bytes)
        return floor or max(1, min(longest, info.num_blocks // 10))


def pinning(catalog: Catalog, rev: str) -> list[str]:
    """The names whose pins keep a revision."""
    return [n for n in catalog.names_of(rev) if (entry := catalog.get(n)) and entry.pinned]


def still_pinned(catalog: Catalog, name: str, rev: str) -> LoradError:
    """Why `name` stays.  Equal content is one revision, and stays for any of its names."""
    pins = pinning(catalog, rev)
    message = f"{name!r} is pinned"
    if name not in pins:
        are = "is" if len(pins) == 1 else "are"
        message = f"{name!r} has the same content as {', '.join(pins)}, which {are} pinned"
    return LoradError("pinned", message, hint=f"loractl unpin {' '.join(pins)}")
