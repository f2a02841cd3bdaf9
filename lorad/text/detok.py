"""Token ids to text as they come: whole characters, and nothing that may begin a stop string.

Goes in: the ids of one sequence, a few at a time.  Comes out: `Piece`s whose concatenation is the
text of all ids, cut where the first stop string begins.  Amortised constant work per token, and
per character when there are stop strings.  Knows nothing of requests or of the engine: whoever
sees `Piece.stopped` aborts the sequence.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lorad.text.token_bytes import Bytes
from lorad.text.tokenizer import Tokenizer

#: A UTF-8 character is at most four bytes, so at most four tokens of a byte-wise vocabulary.
_CONTEXT_TOKENS = 4
#: Text that ends in U+FFFD may be half a character.  After this many tokens it is not.
_MAX_HALF_TOKENS = 6


class Piece(NamedTuple):
    """What a push made certain.  `consumed_tokens` of the pushed ids count as generated: all of
    them, or those up to the one that completed a stop string."""

    text: str
    stopped: bool
    consumed_tokens: int


def _borders(word: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for at in range(1, len(word)):
        while length and word[length] != word[at]:
            length = borders[length - 1]
        length += word[length] == word[at]
        borders[at] = length
    return borders


class StopStrings:
    """Any of them ends a text, and is no part of it.  Made once for all answers of a request: 16 of
    4,096 characters take 20 ms, and made for each of 128 answers they held up all others for 2.6 s.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        # The longest first: of two that end on the same character it began earlier.
        self.words = tuple(sorted({s for s in stop if s}, key=lambda s: (-len(s), s)))
        self.borders = tuple(map(_borders, self.words))


NO_STOPS = StopStrings()


class Detokenizer:
    """One sequence.  `prompt_ids` are its context: a first token's leading space is kept when
    text precedes it.  The tokens of `skip` are left out of the text; None: all that are special."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        stop: StopStrings = NO_STOPS,
        skip: frozenset[int] | None = None,
    ) -> None:
        self._skip = tokenizer.special_ids if skip is None else skip
        context = [i for i in prompt_ids[-8 * _CONTEXT_TOKENS :] if i not in self._skip]
        self._stream = _stream(tokenizer, context[-_CONTEXT_TOKENS:])
        self._stops = StopFinder(stop)
        self.num_tokens = 0  # consumed so far
        self.stopped = False

    def push(self, ids: Sequence[int]) -> Piece:
        """Take more ids.  After a stop nothing is consumed any more."""
        out = ""
        consumed = 0
        for token in ids:
            if self.stopped:
                break
            consumed += 1
            if token not in self._skip:
                out += self._take(self._stream.push(token))
        self.num_tokens += consumed
        return Piece(out, self.stopped, consumed)

    def finish(self) -> str:
        """What was held back: the start of a stop string that never came, half a character."""
        if self.stopped:
            return ""
        last = self._take(self._stream.finish())
        return last if self.stopped else last + self._stops.flush()

    def _take(self, text: str) -> str:
        if not self._stops.words:
            return text
        certain, self.stopped = self._stops.push(text)
        return certain


class StopFinder:
    """Finds the stop string that ends first, across any borders (Knuth-Morris-Pratt per string)."""

    def __init__(self, stop: StopStrings) -> None:
        self.words, self._borders = stop.words, stop.borders
        self._matched = [0] * len(self.words)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain, whether a stop string was completed)."""
        seen = self._held + text
        for at in range(len(self._held), len(seen)):
            for n, word in enumerate(self.words):
                length = self._advance(n, seen[at])
                if length == len(word):
                    return seen[: at + 1 - length], True
        keep = max(self._matched, default=0)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], False

    def flush(self) -> str:
        """What is still held, certain now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, n: int, character: str) -> int:
        word, borders, length = self.words[n], self._borders[n], self._matched[n]
        while length and word[length] != character:
            length = borders[length - 1]
        self._matched[n] = length + (word[length] == character)
        return self._matched[n]


class _Stream(Protocol):
    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


def _stream(tokenizer: Tokenizer, context: Sequence[int]) -> _Stream:
    if tokenizer.spelling is Bytes.OTHER:
        return _WindowStream(tokenizer, context)
    return _ByteStream(tokenizer, context)


class _ByteStream:
    """For vocabularies whose tokens are bytes: exact, and free of any window.

    Nearly every token is whole characters by itself, which are looked up: 0.1 µs, not 0.4.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._bytes, self._whole = tokenizer.token_bytes, tokenizer.whole_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # The prompt may end in half a character; its other half belongs to the answer.
        for token in context:
            self._utf8.decode(self._bytes(token))
        self._strip = tokenizer.strips_first_space and not context
        self._plain = not self._strip and self._between_characters()

    def push(self, token: int) -> str:
        if self._plain and (whole := self._whole(token)) is not None:
            return whole
        text = self._decode(token)
        self._plain = not self._strip and self._between_characters()
        return text

    def _between_characters(self) -> bool:
        return not self._utf8.getstate()[0]

    def _decode(self, token: int) -> str:
        spelled = self._bytes(token)
        if self._strip and spelled:
            self._strip = False
            spelled = spelled.removeprefix(b" ")
        return self._utf8.decode(spelled)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For every other vocabulary: decode a few tokens with and without the newest ones."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._window = list(context)  # tokens whose text is out, then those whose text is not
        self._done = len(self._window)
        # As above: a half character at the prompt's end is not out yet.
        self._before = self._text(self._window).rstrip("\ufffd")

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._text(self._window)
        half = text.endswith("\ufffd") and len(self._window) - self._done < _MAX_HALF_TOKENS
        return "" if half else self._advance(text)

    def finish(self) -> str:
        return self._advance(self._text(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._before) :]
        self._window = self._window[self._done :] or self._window
        self._done = len(self._window)
        self._before = self._text(self._window)
        return new

    def _text(self, ids: Sequence[int]) -> str:
        return self._decode(ids, skip_special=False) if ids else ""
