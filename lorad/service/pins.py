"""PinRoom: may one more adapter be pinned?

Goes in: the engine's arena, and what is pinned already.  Comes out: no_room, with numbers.
Pinned adapters leave room for the KV floor plus the largest registered adapter, or `pin_limit`.
An adapter that is pinned already never counts against itself.
"""

from collections.abc import Callable

from engine.messages import EngineInfo
from lorad.config_sections import Lora
from lorad.errors import LoradError
from lorad.registry.records import RevisionRecord
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

    def check(self, rev: str, file_bytes: int = 0) -> None:
        """Raise no_room if `rev` (of `file_bytes`, where it is not registered yet) is too much."""
        if self._link.info is None:
            return  # what is too much shows when it is loaded
        ours = self._catalog.of(self._model)
        pinned = {e.rev for e in ours if e.pinned and e.rev is not None}
        if rev in pinned:
            return
        records = self._registry.revisions([*pinned, rev])
        beside = [r for r in pinned if r in records and self._keeps(r) == self._keeps(rev)]
        held = sum(self._blocks(records[r]) for r in beside)
        record, limit = records.get(rev), self._limit()
        packed = record is not None and record.packed_for(self._link.info) is not None
        asked = self._blocks(record) if record is not None else self._estimate(file_bytes)
        if held + asked > limit:
            block = self._link.info.block_bytes
            source, hint = "", "unpin another one, or raise lora.pin_limit"
            if not packed:  # PEFT's file of three added tokens was 52 times what was packed of it
                source = " by its file"
                hint += ", or pin it once it is packed: that may be less"
            raise LoradError(
                "no_room",
                f"pinned adapters hold {held * block} bytes, this one takes {asked * block}"
                f"{source}, the limit is {limit * block}",
                hint=hint,
            )

    def _limit(self) -> int:
        info = self._link.info
        assert info is not None
        if self.settings.pin_limit:
            return self.settings.pin_limit // info.block_bytes
        floor = self._floor(info)
        others = any(entry.model != self._model for entry in self._catalog)
        model = self._model if others else None  # a model that is alone may have been renamed
        largest = self._registry.list(sort="-size", limit=1, model=model).items
        rev = largest[0].serving_rev if largest else None
        record = self._registry.revision(rev) if rev is not None else None
        return info.num_blocks - floor - (self._blocks(record) if record else 0)

    def _floor(self, info: EngineInfo) -> int:
        """What KV keeps to itself; a model that pools has none."""
        if not info.block_size:
            return 0
        longest = -(-info.max_model_len // info.block_size)
        floor = -(-self.settings.kv_floor // info.block_bytes)
        return floor or max(1, min(longest, info.num_blocks // 10))

    def _blocks(self, record: RevisionRecord) -> int:
        info = self._link.info
        assert info is not None
        packed = record.packed_for(info)
        return packed.num_blocks if packed else self._estimate(record.file_bytes)

    def _estimate(self, file_bytes: int) -> int:
        """A file is its tensors and a header; the packed rows take a little more."""
        info = self._link.info
        assert info is not None
        return -(-file_bytes // info.block_bytes)


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
