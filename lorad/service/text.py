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
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lorad.errors import BadConfig, LoradError
from lorad.service.seams import OwnVocabulary
from lorad.text.detok import Detokenizer, StopStrings
from lorad.text.own_tokenizer import OwnTokenizers, told
from lorad.text.template import ChatTemplate, find_templates
from lorad.text.templates import Templates
from lorad.text.tokenizer import TOKENIZER_FILE, TextError, Tokenizer, read_specials

#: Templates of adapters' own that are kept.
CACHED = 256
#: Revisions of which the rest is, next to nothing each.  To ask the registry takes 0.3 ms, and with
#: a thousand adapters in turn it would be asked with every request.
KNOWN = 1 << 16


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
        try:
            return self.tokenizer.decode(ids, skip_special=skip_special)
        except TextError as error:
            raise LoradError("invalid_value", str(error), param="tokens") from error

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

    def detokenizers(
        self, stop: Sequence[str], *, skip_special: bool = True, shown: Sequence[str] = ()
    ) -> Callable[[Sequence[int]], Detokenizer]:
        """What makes one for each prompt.  `shown`: special tokens that are text all the same,
        where the vocabulary has them."""
        skip: frozenset[int] = frozenset()
        if skip_special:
            ids = frozenset(i for i in map(self.tokenizer.token_id, shown) if i is not None)
            skip = self.tokenizer.special_ids - ids
        return partial(Detokenizer, self.tokenizer, stop=StopStrings(stop), skip=skip)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is known of a revision, with the base's tokenizer and template in the place of its own,
    which are elsewhere by these keys; b"": they are the base's."""

    text: RevisionText
    tokenizer: bytes
    template: bytes


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
        self._folder, self._folder_of, self._record_of = base, folder_of, record_of
        self._templates = Templates(CACHED)
        self._known: OrderedDict[str, _Kept] = OrderedDict()
        self._forgotten = 0  # how often
        self._lock = threading.Lock()

    def __call__(self, rev: str | None) -> RevisionText:
        if rev is None:
            return self.base
        if (held := self.held(rev)) is not None:
            return held
        forgotten = self._forgotten
        kept, text = self._load(rev)
        with self._lock:
            if forgotten == self._forgotten:  # else it may have been of this one: read once more
                self._known[rev] = kept
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return text

    def held(self, rev: str) -> RevisionText | None:
        """The same if it takes no reading; it counts as asked for."""
        with self._lock:
            if (kept := self._known.get(rev)) is not None:
                self._known.move_to_end(rev)
        return self._whole(kept) if kept is not None else None

    def fits(self, rev: str) -> bool:
        """Whether one with a tokenizer of its own is kept, once it is read, beside all others."""
        full = self._templates.full or len(self._known) >= KNOWN
        return not full and self.tokenizers.fits(self._folder_of(rev))

    def forget(self, rev: str) -> None:
        with self._lock:
            self._forgotten += 1
            self._known.pop(rev, None)

    def _whole(self, kept: _Kept) -> RevisionText | None:
        """None if a part of it has to be read again."""
        text = kept.text
        if kept.tokenizer:
            if (tokenizer := self.tokenizers.get(kept.tokenizer)) is None:
                return None
            text = replace(text, tokenizer=tokenizer)
        if kept.template:
            if (template := self._templates.get(kept.template)) is None:
                return None
            text = replace(text, template=template)
        return text

    def _load(self, rev: str) -> tuple[_Kept, RevisionText]:
        """A tokenizer or template that cannot be used is an error, never the base's in silence."""
        folder = self._folder_of(rev)
        if not folder.is_dir():
            self.on_missing(rev)
            message = f"the files of {rev[:12]} are gone from the store"
            raise LoradError("model_not_found", message, param="model", hint="add it again")
        text, record, base = self.base, self._record_of(rev), self.base.tokenizer
        tokenizer, key = base, b""
        try:
            if record is not None and record.own_tokenizer:
                tokenizer, key = self.tokenizers.read(folder)
                text = replace(text, no_ends=base.eos_ids - tokenizer.eos_ids)
            if record is not None and record.num_tokens:
                text = replace(text, num_tokens=record.num_tokens)
            specials = {**base.specials, **read_specials(folder)}
        except TextError as error:
            raise self._unusable("tokenizer", error, folder) from error
        end = tokenizer.token_id(specials.get("eos_token", ""))
        if end is not None and end != base.token_id(base.specials.get("eos_token", "")):
            text = replace(text, own_ends=frozenset({end}))
        path = folder / TOKENIZER_FILE
        if key and path.is_file():
            ends = tuple(sorted(text.ends(sorted(base.eos_ids), chat=False)))
            text = replace(text, vocabulary=OwnVocabulary(path, key, ends))
        try:
            template, template_key = self._template(folder, specials)
        except TextError as error:
            raise self._unusable("chat template", error, folder) from error
        # What is kept holds no tokenizer: there would be no bound to what all of them take.
        kept = _Kept(text, key, template_key)
        return kept, replace(text, tokenizer=tokenizer, template=template)

    def _template(
        self, folder: Path, specials: Mapping[str, str]
    ) -> tuple[ChatTemplate | None, bytes]:
        """The adapter's own, or the base's, which writes the adapter's special tokens."""
        base = self.base.template
        sources = find_templates(folder) or (base.sources if base is not None else {})
        its = base is not None and sources == base.sources
        if not sources or (its and specials == self.base.tokenizer.specials):
            return base, b""
        return self._templates.of(sources, specials)

    def _unusable(self, what: str, error: TextError, folder: Path) -> LoradError:
        """A client reads it, whom paths of this host are no business of."""
        message = f"the adapter's {what} cannot be used: {told(error, folder, self._folder)}"
        return LoradError("invalid_value", message, param="model", hint=error.hint)
