"""Text: the tokenizer and chat template that go with a revision.

Goes in: the base model's folder, and revision folders of the store.  Comes out: `RevisionText`,
the base's words with an adapter's own chat template over them where it brings one.  Called from
worker threads.  Every failure is a LoradError.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorad.errors import BadConfig, LoradError
from lorad.text.detok import Detokenizer
from lorad.text.template import ChatTemplate
from lorad.text.tokenizer import TextError, Tokenizer

#: Compiled templates of adapters that are kept; a compile takes milliseconds.
CACHED = 256


@dataclass(frozen=True, slots=True)
class RevisionText:
    """`template` None: nobody said how this model chats."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @property
    def chat_stop_ids(self) -> frozenset[int]:
        return self.tokenizer.chat_stop_ids

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

    def detokenizer(self, prompt: Sequence[int], stop: Sequence[str]) -> Detokenizer:
        return Detokenizer(self.tokenizer, prompt, stop)


class TextService:
    """Of one model, whose base is the setting `key`.  Call it with a revision, or None for the
    base.  Thread-safe."""

    def __init__(
        self, base: Path, folder_of: Callable[[str], Path], *, key: str = "models.base"
    ) -> None:
        try:
            self.base = RevisionText(Tokenizer.load(base), ChatTemplate.load(base))
        except TextError as error:
            raise BadConfig(
                f"{key}: {error}", hint="fetch the model again, whole: its tokenizer belongs to it"
            ) from error
        #: Told, on any thread, of a revision whose files are not where they should be.
        self.on_missing: Callable[[str], None] = lambda rev: None
        self._folder_of = folder_of
        self._texts: OrderedDict[str, RevisionText] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, rev: str | None) -> RevisionText:
        if rev is None:
            return self.base
        with self._lock:
            if rev in self._texts:
                self._texts.move_to_end(rev)
                return self._texts[rev]
        text = self._load(rev)
        with self._lock:
            self._texts[rev] = text
            while len(self._texts) > CACHED:
                self._texts.popitem(last=False)
        return text

    def forget(self, rev: str) -> None:
        with self._lock:
            self._texts.pop(rev, None)

    def _load(self, rev: str) -> RevisionText:
        """A template that cannot be used is an error, never the base's in silence."""
        folder = self._folder_of(rev)
        if not folder.is_dir():
            self.on_missing(rev)
            message = f"the files of {rev[:12]} are gone from the store"
            raise LoradError("model_not_found", message, param="model", hint="add it again")
        try:
            own = ChatTemplate.load(folder, specials=self.base.tokenizer.specials)
        except TextError as error:
            message = f"the adapter's chat template cannot be used: {error}"
            raise LoradError("invalid_value", message, param="model") from error
        if own is None:
            return self.base
        return RevisionText(self.base.tokenizer, own)
