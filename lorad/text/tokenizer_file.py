"""A tokenizer.json beside that of a base: is its vocabulary the same, and may the rest be run?

Goes in: the bytes of both.  Comes out: a tokenizer of the library's on the base's vocabulary, or
TextError.  It is a stranger's: an expression that texts are split by may have no end, so only those
of the base are run.
"""

from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from lorad.text.tokenizer import TextError, add_tokens, made

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

Parts = dict[str, msgspec.Raw]


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


def refuse_expressions(parts: Parts, theirs: Parts, path: Path) -> None:
    """Of a stranger: `(a+)+$` keeps the library busy for ever, with Python's lock in hand, and a
    table of characters that is none breaks it off."""
    known = {text for name in PARTS for text in _expressions(theirs.get(name))}
    for name in PARTS:
        for text in _expressions(parts.get(name)):
            if text not in known:
                raise TextError(
                    f"{path}: {name} has an expression of its own ({text[:60]!r}), and only the "
                    "base's are run: save the tokenizer with the base's"
                )


def _expressions(part: msgspec.Raw | None) -> list[str]:
    """Every regular expression in it, and every table of characters."""
    if part is None:
        return []
    found: list[str] = []
    left: list[Any] = [msgspec.json.decode(part)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            for key, inside in value.items():
                if key in ("Regex", "precompiled_charsmap") and isinstance(inside, str):
                    found.append(inside)
                else:
                    left.append(inside)
        elif isinstance(value, list):
            left += value
    return found
