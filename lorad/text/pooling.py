"""Texts and pairs of texts → token ids for a model that pools, as its own files make them.

Goes in: a tokenizer, what the files of sentence-transformers say, texts.  Comes out: `Encoded`:
ids, token types where the model tells two texts apart by them, and what is never cut.  Special
tokens are the tokenizer's own post-processor's.  Knows no request, no name and no engine.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import tokenizers

from engine.errors import RequestInvalid
from engine.pooling.spec import PoolingSpec
from engine.pooling.truncation import PairCut, Truncation, pair_lengths
from lorad.text.late import LateText
from lorad.text.pair_prompt import PairPrompt
from lorad.text.tokenizer import TextError, Tokenizer

#: What a text is there for, where a model was trained to tell questions from what answers them.
Role = Literal["query", "document"]
#: The names that models give to their prompts for it.
ROLES: dict[Role, tuple[str, ...]] = {
    "query": ("query", "search_query"),
    "document": ("document", "passage", "search_document"),
}
#: Texts that were tokenised together; nobody changes what is in it.
Pieces = Mapping[str, tokenizers.Encoding]
NONE: Pieces = {}
#: A prompt that holds a task in words, such as Qwen3-Embedding's.
_INSTRUCTED = re.compile(r"Instruct: .*\nQuery:( ?)", re.DOTALL)


class TooLong(TextError):
    """There are more tokens than the model takes, and nothing may be cut."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """`keeps` tokens at the end are the tokenizer's own; the first `prompt_tokens` are those of the
    prompt, with the special ones ahead of it; `num_cut` were left out.  Of late interaction the
    last `unseen` see the others and none sees them, and those at `skipped` have no vector."""

    tokens: list[int]
    types: list[int] | None = None
    keeps: int = 0
    prompt_tokens: int = 0
    num_cut: int = 0
    unseen: int = 0
    skipped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """At most `length` tokens: what is longer is cut, a pair as `pair` says, or refused.

    `second` bounds the second text of a pair, and a document that is read alone, by itself: beyond
    so many tokens, special ones and those of a prompt not among them, it is always cut.
    """

    length: int
    cuts: bool = False
    pair: PairCut = "longest_first"
    second: int | None = None


class PoolingText:
    """`num_types`: token types that the model has; one or none cannot tell two texts apart.
    `asks`: what pairs are put into, in place of the tokenizer's own form of them.  Raises TextError
    for a vocabulary that the model's own files do not fit."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: PoolingSpec,
        *,
        num_types: int = 0,
        asks: PairPrompt | None = None,
    ) -> None:
        self.spec, self.asks = spec, asks
        self.late = LateText(tokenizer, spec.late) if spec.late else None
        self._tokenizer, self._num_types = tokenizer, num_types
        own = _ending(tokenizer)
        #: Of a tokenizer whose file adds less than its config says: its end mark.
        end = tokenizer.end_id
        self._added = [] if end is None or end in own else [end]
        self._ending = [*own, *self._added]

    @property
    def vocab_size(self) -> int:
        """The largest id that the tokenizer knows, and one."""
        return self._tokenizer.vocab_size

    # ----------------------------------------------------------------- prompts
    def prompt(self, name: str | None = None, role: Role | None = None, task: str = "") -> str:
        """What stands ahead of a text: the prompt called `name`, or the model's for `role`, with
        `task` in the place of its instruction, or the model's default.  A model without a prompt
        for a role takes the text bare; of late interaction the role is told by a mark.

        Raises TextError for a name that the model lacks, and for a task where none has a place.
        """
        prompts = self.spec.prompts
        if name is not None:
            if name not in prompts:
                known = ", ".join(prompts) or "none"
                raise TextError(f"the model has no prompt called {name[:60]!r}: it has {known}")
            found = prompts[name]
        elif role is not None and self.late is None:
            found = next((prompts[n] for n in ROLES[role] if n in prompts), "")
        else:
            found = prompts.get(self.spec.default_prompt or "", "")
        return self._instructed(found, task) if task else found

    def _instructed(self, prompt: str, task: str) -> str:
        match = _INSTRUCTED.fullmatch(prompt)
        if match is None:
            raise TextError("this model's prompt has no place for an instruction")
        return f"Instruct: {task}\nQuery:{match[1]}"

    # ----------------------------------------------------------------- inputs
    def ahead(self, texts: Iterable[str]) -> Pieces:
        """Texts that `one` and `pair` will ask for, behind their prompts, tokenised together: on
        several threads, and each once.  Of what cannot be tokenised nothing is there: it fails
        where it is asked for."""
        distinct = list(dict.fromkeys(texts))
        if len(distinct) < 2:
            return {}
        try:
            pieces = self._tokenizer.many([self._as_read(text) for text in distinct])
        except TextError:
            return {}
        return dict(zip(distinct, pieces, strict=True))

    def one(
        self,
        text: str,
        fit: Fit,
        prompt: str = "",
        ahead: Pieces = NONE,
        role: Role | None = None,
    ) -> Encoded:
        """One text behind its prompt; of late interaction there is a role.  Raises TooLong,
        TextError."""
        whole, keeps = prompt + text, len(self._ending)
        if role == "document" and fit.second is not None:
            pieces = self._pieces(whole, ahead)
            most = fit.second + (len(self._pieces(prompt, NONE)) if prompt else 0)
            if len(pieces) > most:
                pieces = self._pieces(whole, NONE)  # one of its own, as for a pair
                pieces.truncate(most)
            ids = self._tokenizer.joined(pieces).ids
        elif whole in ahead:
            ids = self._tokenizer.joined(ahead[whole]).ids
        else:  # at once: to put tokens around 1.5 million takes 0.3 s of Python's lock
            ids = self._tokenizer.encode(self._as_read(whole), add_special=True)
        ids = [*ids, *self._added]
        if self.late is not None:
            assert role is not None
            return self._late(self.late, ids, fit, keeps, role)
        left_out = 0
        if prompt and not self.spec.include_prompt:
            before = self._tokenizer.joined(self._pieces(prompt, NONE))
            left_out = len(before.ids) + len(self._added) - keeps
            if left_out + keeps > fit.length:
                why = f"a prompt of {left_out} tokens alone"
                raise TooLong(f"{why}: the model takes {fit.length}")
        return self._fitted(ids, fit, keeps, left_out)

    def ids(self, ids: Sequence[int], fit: Fit) -> Encoded:
        """Token ids are taken as they are: nobody adds special ones.  Raises TooLong."""
        ends = bool(self._ending) and list(ids[-len(self._ending) :]) == self._ending
        return self._fitted(list(ids), fit, len(self._ending) if ends else 0, 0)

    def pair(
        self, first: str, second: str, fit: Fit, instruction: str = "", ahead: Pieces = NONE
    ) -> Encoded:
        """Two texts in the model's form of a pair, or in the tokenizer's own, which has no place
        for an instruction.  Raises TooLong, TextError."""
        if self.asks is not None:
            return self._asked(self.asks, first, second, fit, instruction)
        tokenizer = self._tokenizer
        one, two = (self._pieces(text, ahead) for text in (first, second))
        before = len(one) + len(two)
        added = tokenizer.num_added(pair=True) + len(self._added)
        kept = len(one), len(two) if fit.second is None else min(fit.second, len(two))
        if added > fit.length:
            raise TooLong(f"{added} tokens of a pair's own: {fit.length} are taken")
        if fit.cuts:
            try:
                kept = pair_lengths(*kept, fit.length - added, fit.pair)
            except RequestInvalid as error:
                raise TooLong(error.message) from None
        elif sum(kept) + added > fit.length:
            raise _too_long(sum(kept) + added, fit.length)
        if kept[0] < len(one):  # one of its own: what is cut belongs to others too
            one = self._pieces(first, NONE)
            one.truncate(kept[0])
        if kept[1] < len(two):
            two = self._pieces(second, NONE)
            two.truncate(kept[1])
        encoding = tokenizer.joined(one, two)
        ids = [*encoding.ids, *self._added]
        types = [*encoding.type_ids, *(1 for _ in self._added)] if self._num_types > 1 else None
        return Encoded(ids, types, len(self._ending), 0, before - sum(kept))

    def _asked(
        self, asks: PairPrompt, query: str, document: str, fit: Fit, instruction: str
    ) -> Encoded:
        """Of the whole text only the document's tokens may be left out, from its end."""
        asked = asks.ask(self._as_read(query), self._as_read(document), instruction)
        encoding = self._tokenizer.pieces(asked.text)
        ids, spans = list(encoding.ids), encoding.offsets
        inside = [
            i for i, (a, b) in enumerate(spans) if asked.start <= a < b <= asked.end
        ]  # in characters
        most = len(inside) if fit.second is None else min(fit.second, len(inside))
        excess = len(ids) - (len(inside) - most) - fit.length
        if excess > 0 and not fit.cuts:
            raise _too_long(len(ids) - (len(inside) - most), fit.length)
        if excess > most:
            rest = len(ids) - len(inside)
            raise TooLong(f"{rest} tokens without its document: the model takes {fit.length}")
        gone = set(inside[most - max(excess, 0) :])
        kept = [token for i, token in enumerate(ids) if i not in gone]
        behind = sum(a >= asked.end for a, _ in spans)
        return Encoded(kept, None, behind, 0, len(gone))

    def _late(
        self, late: LateText, ids: Sequence[int], fit: Fit, keeps: int, role: Role
    ) -> Encoded:
        own = replace(fit, length=min(fit.length, late.length(role)))
        encoded = self._fitted(late.marked(ids, role), own, keeps, 0)
        if role == "document":
            return replace(encoded, skipped=late.skipped(encoded.tokens))
        tokens, unseen = late.filled(encoded.tokens, fit.length)
        return replace(encoded, tokens=tokens, unseen=unseen)

    def _fitted(self, ids: list[int], fit: Fit, keeps: int, left_out: int) -> Encoded:
        if len(ids) > fit.length and not fit.cuts:
            raise _too_long(len(ids), fit.length)
        kept = Truncation(fit.length, fit.cuts, keeps).fit(ids)
        return Encoded(kept, None, keeps, left_out, len(ids) - len(kept))

    def _pieces(self, text: str, ahead: Pieces) -> tokenizers.Encoding:
        found = ahead.get(text)
        return self._tokenizer.pieces(self._as_read(text)) if found is None else found

    def _as_read(self, text: str) -> str:
        return text.lower() if self.spec.lower_case else text


def _too_long(count: int, length: int) -> TooLong:
    return TooLong(f"{count} tokens: the model takes {length}")


def _ending(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the tokenizer's own file puts behind a text."""
    encoding = tokenizer.joined(tokenizer.pieces("a"))
    mask = list(encoding.special_tokens_mask)
    count = mask[::-1].index(0) if 0 in mask else 0
    return list(encoding.ids[len(mask) - count :])
