"""Tokenizer files, read for their ids.

Goes in: the bytes of tokenizer.json and of what lies beside it.  Comes out: the highest id; of a
base's files also their digests.  Knows no tokenizer library, and lets foreign files cost little:
what can be counted is counted before it is parsed.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import msgspec

TOKENIZER, CONFIG, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
#: What a file that cannot be read raises here.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

#: Digest of a vocabulary -> its highest id.  Adapters of one base have few different ones, and to
#: parse 256k words takes 80 ms in which nobody else runs.
_highest: dict[str, int] = {}
_REMEMBERED = 256


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Tokenizer(msgspec.Struct):
    """Of tokenizer.json, what carries ids.  The vocabulary stays raw until its size is bounded."""

    model: _Model
    added_tokens: list[_Added] = []


class _TokenizerConfig(msgspec.Struct):
    added_tokens_decoder: dict[str, msgspec.Raw] = {}


class BaseTokenizer:
    """The files in a base's folder, read when they are asked for: most adapters bring none, or
    equal copies.  Without a folder, or a file that can be read, there is nothing in it."""

    def __init__(self, base: Path | None) -> None:
        self._base = base

    @property
    def size(self) -> int:
        """Its highest id plus one; 0 if that is not known."""
        known = [self._facts(name) for name in (TOKENIZER, CONFIG)]
        return 1 + max(facts[1] for facts in known if facts) if known[0] else 0

    @property
    def digests(self) -> tuple[str, str]:
        """Of tokenizer.json and tokenizer_config.json; "" where there is none."""
        facts = self._facts(TOKENIZER), self._facts(CONFIG)
        return facts[0][0] if facts[0] else "", facts[1][0] if facts[1] else ""

    def highest_in(self, name: str, data: bytes) -> int | None:
        """The highest id in its file of that name, if this has just these bytes."""
        facts = self._facts(name)
        return facts[1] if facts and facts[0] == digest(data) else None

    def read(self, name: str) -> bytes:
        """b"" where there is no such file, or a broken one."""
        if self._base is None or self._facts(name) is None:
            return b""
        return (self._base / name).read_bytes()

    def _facts(self, name: str) -> tuple[str, int] | None:
        if self._base is None:
            return None
        try:
            stat = (self._base / name).stat()
        except OSError:
            return None
        return _facts(self._base / name, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _facts(path: Path, mtime_ns: int, size: int) -> tuple[str, int] | None:
    """Digest and highest id.  Hundreds of adapters of one base ask for them."""
    try:
        data = path.read_bytes()
        return digest(data), highest_id(path.name, data, len(data))
    except (OSError, *UNREADABLE):
        return None


def digest(data: bytes) -> str:
    """Of a file.  Unlike a parser it lets the interpreter go on."""
    return hashlib.sha256(data).hexdigest()


def highest_id(name: str, data: bytes, most: int) -> int:
    """The highest token id in the file `name`, -1 for none.  A file that clearly has more than
    `most` is not parsed: as many as were counted.  Raises one of UNREADABLE."""
    return _HIGHEST[name](data, most) if name in _HIGHEST else -1


def added_ids(config: bytes) -> set[int]:
    """Ids of added_tokens_decoder in tokenizer_config.json, which a library adds if need be."""
    decoder = msgspec.json.decode(config, type=_TokenizerConfig).added_tokens_decoder
    return {int(key) for key in decoder}


def known_ids(tokenizer: bytes) -> set[int]:
    """All that tokenizer.json has."""
    parsed = msgspec.json.decode(tokenizer, type=_Tokenizer)
    vocab = msgspec.json.decode(parsed.model.vocab)
    known = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    return {*known, *(token.id for token in parsed.added_tokens)}


def _in_added_tokens(data: bytes, most: int) -> int:
    if too_many := _too_many(data, b'":', most):
        return too_many
    return max(msgspec.json.decode(data, type=dict[str, int]).values(), default=-1)


def _in_tokenizer_config(data: bytes, most: int) -> int:
    if too_many := _too_many(data, b'"content"', most):
        return too_many
    return max(added_ids(data), default=-1)


def _in_tokenizer(data: bytes, most: int) -> int:
    if too_many := _too_many(data, b'"id"', most):
        return too_many
    tokenizer = msgspec.json.decode(data, type=_Tokenizer)
    added = max((token.id for token in tokenizer.added_tokens), default=-1)
    raw = bytes(tokenizer.model.vocab)
    is_list = raw.startswith(b"[")  # Unigram: the id is the place in the list
    if too_many := _too_many(raw, b"[" if is_list else b'":', most):
        return too_many
    key = digest(raw)
    known = _highest.get(key)  # another thread may empty it meanwhile
    if known is None:
        known = _in_vocabulary(raw, is_list)
        if len(_highest) >= _REMEMBERED:
            _highest.clear()
        _highest[key] = known
    return max(added, known)


def _in_vocabulary(raw: bytes, is_list: bool) -> int:
    if is_list:
        return len(msgspec.json.decode(raw, type=list[msgspec.Raw])) - 1
    return max(msgspec.json.decode(raw, type=dict[str, int]).values(), default=-1)


def _too_many(data: bytes, mark: bytes, most: int) -> int:
    """Entries counted by their mark, if clearly more than there may be; else 0.  Comes before the
    parser, as a file of 64 MiB can hold millions of entries."""
    entries = data.count(mark)
    return entries if entries > 4 * most + 4096 else 0


_HIGHEST = {ADDED: _in_added_tokens, TOKENIZER: _in_tokenizer, CONFIG: _in_tokenizer_config}
