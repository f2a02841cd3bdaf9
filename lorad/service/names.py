"""Names: the registry's word on a name, and the catalog that follows it.

Goes in: changes as the registry's futures.  Comes out: records, or LoradError with the nearest
name.  One lock a name puts its changes in a row.  Knows neither files nor the engine.
"""

import asyncio
import json
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from engine.adapters.states import State
from lorad.errors import LoradError
from lorad.registry.records import AdapterRecord
from lorad.registry.registry import Registry
from lorad.service.catalog import Catalog, Entry
from lorad.spelling import is_reference, nearest

T = TypeVar("T")

#: The source of what lies in the inbox.
INBOX = "inbox"
NAME = re.compile(r"(?:[a-z0-9][a-z0-9._-]{0,62}/)?[a-z0-9][a-z0-9._-]{0,62}")


class Names:
    """`models` are the names of the bases that are served, which no adapter may take."""

    def __init__(self, registry: Registry, catalog: Catalog, *, models: Sequence[str]) -> None:
        self.registry = registry
        self.catalog = catalog
        self.models = tuple(models)
        self.on_change: Callable[[], None] = lambda: None
        #: name -> time of last use, where that is not in the registry yet.
        self.used: dict[str, float] = {}
        #: Nobody's names: folders of the inbox that could not be taken yet, and why.
        self.inbox_waits: dict[str, str] = {}
        #: Of folders of the inbox that hold another adapter's, by name: that, and what to do.
        self.inbox_nested: dict[str, str] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def lock(self, name: str) -> asyncio.Lock:
        """Held while a name changes."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def last_used(self, record: AdapterRecord) -> float | None:
        """When it was asked for last; None: never."""
        return max(record.last_used_at or 0.0, self.used.get(record.name, 0.0)) or None

    async def write(self, name: str, change: "Future[T]") -> T:
        """Wait until a change is on disk, then let the catalog follow."""
        try:
            return await asyncio.wrap_future(change)
        finally:
            self.refresh(name)

    def refresh(self, name: str) -> None:
        record = self.registry.get(name)
        if record is None:
            self.catalog.drop(name)
        else:
            self.catalog.put(entry_of(record, self.models))
        self.on_change()

    def known(self, name: str) -> AdapterRecord:
        """Its record; raises model_not_found."""
        record = self.registry.get(name)
        if record is None and name in self.models:
            raise LoradError(
                "model_not_found",
                f"{name!r} is the base model, not an adapter",
                hint="it is always there: loractl status",
            )
        if record is None and name in self.inbox_waits:
            raise LoradError(
                "model_not_found",
                f"{name!r} waits in the inbox: {self.inbox_waits[name]}",
                hint="it is tried again at each rescan; loractl reload makes one now",
            )
        if record is None:
            near = nearest(name, [entry.name for entry in self.catalog])
            raise LoradError(
                "model_not_found",
                f"no adapter named {name!r}",
                hint=f"did you mean {near}?" if near else "loractl ls",
            )
        return record

    def serving(self, name: str) -> str:
        """The revision that an operator's wish is about; raises why there is none."""
        record = self.known(name)
        if record.stored_state == State.QUARANTINED:
            raise LoradError(
                "adapter_invalid",
                f"{name!r} is quarantined: {record.reason_message}",
                details={"reason": record.reason or ""},
                hint=f"loractl show {name}",
            )
        rev = record.serving_rev or record.candidate_rev
        if record.stored_state == State.MISSING or rev is None:
            raise LoradError("model_not_found", f"{name!r} has no files", hint="add it again")
        if not model_of(record, self.models):
            raise LoradError(
                "model_not_found",
                f"{name!r} is an adapter of {record.model!r}, which is not served here",
                hint=f"loractl rm {name}, or a [[models]] with name = {json.dumps(record.model)}",
            )
        if name in self.models:
            raise LoradError(
                "name_taken",
                f"{name!r} is a base model's name now: nothing asks for the adapter",
                hint=f"loractl rm {name}, or another name for the model",
                details={"reason": "E_NAME_TAKEN"},
            )
        if owner := self.elsewhere(record):
            raise LoradError(
                "model_not_found",
                f"{name!r} has the content of {self.catalog.label(rev)}, an adapter of {owner}",
                hint=f"loractl rm {name}: content is of one model at a time",
            )
        return rev

    def elsewhere(self, record: AdapterRecord) -> str:
        """The base that has the content of a name which is of another base, "" mostly: nothing is
        served under such a name."""
        rev = record.serving_rev or record.candidate_rev
        owner = (self.catalog.model_of(rev) if rev is not None else None) or ""
        return owner if owner != model_of(record, self.models) else ""

    def waiting_for(self, rev: str) -> AdapterRecord | None:
        """A name of that content whose base is not served, and may be again."""
        records = map(self.registry.get, self.registry.names_of(rev))
        return next((r for r in records if r is not None and not model_of(r, self.models)), None)

    def unserved(self) -> dict[str, int]:
        """How many adapters are of models that are not served, by the model's name."""
        records = self.registry.pointing()
        return Counter(r.model for r in records if not model_of(r, self.models))

    def shadowed(self) -> list[str]:
        """Adapters whose names are bases' now."""
        return [name for name in self.models if self.registry.get(name) is not None]

    def refused(self) -> set[str]:
        """Every name that is quarantined or missing."""
        found: set[str] = set()
        for state in (State.QUARANTINED, State.MISSING):
            cursor: str | None = None
            while True:
                page = self.registry.list(state=state, limit=1000, cursor=cursor)
                found.update(record.name for record in page.items)
                cursor = page.cursor
                if cursor is None:
                    break
        return found

    def check_legal(self, name: str) -> None:
        """Raises invalid_value, or name_taken for the base model's."""
        if not NAME.fullmatch(name) and not is_reference(name):
            raise LoradError(
                "invalid_value",
                f"{name[:80]!r} is not an adapter name",
                param="name",
                hint="[tenant/]name of a-z 0-9 . _ -, each up to 63, first a letter or digit",
            )
        if name in self.models:
            raise LoradError(
                "name_taken",
                f"{name!r} is the base model's name",
                details={"reason": "E_NAME_TAKEN"},
            )

    def check_model(self, model: str) -> None:
        """Raises invalid_value for one that is not served; "" is none in particular."""
        if model and model not in self.models:
            served = ", ".join(self.models)
            message = f"no model {model[:80]!r} is served here"
            raise LoradError("invalid_value", message, param="model", hint=f"there is {served}")

    def check_free(self, name: str, source: str, *, replace: bool = False) -> None:
        """May content from `source` be called `name`?  Raises invalid_value or name_taken.

        A reference is the name of what it means, and of nothing else.  `replace` lets content from
        a reference take another's name; not a folder's in the inbox, which is still there.
        """
        self.check_legal(name)
        if is_reference(name) and name != source:
            raise LoradError("invalid_value", f"{name[:200]!r} is a reference", param="name")
        before = self.registry.get(name)
        moves = replace and is_reference(source) and before is not None
        if moves and before is not None and before.source != INBOX:
            return
        if before is not None and before.source != source:
            raise LoradError(
                "name_taken",
                f"{name!r} belongs to an adapter from {before.source}",
                hint=_instead(name, before, source),
                details={"reason": "E_NAME_TAKEN"},
            )


def _instead(name: str, before: AdapterRecord, source: str) -> str:
    """What to do where content from `source` may not be called `name`."""
    if before.source == INBOX:
        return "put the new content into its folder in the inbox, or choose another name"
    if is_reference(source):
        return "--replace gives it the new content; or choose another name with --name"
    return f"loractl rm {name}, or choose another name"


def model_of(record: AdapterRecord, models: Sequence[str]) -> str:
    """Which of the bases that are served it is an adapter of, "" if it is of none.  Where there is
    one alone, all are its: it may have had another name."""
    if record.model in models:
        return record.model
    return models[0] if len(models) == 1 else ""


def entry_of(record: AdapterRecord, models: Sequence[str]) -> Entry:
    """What the catalog keeps of a name: only a registered one serves, of a base that is served.

    A new name means its candidate at once: a request for it waits for the packing.
    """
    model = model_of(record, models)
    rev = record.serving_rev or record.candidate_rev
    # while a candidate waits, or after it failed, the source is the candidate's
    settled = record.reason is None and record.candidate_rev in (None, rev)
    source = record.source if settled and is_reference(record.source) else ""
    entry = Entry(
        record.name, rev, record.candidate_rev, record.pinned, record.priority, source, model
    )
    if not model or record.name in models:  # nobody can pack or load it, or ask for it
        return replace(entry, rev=None, candidate=None)
    return entry if record.stored_state == State.REGISTERED else replace(entry, rev=None)


def tenant_of(name: str) -> str | None:
    """The part before the slash, if there is one."""
    return name.partition("/")[0] if "/" in name and not is_reference(name) else None
