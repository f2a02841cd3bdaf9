"""The half of a library's face that generating and pooling engines have in common: adapters.

Goes in: a core, and folders or manifests of adapters.  Comes out: revisions that requests may name.
Knows nothing of what the core computes.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from engine.adapters.orders import AdapterCommand
from engine.adapters.pack import pack_into
from engine.errors import error_of
from engine.messages import (
    AddRevision,
    Answer,
    Evict,
    Load,
    PackedManifest,
    Purpose,
    RemoveRevision,
)


class Frame(Protocol):
    """What a step has to say, as far as it is read here."""

    @property
    def answers(self) -> Sequence[Answer]: ...


class Core(Protocol):
    """A step loop of which somebody takes the steps."""

    @property
    def idle(self) -> bool: ...
    def take(self, command: AdapterCommand) -> None: ...
    def step(self) -> Frame: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


CoreT = TypeVar("CoreT", bound=Core)


class Library(Generic[CoreT]):
    """An engine in this process.  `folder` is the base's, `dtype` and the sizes those of packed
    files."""

    def __init__(
        self,
        core: CoreT,
        *,
        folder: Path,
        block_size: int,
        dtype: str,
        max_rank: int,
        purpose: Purpose,
        draft_bytes: int = 0,
        ranks: int = 1,
        extra_vocab: int = 0,
    ) -> None:
        self._core = core
        self._ids = itertools.count(1)
        self._folder, self._block_size = folder, block_size
        self._dtype, self._max_rank, self._purpose = dtype, max_rank, purpose
        self._draft_bytes, self._ranks, self._extra_vocab = draft_bytes, ranks, extra_vocab

    @property
    def core(self) -> CoreT:
        """The step loop, for who takes its steps himself; not while a method here runs."""
        return self._core

    def add_adapter(
        self, manifest: PackedManifest, *, pinned: bool = False, priority: int = 50
    ) -> None:
        """Make a packed revision known; it is loaded when a request needs it, or by `load`."""
        self._call(
            AddRevision(
                command_id=next(self._ids), manifest=manifest, pinned=pinned, priority=priority
            )
        )

    def add_folder(
        self, folder: str | Path, store: str | Path, *, pinned: bool = False, priority: int = 50
    ) -> str:
        """Pack a PEFT adapter's folder into the folder `store`, and make it known: its revision.

        Raises AdapterInvalid, naming what is wrong; OSError if the packed file cannot be written.
        """
        manifest = pack_into(
            Path(folder),
            self._folder,
            Path(store),
            block_size=self._block_size,
            dtype=self._dtype,
            max_rank=self._max_rank,
            purpose=self._purpose,
            draft_bytes=self._draft_bytes,
            ranks=self._ranks,
            extra_vocab=self._extra_vocab,
        )
        self.add_adapter(manifest, pinned=pinned, priority=priority)
        return manifest.rev

    def load(self, rev: str) -> None:
        """Bring a revision to the device and wait for it.  Raises NoRoom, LoadFailed."""
        self._call(Load(command_id=next(self._ids), rev=rev))

    def evict(self, rev: str) -> None:
        """Take a revision off the device.  Raises UnknownRevision."""
        self._call(Evict(command_id=next(self._ids), rev=rev))

    def remove_adapter(self, rev: str) -> None:
        """Forget a revision, its copies and what was cached with it."""
        self._call(RemoveRevision(next(self._ids), rev))

    def close(self) -> None:
        """End the engine's threads and free its memory."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _names(self) -> Iterator[str]:
        """Of requests, no two alike."""
        return (f"library-{number}" for number in self._ids)

    def _call(self, command: AdapterCommand) -> Answer:
        self._core.take(command)
        return self._answer()

    def _answer(self) -> Answer:
        """The one that is owed.  Raises what it tells."""
        while True:
            for answer in self._core.step().answers:
                if answer.code:
                    raise error_of(answer.code, answer.message)
                return answer
            if self._core.idle:
                self._core.wait()
