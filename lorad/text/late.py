"""Queries and documents of late interaction, as token ids.

Goes in: a vocabulary and a LateSpec, ids of a text with its special tokens.  Comes out: the same
with the mark of what it is; a query filled up, and which of a document's tokens have no vector.
Knows no text and no engine.
"""

from collections.abc import Sequence
from typing import Literal

from engine.pooling.spec import LateSpec
from lorad.text.tokenizer import TextError, Tokenizer

#: Whose token stands in the place of a query's missing ones, the first that the vocabulary has.
_FILLERS = ("mask_token", "eos_token", "pad_token")


class LateText:
    """Raises TextError for a vocabulary without the marks that the model was trained with."""

    def __init__(self, tokenizer: Tokenizer, spec: LateSpec) -> None:
        self.spec = spec
        marks = {"query": spec.query_mark, "document": spec.document_mark}
        self._marks = {role: _id(tokenizer, mark) for role, mark in marks.items() if mark}
        self._filler = _filler(tokenizer) if spec.expands else 0
        self._skipped = _skipped(tokenizer, spec)

    def length(self, role: Literal["query", "document"]) -> int:
        """Tokens at the most, the mark and the special ones among them."""
        return self.spec.query_length if role == "query" else self.spec.document_length

    def marked(self, ids: Sequence[int], role: Literal["query", "document"]) -> list[int]:
        """With the mark behind the first token."""
        mark = self._marks.get(role)
        return list(ids) if mark is None else [*ids[:1], mark, *ids[1:]]

    def filled(self, ids: Sequence[int], most: int) -> tuple[list[int], int]:
        """A query of its full length, `most` at the most; and how many of its tokens the others do
        not see."""
        missing = max(min(self.spec.query_length, most) - len(ids), 0) if self.spec.expands else 0
        return [*ids, *[self._filler] * missing], 0 if self.spec.sees_expansion else missing

    def skipped(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Places of a document's tokens that have no vector."""
        return tuple(place for place, token in enumerate(ids) if token in self._skipped)


def _id(tokenizer: Tokenizer, mark: str) -> int:
    found = tokenizer.token_id(mark)
    if found is None:
        raise TextError(f"the tokenizer lacks the mark {mark!r} that the model's files name")
    return found


def _skipped(tokenizer: Tokenizer, spec: LateSpec) -> frozenset[int]:
    """As those had it who trained so: a word that the vocabulary lacks is its unknown token."""
    if spec.skips_read:
        read = (tokenizer.encode(word, add_special=False) for word in spec.skipped)
        return frozenset(ids[0] for ids in read if ids)
    unknown = tokenizer.token_id(tokenizer.specials.get("unk_token", ""))
    known = (tokenizer.token_id(word) for word in spec.skipped)
    ids = (unknown if token is None else token for token in known)
    return frozenset(token for token in ids if token is not None)


def _filler(tokenizer: Tokenizer) -> int:
    for role in _FILLERS:
        found = tokenizer.token_id(tokenizer.specials.get(role, ""))
        if found is not None:
            return found
    raise TextError(f"the tokenizer has none of {', '.join(_FILLERS)} to fill up queries with")
