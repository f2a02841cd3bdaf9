"""Catalog: what every name means right now, and who still uses each revision.

Goes in: names as the registry holds them, leases of requests.  Comes out: the revision of a name,
the names of a revision, its pin and priority over all of them.  Plain dictionaries, no I/O: the
registry is the truth, and `AdapterService` is the only writer here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that can be asked for.  `rev` None: registered, but nothing is served under it."""

    name: str
    rev: str | None
    candidate: str | None = None
    pinned: bool = False
    priority: int = 50
    source: str = ""  # the reference whose content `rev` is
    model: str = ""  # the base that it is an adapter of

    @property
    def replaced(self) -> bool:
        """Something is served, and something else is to take its place."""
        return None not in (self.rev, self.candidate) and self.rev != self.candidate


class Catalog:
    """Names, and the revisions behind them."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, set[str]] = {}  # serving revision -> names
        self._sources: dict[str, set[str]] = {}  # reference -> names that serve its content
        self._candidates: Counter[str] = Counter()
        self._leases: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()  # names that somebody waits to remove
        self._last_name: dict[str, str] = {}  # how a revision without a name is called in events
        self._models: dict[str, str] = {}  # revision -> the model that it is served on
        #: Revisions that could not be packed when that was last tried: cause and next step.
        self.unpacked: dict[str, tuple[str, str]] = {}
        #: The same of those whose tokenizer files do not fit the base any more.
        self.unfit: dict[str, tuple[str, str]] = {}
        self._counts: Counter[str] = Counter()  # model -> names that serve
        for entry in entries:
            self.put(entry)

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def put(self, entry: Entry) -> None:
        """Enter or replace a name.  One whose content another name has on another model is known,
        and serves nothing: all that is known of content, its engine too, is by revision."""
        self.drop(entry.name)
        if any(self._is_of_another(rev, entry.model) for rev in (entry.rev, entry.candidate)):
            entry = replace(entry, rev=None, candidate=None)
        self._entries[entry.name] = entry
        if entry.rev is not None:
            _add(self._names, entry.rev, entry.name)
            if entry.source:
                _add(self._sources, entry.source, entry.name)
            self._last_name[entry.rev] = entry.name
            self._models[entry.rev] = entry.model
            self._counts[entry.model] += 1
        if entry.candidate is not None:
            self._models[entry.candidate] = entry.model
            self._candidates[entry.candidate] += 1
            self._last_name.setdefault(entry.candidate, entry.name)

    def drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        if entry.rev is not None:
            self._counts[entry.model] -= 1
            _discard(self._names, entry.rev, name)
            if entry.source:
                _discard(self._sources, entry.source, name)
        if entry.candidate is not None:
            self._candidates[entry.candidate] -= 1
            if not self._candidates[entry.candidate]:
                del self._candidates[entry.candidate]

    # ------------------------------------------------------------- revisions
    def names_of(self, rev: str) -> tuple[str, ...]:
        """Names that serve `rev`, sorted."""
        return tuple(sorted(self._names.get(rev, ())))

    def name_of(self, rev: str) -> str | None:
        """The first of its names, or for a replaced one the name that it had."""
        names = self.names_of(rev)
        return names[0] if names else self._last_name.get(rev)

    def label(self, rev: str) -> str:
        """Its names, or for a replaced one `name@digest`, or the digest."""
        if names := self.names_of(rev):
            return ",".join(names)
        last = self._last_name.get(rev)
        return f"{last}@{rev[:8]}" if last else rev[:12]

    def named_by(self, reference: str) -> str:
        """A name that serves just what `reference` means, "" if there is none; the reference's own
        name goes first."""
        names = self._sources.get(reference, ())
        return reference if reference in names else min(names, default="")

    def sources(self, beginning: str) -> tuple[str, ...]:
        """References that begin so, and whose content is served."""
        return tuple(ref for ref in self._sources if ref.startswith(beginning))

    def wanted(self, rev: str) -> tuple[bool, int]:
        """Pinned if any name is, the highest priority of all; (False, 50) without a name."""
        entries = [self._entries[name] for name in self._names.get(rev, ())]
        if not entries:
            return False, 50
        return any(e.pinned for e in entries), max(e.priority for e in entries)

    def of(self, model: str) -> Iterator[Entry]:
        """The names of one model's adapters."""
        return (entry for entry in self if entry.model == model)

    def count(self, model: str) -> int:
        """How many names serve, of one model."""
        return self._counts[model]

    def model_of(self, rev: str) -> str | None:
        """The model that a revision is served on, or was until it is forgotten; content is of one
        model at a time."""
        return self._models.get(rev)

    def _is_of_another(self, rev: str | None, model: str) -> bool:
        return rev is not None and self.referenced(rev) and self._models[rev] != model

    def referenced(self, rev: str) -> bool:
        """Does a name serve it, or is it about to?"""
        return rev in self._names or rev in self._candidates

    @contextmanager
    def leaving(self, name: str) -> Iterator[None]:
        """Meanwhile it is known that `name` goes, though whoever has its lock may not know it."""
        self._leaving[name] += 1
        try:
            yield
        finally:
            self._leaving[name] -= 1
            if not self._leaving[name]:
                del self._leaving[name]

    def is_leaving(self, name: str) -> bool:
        return name in self._leaving

    def needed(self, rev: str) -> bool:
        """Will anybody ask for it: a request that is here, or a name that stays?"""
        if self._leases[rev] or not self._leaving:
            return bool(self._leases[rev]) or self.referenced(rev)
        return any(
            rev in (entry.rev, entry.candidate) and name not in self._leaving
            for name, entry in self._entries.items()
        )

    def forget(self, rev: str) -> None:
        """A retired revision is gone from the engine and the store."""
        self._last_name.pop(rev, None)
        self._models.pop(rev, None)
        self.unpacked.pop(rev, None)
        self.unfit.pop(rev, None)

    # ------------------------------------------------------------- leases
    def lease(self, rev: str) -> None:
        self._leases[rev] += 1

    def release(self, rev: str) -> int:
        """Leases left."""
        assert self._leases[rev] > 0, f"released more often than leased: {rev}"
        self._leases[rev] -= 1
        left = self._leases[rev]
        if not left:
            del self._leases[rev]
        return left

    def leases(self, rev: str) -> int:
        return self._leases[rev]

    def in_use(self) -> set[str]:
        """Revisions that a name means here, or soon will, or that some request still uses."""
        return {*self._names, *self._candidates, *self._leases}


def _add(sets: dict[str, set[str]], key: str, name: str) -> None:
    sets.setdefault(key, set()).add(name)


def _discard(sets: dict[str, set[str]], key: str, name: str) -> None:
    sets[key].discard(name)
    if not sets[key]:
        del sets[key]
