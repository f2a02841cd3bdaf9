"""The shelf of grammars: those of the base's tokenizer, and of adapters' own that were used last.

Goes in: a tokenizer.json, and how many ids are drawn.  Comes out: the `Grammars` of it, read at its
first use.  Adapters whose tokenizers are equal share one.  For one thread.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from engine.grammar import Grammars, unread

#: Tokenizers of adapters' own that are held besides the base's.  Of 128k tokens each takes 80 MB;
#: to read one again holds up all streams (see `Grammars`).
HELD = 8
#: Paths whose contents are known.
KNOWN = 1024

Key = tuple[bytes, int, tuple[int, ...]]


class GrammarShelf:
    """`vocab_size` ids of the base's tokenizer are drawn, and its answers end with `ends`."""

    def __init__(self, tokenizer: Path, vocab_size: int, ends: Sequence[int]) -> None:
        self._base, self._vocab_size, self._ends = tokenizer, vocab_size, tuple(ends)
        self._own: Grammars | None = None
        self._held: OrderedDict[Key, Grammars] = OrderedDict()
        self._digests: OrderedDict[str, bytes] = OrderedDict()

    def of(self, tokenizer: str = "", num_tokens: int = 0, ends: tuple[int, ...] = ()) -> Grammars:
        """Of an adapter's own `tokenizer`, whose requests draw `num_tokens` ids and end with
        `ends`; "", 0 and () = the base's.  Raises GuidesMissing and GrammarInvalid."""
        if not tokenizer and num_tokens in (0, self._vocab_size):
            if self._own is None:
                self._own = Grammars(self._base, self._vocab_size, self._ends)
            return self._own
        num_tokens = num_tokens or self._vocab_size
        ends = tuple(token for token in ends or self._ends if token < num_tokens)
        key = self._digest(tokenizer or str(self._base)), num_tokens, ends
        grammars = self._held.get(key)
        if grammars is None:
            grammars = Grammars(Path(tokenizer or self._base), num_tokens, ends)
            self._held[key] = grammars
            if len(self._held) > HELD:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return grammars

    def _digest(self, tokenizer: str) -> bytes:
        """Of the file's bytes, which never change where a revision has them."""
        digest = self._digests.get(tokenizer)
        if digest is None:
            try:
                digest = hashlib.blake2b(Path(tokenizer).read_bytes(), digest_size=16).digest()
            except OSError as error:
                whose = "this model's" if tokenizer == str(self._base) else "this adapter's"
                raise unread(whose, error) from None
            self._digests[tokenizer] = digest
            if len(self._digests) > KNOWN:
                self._digests.popitem(last=False)
        return digest
