"""The bytes that tokens stand for, as each kind of vocabulary writes them.

Goes in: a decoder of the library's, and tokens as their vocabulary has them.  Comes out: bytes,
halves of characters included.  Knows no ids and no files.
"""

import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

#: Sentencepiece writes a space as a low block.
SPACE_MARK = "\u2581"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK_STEPS = {"Replace", "ByteFallback", "Metaspace", "Fuse", "Strip"}


class Bytes(Enum):
    """How a vocabulary writes the bytes of a token."""

    BYTE_LEVEL = "byte-level"  # each byte is one of 256 printable characters
    SPACE_MARK = "space-mark"  # sentencepiece: U+2581 for a space, <0xE4> for a lone byte
    OTHER = "other"  # only the library's decoder knows


def spelling_of(decoder: Any) -> Bytes:
    """Which of the spellings a decoder undoes."""
    kinds = set(_kinds(json.loads(decoder.__getstate__()) if decoder is not None else None))
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return Bytes.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"} and kinds <= _SPACE_MARK_STEPS:
        return Bytes.SPACE_MARK
    return Bytes.OTHER


def bytes_of(token: str, spelling: Bytes) -> bytes:
    """Of one that is not written in a spelling of its own: not for OTHER."""
    if spelling is Bytes.BYTE_LEVEL:
        # As the library's own decoder: one foreign character makes the whole token literal.
        spelled = [_BYTE_OF.get(character) for character in token]
        return token.encode() if None in spelled else bytes(b for b in spelled if b is not None)
    lone = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(lone[1], 16)]) if lone else token.replace(SPACE_MARK, " ").encode()


def whole(spelled: bytes) -> str | None:
    """The characters that it is; None if it may begin or end within one."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = (b for b in range(256) if chr(b) not in table)
    return table | {chr(0x100 + n): b for n, b in enumerate(rest)}


_BYTE_OF = byte_alphabet()


def _kinds(decoder: Any) -> Iterator[str]:
    """Of all its steps."""
    if not isinstance(decoder, dict):
        return
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _kinds(part)
    else:
        yield str(decoder.get("type"))
