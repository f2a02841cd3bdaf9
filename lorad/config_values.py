"""Values of settings: sizes, durations and plain types, out of TOML and out of text.

Goes in: a field's type and what somebody wrote.  Comes out: the value, in bytes or seconds, or
ValueError with what was expected there.  Knows no setting.
"""

import re
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from engine.config import GIB, KIB, MIB

Size = Annotated[int, "size"]
AutoSize = Annotated[int, "size", "auto"]  # 0 = auto
AutoNumber = Annotated[int, "number", "auto"]  # 0 = auto
AutoShare = Annotated[float, "number", "auto"]  # 0.0 = auto
Seconds = Annotated[float, "duration"]

_SIZES = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}
_SIZES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """`"16GiB"` in bytes; ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _SIZES:
        raise ValueError('a size such as "16GiB", "500MB" or a number of bytes')
    return int(float(match[1]) * _SIZES[match[2].upper()])


def parse_duration(text: str) -> float:
    """`"2s"`, `"10m"`, `"250ms"` in seconds; ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", text)
    if not match:
        raise ValueError('a duration such as "2s", "10m" or a number of seconds')
    return float(match[1]) * _DURATIONS[match[2]]


def hints(section: type[Struct]) -> dict[str, object]:
    """Field -> annotated type of a section."""
    return get_type_hints(section, include_extras=True)


def convert(hint: object, raw: object) -> object:
    """One TOML value, or one text of an environment variable or flag, as the field's type."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    if isinstance(raw, str):
        if "auto" in marks and raw == "auto":
            return 0
        if "size" in marks:
            return parse_size(raw)
        if "duration" in marks:
            return parse_duration(raw)
    if isinstance(raw, bool) and marks:
        raise ValueError("a number")
    try:
        value: object = msgspec.convert(raw, hint)
    except msgspec.ValidationError as error:
        raise ValueError(_expected(hint, error)) from error
    if marks and "number" not in marks and isinstance(value, int | float) and value < 0:
        raise ValueError("0 or more")
    return value


def convert_text(hint: object, text: str) -> object:
    """The same for text that has no type of its own: `true`, `8`, `a,b`."""
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(plain) is tuple:
        item = get_args(plain)[0]
        return tuple(convert_text(item, part.strip()) for part in text.split(",") if part.strip())
    if plain is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError("true or false")
    if plain in (int, float):
        try:
            number: object = plain(text)
        except ValueError:
            return convert(hint, text)
        return convert(hint, number)
    return convert(hint, text)


def _expected(hint: object, error: msgspec.ValidationError) -> str:
    """The choices where there are some, else msgspec's sentence without its prefix and path."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    return str(error).split(" - at")[0].removeprefix("Expected ")
