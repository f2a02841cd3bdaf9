"""Text: the tokenizer and chat template that go with a revision.

Goes in: the base model's folder, revision folders of the store, what the registry knows of them.
Comes out: `RevisionText`, the base's words with an adapter's own chat template, special tokens or
tokenizer over them where it brings any.  Called from worker threads.  Every failure is a
LoradError.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lorad.errors import BadConfig, LoradError
from lorad.service.seams import OwnVocabulary
from lorad.text.detok import Detokenizer
from lorad.text.own_tokenizer import OwnTokenizers
from lorad.text.template import ChatTemplate
from lorad.text.tokenizer import TOKENIZER_FILE, TextError, Tokenizer, read_specials

#: Revisions with a template of their own that are kept; a compile takes milliseconds.
CACHED = 256
#: Of the others, of which there is next to nothing to keep.  To ask the registry takes 0.3 ms, and
#: with a thousand adapters in turn it would be asked with every request.
PLAIN = 1 << 16


class Known(Protocol):
    """Of RevisionRecord."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def own_tokenizer(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RevisionText:
    """`template` None: nobody said how this model chats."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    #: Ids that a request may name; 0: those of the base.
    num_tokens: int = 0
    #: The adapter's own, where it has a tokenizer.json; None: the base's.
    vocabulary: OwnVocabulary | None = None
    #: What ends any answer by the adapter's own word, and end tokens of the base that are others
    #: in its vocabulary.
    own_ends: frozenset[int] = frozenset()
    no_ends: frozenset[int] = frozenset()

    @property
    def chat_stop_ids(self) -> frozenset[int]:
        return self.tokenizer.chat_stop_ids | self.own_ends

    def ends(self, base: Sequence[int], *, chat: bool) -> frozenset[int]:
        """Ids that end an answer, where those of `base` end the base's."""
        ends = frozenset(base) - self.no_ends | self.own_ends
        return ends | self.chat_stop_ids if chat else ends

    def encode(self, text: str, add_special: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special)
        except TextError as error:
            raise LoradError("invalid_value", str(error), param="prompt") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def spell(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it; "" where it has none."""
        return self.tokenizer.spell(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Messages as the model was trained to read them; invalid_value if the template refuses,
        unsupported_parameter if it was not made for tools."""
        if self.template is None:
            raise LoradError(
                "invalid_value",
                "this model has no chat template",
                param="messages",
                hint="use /v1/completions",
            )
        if tools and (why := self.template.refuses_tools()):
            hint = "leave tools out, and describe them in a message"
            raise LoradError("unsupported_parameter", why, param="tools", hint=hint)
        try:
            return self.template.render(messages, tools=tools or None, **variables)
        except TextError as error:
            raise LoradError("invalid_value", str(error), param="messages") from error

    def detokenizer(
        self,
        prompt: Sequence[int],
        stop: Sequence[str],
        *,
        skip_special: bool = True,
        shown: Sequence[str] = (),
    ) -> Detokenizer:
        """`shown`: special tokens that are text all the same, where the vocabulary has them."""
        ids = frozenset(i for i in map(self.tokenizer.token_id, shown) if i is not None)
        return Detokenizer(self.tokenizer, prompt, stop, skip_special=skip_special, shown=ids)


class _Kept:
    """What is known of `most` revisions, and the key of a tokenizer of its own, which is elsewhere;
    who was not asked for the longest goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: OrderedDict[str, tuple[RevisionText, bytes]] = OrderedDict()

    def get(self, rev: str) -> tuple[RevisionText, bytes] | None:
        if rev in self._texts:
            self._texts.move_to_end(rev)
        return self._texts.get(rev)

    def put(self, rev: str, text: RevisionText, key: bytes) -> None:
        self._texts[rev] = text, key
        self._texts.move_to_end(rev)
        while len(self._texts) > self._most:
            self._texts.popitem(last=False)

    def forget(self, rev: str) -> None:
        self._texts.pop(rev, None)

    @property
    def full(self) -> bool:
        return len(self._texts) >= self._most


class TextService:
    """Of one model, whose base is the setting `key`.  Call it with a revision, or None for the
    base.  Thread-safe."""

    def __init__(
        self,
        base: Path,
        folder_of: Callable[[str], Path],
        record_of: Callable[[str], Known | None] = lambda rev: None,
        *,
        key: str = "models.base",
    ) -> None:
        try:
            self.base = RevisionText(Tokenizer.load(base), ChatTemplate.load(base))
        except TextError as error:
            raise BadConfig(
                f"{key}: {error}", hint="fetch the model again, whole: its tokenizer belongs to it"
            ) from error
        #: Told, on any thread, of a revision whose files are not where they should be.
        self.on_missing: Callable[[str], None] = lambda rev: None
        self.tokenizers = OwnTokenizers(self.base.tokenizer, base)
        self._folder_of, self._record_of = folder_of, record_of
        self._templated, self._plain = _Kept(CACHED), _Kept(PLAIN)
        self._lock = threading.Lock()

    def __call__(self, rev: str | None) -> RevisionText:
        if rev is None:
            return self.base
        with self._lock:
            found = self._plain.get(rev) or self._templated.get(rev)
        if found is not None:
            text, key = found
            if not key:
                return text
            if (tokenizer := self.tokenizers.get(key)) is not None:
                return replace(text, tokenizer=tokenizer)
        text, key = self._load(rev)
        # The tokenizer is not held here, or there would be no bound to what all of them take.
        known = replace(text, tokenizer=self.base.tokenizer) if key else text
        kept = self._plain if text.template is self.base.template else self._templated
        with self._lock:
            kept.put(rev, known, key)
        return text

    def fits(self, rev: str) -> bool:
        """Whether one with a tokenizer of its own is kept, once it is read, beside all others."""
        with self._lock:
            full = self._templated.full or self._plain.full
        return not full and self.tokenizers.fits(self._folder_of(rev))

    def forget(self, rev: str) -> None:
        with self._lock:
            self._plain.forget(rev)
            self._templated.forget(rev)

    def _load(self, rev: str) -> tuple[RevisionText, bytes]:
        """A tokenizer or template that cannot be used is an error, never the base's in silence."""
        folder = self._folder_of(rev)
        if not folder.is_dir():
            self.on_missing(rev)
            message = f"the files of {rev[:12]} are gone from the store"
            raise LoradError("model_not_found", message, param="model", hint="add it again")
        text, key, record = self.base, b"", self._record_of(rev)
        try:
            if record is not None and record.own_tokenizer:
                tokenizer, key = self.tokenizers.read(folder)
                without = self.base.tokenizer.eos_ids - tokenizer.eos_ids
                text = replace(text, tokenizer=tokenizer, no_ends=without)
            if record is not None and record.num_tokens:
                text = replace(text, num_tokens=record.num_tokens)
            text = self._with_specials(text, folder)
        except TextError as error:
            message = f"the adapter's tokenizer cannot be used: {error}"
            raise LoradError("invalid_value", message, param="model") from error
        path = folder / TOKENIZER_FILE
        if key and path.is_file():
            ends = tuple(sorted(text.ends(sorted(self.base.tokenizer.eos_ids), chat=False)))
            text = replace(text, vocabulary=OwnVocabulary(path, key, ends))
        try:
            own = ChatTemplate.load(folder, specials=self.base.tokenizer.specials)
        except TextError as error:
            message = f"the adapter's chat template cannot be used: {error}"
            raise LoradError("invalid_value", message, param="model") from error
        return text if own is None else replace(text, template=own), key

    def _with_specials(self, text: RevisionText, folder: Path) -> RevisionText:
        """The base's template writes the adapter's own special tokens, and its own end ends."""
        base = self.base.tokenizer
        specials = {**base.specials, **read_specials(folder)}
        end = text.tokenizer.token_id(specials.get("eos_token", ""))
        if end is not None and end != base.token_id(base.specials.get("eos_token", "")):
            text = replace(text, own_ends=frozenset({end}))
        if text.template is not None and specials != base.specials:
            text = replace(text, template=ChatTemplate(text.template.sources, specials))
        return text
