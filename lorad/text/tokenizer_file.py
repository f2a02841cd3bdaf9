"""A tokenizer.json beside that of a base: is its vocabulary the same, and may the rest be run?

Goes in: the bytes of both.  Comes out: a tokenizer of the library's on the base's vocabulary, or
TextError.  It is a stranger's: what may take any amount of work is done only as the base has it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from lorad.text.tokenizer import TextError, add_tokens, made

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

Parts = dict[str, msgspec.Raw]

#: What each part of a file may have more than the base's: a template of bos and eos takes 1 KB.
MORE_BYTES = 4096
#: How sentencepiece writes spaces, which some write as replacements and some as a step of its own.
_USUAL = (
    '{"prepend": "\u2581", "type": "Prepend"}',
    '{"content": "\u2581", "pattern": {"String": " "}, "type": "Replace"}',
    '{"content": " ", "pattern": {"String": "\u2581"}, "type": "Replace"}',
)


def parts_of(data: bytes, path: Path) -> Parts:
    """By name, each as it is written: the vocabulary is not looked into yet."""
    try:
        parts = msgspec.json.decode(data, type=Parts)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TextError(f"{path} is not a tokenizer: {error}") from None
    if "model" not in parts:
        raise TextError(f"{path} is not a tokenizer: it has no model")
    return parts


def same_model(one: msgspec.Raw, other: msgspec.Raw) -> bool:
    """Whether two files have one vocabulary, whatever way merges are written in: "a b", or as newer
    libraries do ["a", "b"].  What is written alike is not decoded: that keeps Python's lock, for
    100 ms where it is the merges of 128k tokens."""
    if bytes(one) == bytes(other):
        return True
    try:
        mine, theirs = (msgspec.json.decode(raw, type=Parts) for raw in (one, other))
        return all(_alike(mine.get(key), theirs.get(key)) for key in {**mine, **theirs})
    except (msgspec.MsgspecError, RecursionError):
        return False  # the library says what is wrong with it


def _alike(one: msgspec.Raw | None, other: msgspec.Raw | None) -> bool:
    """What is off or absent says the same."""
    if one is not None and other is not None and bytes(one) == bytes(other):
        return True
    return bool(_value(one) == _value(other))


def _value(raw: msgspec.Raw | None) -> Any:
    value = None if raw is None else msgspec.json.decode(raw)
    if isinstance(value, list):
        return [each.split(" ") if isinstance(each, str) else each for each in value]
    return value or None


def joined(inner: tokenizers.Tokenizer, parts: Parts, path: Path) -> tokenizers.Tokenizer:
    """`inner`, whose vocabulary the file has, with all else that the file has."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    rest = parts | {
        "model": msgspec.Raw(msgspec.json.encode(empty)),
        "added_tokens": msgspec.Raw(b"[]"),
    }
    text = msgspec.json.encode(rest).decode()
    read = made(lambda: tokenizers.Tokenizer.from_str(text), path)
    for part in PARTS:
        if (value := getattr(read, part)) is not None:
            setattr(inner, part, value)
    listed = [(token["content"], token) for token in _added(parts, path)]
    made(lambda: add_tokens(inner, listed), path)
    return inner


def _added(parts: Parts, path: Path) -> list[dict[str, Any]]:
    """As the file lists them."""
    try:
        found = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TextError(f"{path} is not a tokenizer: added_tokens: {error}") from None
    if not all(isinstance(t.get("content"), str) and type(t.get("id")) is int for t in found):
        raise TextError(f"{path} is not a tokenizer: added_tokens without content or id")
    return found


def check_places(inner: tokenizers.Tokenizer, parts: Parts, path: Path) -> None:
    """The library puts added tokens where it finds room, and only warns: the adapter's rows would
    be those of other tokens."""
    for token in _added(parts, path):
        if (place := inner.token_to_id(token["content"])) != token["id"]:
            raise TextError(
                f"{path} has the token {token['content'][:40]!r} at id {token['id']}, and the "
                f"library puts it at {place}: save the tokenizer again"
            )


def refuse_work(parts: Parts, theirs: Parts, path: Path) -> None:
    """Of a stranger, whose requests hold up nobody else: `(a+)+$` keeps the library busy for ever,
    with Python's lock in hand; "a" for "aa" forty times over takes all memory; and a table of
    characters that is none breaks it off."""
    left = Counter(text for name in PARTS for text in _acts(theirs.get(name))) | Counter(_USUAL)
    for name in PARTS:
        for text in _acts(parts.get(name)):
            if not left[text]:
                raise TextError(
                    f"{path}: {name} has an expression of its own ({text[:60]}), and only "
                    "the base's are run: save the tokenizer with the base's"
                )
            left[text] -= 1
        size, most = (_size(p.get(name)) for p in (parts, theirs))
        if size > most + MORE_BYTES:
            raise TextError(
                f"{path}: {name} has {size:,} bytes, and the base's {most:,}: save the tokenizer "
                "with the base's"
            )


def _size(part: msgspec.Raw | None) -> int:
    """In bytes, without blanks and line ends."""
    return 0 if part is None else len(msgspec.json.encode(msgspec.json.decode(part)))


def refuse_other_kind(parts: Parts, theirs: Parts, path: Path) -> None:
    """A vocabulary of its own is read as the base's is: WordPiece looks at all beginnings of a word
    of any length, and a long prefix is put before every character."""
    try:
        mine, base = (msgspec.json.decode(p["model"], type=Parts) for p in (parts, theirs))
        other = {k for k in {**mine, **base} if not _alike(mine.get(k), base.get(k))}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TextError(f"{path} is not a tokenizer: model: {error}") from None
    if other := other - {"vocab", "merges", "unk_id"}:
        raise TextError(
            f"{path} has a vocabulary of its own, and another {sorted(other)[0][:40]} than the "
            "base's: remove the tokenizer files to use that"
        )


def _acts(part: msgspec.Raw | None) -> Iterator[str]:
    """What in it can take any amount of work: each written as JSON in one form."""
    left: list[Any] = [] if part is None else [msgspec.json.decode(part)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if value.get("type") in ("Replace", "Prepend"):
                yield json.dumps(value, sort_keys=True, ensure_ascii=False)
            for key, inside in value.items():
                if key in ("Regex", "precompiled_charsmap") and isinstance(inside, str):
                    yield repr(inside)
                else:
                    left.append(inside)
        elif isinstance(value, list):
            left += value
