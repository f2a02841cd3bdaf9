"""Whether an adapter's tokenizer is its own, or the base's written in another way.

Goes in: the bytes of its files, which can be read, and the base's.  Comes out: yes or no.  Parses
what is not equal to the byte, and knows no tokenizer library.

Libraries write one tokenizer in several ways: merges as "a b" or ["a", "b"], keys that are absent
or null, with the padding and truncation of a training run.  So equal files are told first, then
equal parts, and only parts that differ are parsed.  To compare 514k merges that are spelled in two
ways takes 1.6 s; it is done pair by pair, as a parser that takes 0.5 s for them lets nobody else
run in that time, and once for any two files.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from engine.adapters.tokenizer_files import (
    CONFIG,
    TOKENIZER,
    BaseTokenizer,
    added_ids,
    digest,
    known_ids,
)

#: Parts of tokenizer.json beside the model that decide anything; the rest are the training run's.
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
#: What is longer, and not equal to the byte, differs; the largest part seen has 0.4 MB.
_MOST_PART = 4 << 20
#: The flags of an added token.
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SPELLED = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]]')

#: Digests of two files -> whether they differ.
_compared: dict[tuple[str, str], bool] = {}
_REMEMBERED = 256


def differs(held: Mapping[str, bytes], base: BaseTokenizer) -> bool:
    """Whether an adapter's files `held` make other tokens of a text than the base's, or another
    text of tokens.  Without tokenizer.json they add what their config does to the base's."""
    ours, config = held.get(TOKENIZER), held.get(CONFIG, b"{}")
    if ours is not None and base.highest_in(TOKENIZER, ours) is None:
        theirs = base.read(TOKENIZER)
        if not theirs or _differ(ours, theirs):
            return True
    if not base.size or base.highest_in(CONFIG, config) is not None:
        return False
    new = added_ids(config) - added_ids(base.read(CONFIG) or b"{}")
    return bool(new) and not new <= known_ids(base.read(TOKENIZER))


def _differ(one: bytes, other: bytes) -> bool:
    key = digest(one), digest(other)
    known = _compared.get(key)  # another thread may empty it meanwhile
    if known is None:
        known = _compare(one, other)
        if len(_compared) >= _REMEMBERED:
            _compared.clear()
        _compared[key] = known
    return known


class _RawFile(msgspec.Struct):
    """What of tokenizer.json decides anything: other keys, which may be millions, are not made."""

    model: msgspec.Raw = msgspec.Raw(b"{}")
    added_tokens: msgspec.Raw = msgspec.Raw(b"null")
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


class _RawWords(msgspec.Struct):
    """Of a model, what is long."""

    vocab: msgspec.Raw = msgspec.Raw(b"")
    merges: msgspec.Raw = msgspec.Raw(b"")


def _compare(one: bytes, other: bytes) -> bool:
    ours, theirs = (
        msgspec.structs.asdict(msgspec.json.decode(data, type=_RawFile)) for data in (one, other)
    )
    if any(_unlike(ours.get(part), theirs.get(part), _value) for part in _PARTS):
        return True
    if _unlike(ours.get("added_tokens"), theirs.get("added_tokens"), _added):
        return True
    if max(_beside_words(file["model"]) for file in (ours, theirs)) > _MOST_PART:
        return True
    first, second = _parts(ours["model"]), _parts(theirs["model"])
    vocab = first.pop("vocab", None), second.pop("vocab", None)
    merges = first.pop("merges", None), second.pop("merges", None)
    if _settings(first) != _settings(second):
        return True
    most = 2 * len(memoryview(vocab[1] or b"")) + _MOST_PART
    if _unlike(*vocab, _value, most):
        return True
    return merges[0] != merges[1] and any(a != b for a, b in zip_longest(*map(_pairs, merges)))


def _beside_words(model: msgspec.Raw) -> int:
    """Bytes of a model without its vocabulary and merges."""
    words = msgspec.json.decode(model, type=_RawWords)
    return len(memoryview(model)) - len(memoryview(words.vocab)) - len(memoryview(words.merges))


def _parts(data: msgspec.Raw) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(data, type=dict[str, msgspec.Raw])


def _unlike(
    one: msgspec.Raw | None,
    other: msgspec.Raw | None,
    read: Callable[[msgspec.Raw | None], object],
    most: int = _MOST_PART,
) -> bool:
    """Two parts that are neither the same bytes nor, as `read`, of the same value."""
    if one == other:
        return False
    if max(len(memoryview(part or b"")) for part in (one, other)) > most:
        return True
    return read(one) != read(other)


def _value(part: msgspec.Raw | None) -> Any:
    return None if part is None else msgspec.json.decode(part)


def _settings(parts: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Of a model; what is null, false or empty is as good as absent."""
    return {name: value for name, part in parts.items() if (value := _value(part))}


def _added(part: msgspec.Raw | None) -> list[tuple[Any, ...]]:
    tokens = msgspec.json.decode(part or b"[]", type=list[dict[str, Any]] | None) or []
    found = [
        (t.get("id"), t.get("content"), *(bool(t.get(flag)) for flag in _FLAGS)) for t in tokens
    ]
    return sorted(found, key=str)


def _pairs(part: msgspec.Raw | None) -> Iterator[tuple[str, str]]:
    """The merges, however they are spelled; broken ones as they come."""
    words = (found[0] for found in _SPELLED.finditer(memoryview(part or b"[]")))
    next(words, None)
    for word in words:
        if word == b"[":
            yield _word(next(words, b"")), _word(next(words, b""))
        elif word != b"]":
            one, _, other = _word(word).partition(" ")
            yield one, other


def _word(spelled: bytes) -> str:
    return str(json.loads(spelled)) if b"\\" in spelled else spelled[1:-1].decode()
