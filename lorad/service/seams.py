"""What `RequestService` needs of its neighbours, as protocols small enough to be faked in tests.

Knows none of the classes that fill them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.messages import EngineInfo, PackedModule, SequenceDelta, Submit
from lorad.errors import LoradError
from lorad.service.ask import Format, Message, Tool


class Resolved(Protocol):
    """A name after `AdapterService.resolve`; `rev` and `name` None are the base model's, whose
    name is `model`."""

    @property
    def rev(self) -> str | None: ...
    @property
    def name(self) -> str | None: ...
    @property
    def model(self) -> str: ...
    @property
    def priority(self) -> int | None: ...


class CheckPin(Protocol):
    """Of PinRoom: raises no_room; `modules` are of what is not registered yet."""

    def __call__(self, rev: str, modules: Sequence[PackedModule] = ()) -> None: ...


class Adapters(Protocol):
    """Of AdapterService; `resolve` raises what an unknown or drained name is answered."""

    def resolve(self, model: str) -> Resolved: ...
    def lease(self, rev: str) -> None: ...
    def release(self, rev: str) -> None: ...


class Finder(Protocol):
    """Of Dynamic: the adapter's name for a model that may be a reference, else the model's text;
    `find` waits up to `seconds` for it to be pulled, and raises why it cannot be."""

    def known(self, model: str) -> str: ...
    async def find(self, model: str, seconds: float) -> str: ...


class AsNamed:
    """No references: every model is called by its name."""

    def known(self, model: str) -> str:
        return model

    async def find(self, model: str, seconds: float) -> str:
        return model


class Informed(Protocol):
    """Who knows the facts of a model's engine, None before it is there."""

    @property
    def info(self) -> EngineInfo | None: ...


class ModelLink(Informed, Protocol):
    """Of EngineLink, or of Replicas: how the engines of one model are."""

    @property
    def state(self) -> str: ...
    @property
    def progress(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def last_step_at(self) -> float: ...
    @property
    def pid(self) -> int | None: ...
    def check(self) -> None: ...


class Link(Informed, Protocol):
    """Of EngineLink; `check` raises while the engine is not ready, `on_delta` runs on the loop."""

    @property
    def starts_per_second(self) -> float:
        """How fast queued sequences begin; 0.0: nobody has to wait, or it is not known."""

    def check(self) -> None: ...
    def submit(self, submit: Submit, on_delta: Callable[[SequenceDelta], None]) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def where(self, request_id: str) -> str:
        """Which of several engines has it, "" if there is one."""


class Decoded(Protocol):
    """What `Detokenizer.push` returns; `consumed_tokens` of the pushed ids belong to the answer."""

    @property
    def text(self) -> str: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def consumed_tokens(self) -> int: ...


class Decoder(Protocol):
    """Of Detokenizer: never half a character, never the beginning of a stop string."""

    def push(self, ids: Sequence[int]) -> Decoded: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class OwnVocabulary:
    """An adapter's own tokenizer.json; `key` is the same where the content is, `ends` end a text of
    it."""

    path: Path
    key: bytes
    ends: tuple[int, ...]


class Text(Protocol):
    """Tokenizer and chat template of one revision.  Thread-safe."""

    @property
    def num_tokens(self) -> int:
        """Ids that a request may name; 0: as many as the base has."""

    @property
    def vocabulary(self) -> OwnVocabulary | None: ...
    def ends(self, base: Sequence[int], *, chat: bool) -> frozenset[int]:
        """Ids that end an answer, where `base` end the base's."""

    def encode(self, text: str, add_special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def spell(self, ids: Sequence[int]) -> list[str]: ...
    def token_bytes(self, token: int) -> bytes: ...
    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        tools: Sequence[Tool] = (),
    ) -> str: ...
    def detokenizers(
        self, stop: Sequence[str], *, skip_special: bool = True, shown: Sequence[str] = ()
    ) -> Callable[[Sequence[int]], Decoder]:
        """What makes one for each prompt.  `shown`: special tokens that are text all the same."""


class Guide(Protocol):
    """Of Guides: the grammar of a format, for the base's vocabulary or an adapter's `own`; raises
    why there is none."""

    async def grammar(
        self, asked: Format, info: EngineInfo, tenant: str = "", own: OwnVocabulary | None = None
    ) -> str: ...


class TextFiles(Protocol):
    """Of PackedFiles: the stored files that `Backend.text` reads."""

    def is_readable(self, rev: str) -> bool: ...
    async def readable(self, rev: str) -> None:
        """Bring them here, and find whose tokenizer it has; raises what a request is told."""


async def await_text(files: TextFiles | None, rev: str | None, seconds: float) -> None:
    """Until a text may be read for `rev`; deadline_exceeded after so long."""
    if files is None or rev is None or files.is_readable(rev):
        return
    try:
        async with asyncio.timeout(seconds):
            await files.readable(rev)
    except TimeoutError:
        message = "the adapter's files were not here in time"
        raise LoradError("deadline_exceeded", message, param="model") from None


@dataclass(frozen=True, slots=True)
class Backend:
    """What stands behind one model: its engine, its text (called with a revision, or None for the
    base, once `files` has made it readable), and who makes grammars for it.  `digest` tells its
    base from another."""

    link: Link
    text: Callable[[str | None], Text]
    digest: str
    guide: Guide | None = None
    files: TextFiles | None = None


class Limits(Protocol):
    """The part of `[limits]` that concerns a running request; `deadline` in seconds."""

    @property
    def queue(self) -> int: ...
    @property
    def queue_per_tenant(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def deadline(self) -> float: ...
