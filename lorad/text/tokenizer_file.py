"""A tokenizer.json beside that of a base: is its vocabulary the same, and may the rest be run?

Goes in: the bytes of both.  Comes out: a tokenizer of the library's on the base's vocabulary, or
TextError.  It is a stranger's: what may take any amount of work is done only as the base has it.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from lorad.text.tokenizer import TextError, add_tokens, made, num_values

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

Parts = dict[str, msgspec.Raw]

#: tokenizer_config.json's added_tokens_decoder, of an adapter and of its base.
Listed = tuple[object, object]

#: What each part of a file may have more than the base's: a template of bos and eos takes 1 KB.
MORE_BYTES = 4096
#: And times the base's values: a merge is one as "a b", and three as ["a", "b"].
TIMES_VALUES = 3
#: A MB of added tokens' contents takes 0.8 s of Python's lock and 60 MB of memory.  Most have 2 to
#: 30 characters: room for 10,000 of them more than the base has.
MORE_CHARACTERS = 1 << 18
#: Of one token; the longest of known bases has 256.  An answer may be of it alone: 4,096 times
#: 256K characters are a GB in the daemon's memory.
LONGEST = 512
#: Steps that one library writes where another writes none, each once: sentencepiece's spaces,
#: and what goes around texts.  Any other doubles a text as often as it stands there: forty times
#: "ByteLevel" took all memory as soon as the adapter was added.
_USUAL_STEPS = {
    "normalizer": ("NFC",),
    "pre_tokenizer": ("Metaspace",),
    "post_processor": ("ByteLevel", "RobertaProcessing", "TemplateProcessing"),
    "decoder": ("ByteFallback", "Fuse", "Metaspace"),
}
#: Steps that are held against the base's whole: "Strip" breaks off at a text that is all of what it
#: takes from its end.
_WRITTEN = ("Prepend", "Replace", "Strip")
#: How sentencepiece writes spaces, which some write as replacements and some as a step of its own.
_USUAL = (
    '{"prepend": "\u2581", "type": "Prepend"}',
    '{"content": "\u2581", "pattern": {"String": " "}, "type": "Replace"}',
    '{"content": " ", "pattern": {"String": "\u2581"}, "type": "Replace"}',
    '{"content": " ", "start": 1, "stop": 0, "type": "Strip"}',
)
#: What to do about a file that is refused, where saving it again changes nothing.
REMOVE = "remove the tokenizer files to use the base's"
_BEGIN_WITH = f"add tokens to the base's own tokenizer and save that, or {REMOVE}"
_NONE = msgspec.Raw()


class _File(msgspec.Struct):
    """Of tokenizer.json; whatever else there is says nothing, and is not made."""

    model: msgspec.Raw = _NONE
    added_tokens: msgspec.Raw = _NONE
    normalizer: msgspec.Raw = _NONE
    pre_tokenizer: msgspec.Raw = _NONE
    post_processor: msgspec.Raw = _NONE
    decoder: msgspec.Raw = _NONE


class _Words(msgspec.Struct):
    """Of a model, what is long."""

    vocab: msgspec.Raw = _NONE
    merges: msgspec.Raw = _NONE


class _Added(msgspec.Struct):
    """A token as added_tokens lists it."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


def parts_of(data: bytes, path: Path) -> Parts:
    """By name, each as it is written: the vocabulary is not looked into yet."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TextError(f"{path} is not a tokenizer: {error}") from None
    if not bytes(file.model):
        raise TextError(f"{path} is not a tokenizer: it has no model")
    return {name: raw for name, raw in msgspec.structs.asdict(file).items() if bytes(raw)}


def same_model(one: msgspec.Raw, other: msgspec.Raw) -> bool:
    """Whether two files have one vocabulary, whatever way merges are written in: "a b", or as newer
    libraries do ["a", "b"].  What is written alike is not decoded: that keeps Python's lock, for
    100 ms where it is the merges of 128k tokens."""
    if bytes(one) == bytes(other):
        return True
    try:
        unlike = _unlike(one, other)
    except (msgspec.MsgspecError, RecursionError):
        return False  # the library says what is wrong with it
    return not unlike or (unlike == {"unk_token"} and _reads_bytes(other))


def _reads_bytes(model: msgspec.Raw) -> bool:
    """Whether it has a token for each byte, so that no text lacks one: then nobody needs a token
    for what is unknown.  transformers 5 saves those of Llama 2 and Mistral without."""
    falls_back = _value(msgspec.json.decode(model, type=Parts).get("byte_fallback"))
    return bool(falls_back) and all(word in bytes(model) for word in (b'"<0x00>"', b'"<0xFF>"'))


def _unlike(one: msgspec.Raw, other: msgspec.Raw, besides: Collection[str] = ()) -> set[str]:
    """Names of what two models have otherwise, `besides` these."""
    if _beside_words(one) > _beside_words(other) + MORE_BYTES:
        return {"kind"}
    mine, theirs = (msgspec.json.decode(raw, type=Parts) for raw in (one, other))
    names = {**mine, **theirs}.keys() - besides
    return {name for name in names if not _alike(mine.get(name), theirs.get(name))}


def _beside_words(model: msgspec.Raw) -> int:
    """Bytes of a model without its vocabulary and merges."""
    words = msgspec.json.decode(model, type=_Words)
    return len(bytes(model)) - len(bytes(words.vocab)) - len(bytes(words.merges))


def _alike(one: msgspec.Raw | None, other: msgspec.Raw | None) -> bool:
    """What is off or absent says the same."""
    if one is not None and other is not None and bytes(one) == bytes(other):
        return True
    return not _has_many_more(one, other) and bool(_value(one) == _value(other))


def _has_many_more(one: msgspec.Raw | None, other: msgspec.Raw | None) -> bool:
    """Whether `one` has so many values more that it says something else: to make 20 million empty
    lists took 1.7 GB, and kept Python's lock for 4 s."""
    mine, theirs = (num_values(bytes(raw or b"")) for raw in (one, other))
    return mine > TIMES_VALUES * theirs + MORE_BYTES


def _value(raw: msgspec.Raw | None) -> Any:
    value = None if raw is None else msgspec.json.decode(raw)
    if isinstance(value, list):
        return [each.split(" ") if isinstance(each, str) else each for each in value]
    return value or None


def rest_of(parts: Parts, path: Path) -> tokenizers.Tokenizer:
    """All of a file but its tokens, which runs nothing of it."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    rest = parts | {
        "model": msgspec.Raw(msgspec.json.encode(empty)),
        "added_tokens": msgspec.Raw(b"[]"),
    }
    text = msgspec.json.encode(rest).decode()
    return made(lambda: tokenizers.Tokenizer.from_str(text), path)


def joined(
    inner: tokenizers.Tokenizer, rest: tokenizers.Tokenizer, parts: Parts, path: Path
) -> tokenizers.Tokenizer:
    """`inner`, whose vocabulary the file has, with all else that the file has."""
    for part in PARTS:
        if (value := getattr(rest, part)) is not None:
            setattr(inner, part, value)
    listed = [(token["content"], token) for token in _added(parts, path)]
    made(lambda: add_tokens(inner, listed), path)
    return inner


def _added(parts: Parts, path: Path) -> list[dict[str, Any]]:
    """As the file lists them."""
    try:
        found = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[_Added])
        return [msgspec.structs.asdict(token) for token in found]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TextError(f"{path} is not a tokenizer: added_tokens: {error}") from None


def check_places(inner: tokenizers.Tokenizer, parts: Parts, path: Path) -> None:
    """The library puts added tokens where it finds room, and only warns: the adapter's rows would
    be those of other tokens."""
    for token in _added(parts, path):
        if (place := inner.token_to_id(token["content"])) != token["id"]:
            raise TextError(
                f"{path} has the token {token['content'][:40]!r} at id {token['id']}, and the "
                f"library puts it at {place}"
            )


def refuse_expressions(parts: Parts, theirs: Parts, path: Path) -> None:
    """Of a stranger, whose requests hold up nobody else: `(a+)+$` keeps the library busy for ever,
    with Python's lock in hand; and a table of characters that is none breaks it off."""
    left = Counter(text for name in PARTS for text in _expressions(_value_of(theirs, name)))
    for name in PARTS:
        if _has_many_more(parts.get(name), theirs.get(name)):
            raise TextError(
                f"{path}: {name} has many times the values of the base's", hint=_BEGIN_WITH
            )
        _refuse_more(_expressions(_value_of(parts, name)), left, name, path)
        size, most = (_size(p.get(name)) for p in (parts, theirs))
        if size > most + MORE_BYTES:
            raise TextError(
                f"{path}: {name} has {size:,} bytes, and the base's {most:,}", hint=_BEGIN_WITH
            )


def refuse_work(rest: tokenizers.Tokenizer, base: tokenizers.Tokenizer, path: Path) -> None:
    """The same of steps: "a" for "aa" forty times over takes all memory.  As the library has read
    them, which knows more than one way to write each."""
    mine, theirs = json.loads(rest.to_str()), json.loads(base.to_str())
    left = Counter(text for name in PARTS for text in _acts(theirs[name])) | Counter(_USUAL)
    for name in PARTS:
        _refuse_more(_acts(mine[name]), left, name, path)
        usual = Counter(dict.fromkeys(_USUAL_STEPS[name], 1))
        if more := Counter(_steps(mine[name])) - (Counter(_steps(theirs[name])) | usual):
            raise TextError(
                f"{path} is not a tokenizer that is run beside the base's: {name} has a step of "
                f"its own ({min(more)[:40]})",
                hint=_BEGIN_WITH,
            )


def _refuse_more(texts: Iterator[str], left: Counter[str], name: str, path: Path) -> None:
    """What is not `left`, where it is counted down."""
    for text in texts:
        if not left[text]:
            raise TextError(
                f"{path}: {name} has an expression of its own ({text[:60]}), and only "
                "the base's are run",
                hint=_BEGIN_WITH,
            )
        left[text] -= 1


def refuse_tokens(parts: Parts, theirs: Parts, listed: Listed, path: Path) -> None:
    """Some cost more than they say: of blanks that take the blanks beside them along, each in a row
    is held with all of the row behind it, 2.4 GB for 16,000.  `listed`: what the two folders'
    tokenizer_config.json have besides."""
    mine, base = (
        [*_added(p, path), *_contents(more)]
        for p, more in zip((parts, theirs), listed, strict=True)
    )
    known = {_written(token) for token in base}
    for token in mine:
        content, strips = token["content"], token.get("lstrip") or token.get("rstrip")
        if strips and not content.strip() and _written(token) not in known:
            raise TextError(
                f"{path} has the token {content[:40]!r}, of blanks alone, with lstrip or rstrip",
                hint="save the tokenizer without these flags",
            )
    contents, others = ({token["content"] for token in tokens} for tokens in (mine, base))
    refuse_long(contents - others, path)
    size, most = (sum(map(len, each)) for each in (contents, others))
    if size > most + MORE_CHARACTERS:
        raise TextError(
            f"{path} has added tokens of {size:,} characters, and may have "
            f"{most + MORE_CHARACTERS:,}",
            hint=REMOVE,
        )


def refuse_long(tokens: Collection[str], path: Path) -> None:
    """Of a token that nobody could have trained on: answers would be of any size."""
    if (longest := max(map(len, tokens), default=0)) > LONGEST:
        raise TextError(
            f"{path} has a token of {longest:,} characters, and {LONGEST} is the most", hint=REMOVE
        )


def _contents(listed: object) -> list[dict[str, Any]]:
    entries = listed.values() if isinstance(listed, dict) else ()
    return [e for e in entries if isinstance(e, dict) and isinstance(e.get("content"), str)]


def _written(token: dict[str, Any]) -> tuple[str, bool, bool]:
    return token["content"], bool(token.get("lstrip")), bool(token.get("rstrip"))


def _size(part: msgspec.Raw | None) -> int:
    """In bytes, without blanks and line ends."""
    return 0 if part is None else len(msgspec.json.encode(msgspec.json.decode(part)))


def refuse_other_kind(parts: Parts, theirs: Parts, path: Path) -> None:
    """A vocabulary of its own is read as the base's is: WordPiece looks at all beginnings of a word
    of any length, and a long prefix is put before every character."""
    may_differ = ("vocab", "merges", "unk_id", "unk_token")
    try:
        other = _unlike(parts["model"], theirs["model"], besides=may_differ)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TextError(f"{path} is not a tokenizer: model: {error}") from None
    if other:
        named = ascii(min(other)[:40])[1:-1]
        raise TextError(
            f"{path} has a vocabulary of its own, and another {named} than the base's", hint=REMOVE
        )


def _steps(part: Any) -> Iterator[str]:
    """Kinds of its steps, as often as they are there, but for those that are told as written."""
    for value in _objects(part):
        kind, single = value.get("type"), value.get("single")
        if isinstance(kind, str) and kind not in ("Sequence", *_WRITTEN):
            yield kind
        if isinstance(single, list):  # what goes around a text, which stands there once
            texts = [piece for piece in single if isinstance(piece, dict) and "Sequence" in piece]
            yield from ["text again" for _ in texts[1:]]


def _expressions(part: Any) -> Iterator[str]:
    """What in it the library compiles, before it runs it."""
    for value in _objects(part):
        for key in ("Regex", "precompiled_charsmap"):
            if isinstance(value.get(key), str):
                yield repr(value[key])


def _acts(part: Any) -> Iterator[str]:
    """What in it can take any amount of work: each written as JSON in one form."""
    yield from _expressions(part)
    for value in _objects(part):
        if value.get("type") in _WRITTEN:
            yield json.dumps(value, sort_keys=True, ensure_ascii=False)


def _objects(part: Any) -> Iterator[dict[str, Any]]:
    """All in it, itself included."""
    left = [part]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _value_of(parts: Parts, name: str) -> Any:
    return msgspec.json.decode(parts.get(name, b"null"))
