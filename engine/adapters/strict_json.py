"""JSON from foreign files, read without surprises.

Goes in: bytes that the caller has already bounded.  Comes out: an object, or AdapterInvalid.
Stricter than `json.loads`: UTF-8 only, no key twice, no NaN or Infinity, and depth is an error and
not a crash.
"""

import json
from typing import Any, NoReturn

from engine.adapters.reasons import refuse, shown


class _Twice(ValueError):
    """A key that came twice."""


def read_object(data: bytes, *, what: str, code: str, hint: str) -> dict[str, Any]:
    """Parse a JSON object.  Raises AdapterInvalid with `code`, or E_DUPLICATE_KEY; `what` names
    the source in the message."""
    try:
        value = json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except _Twice as error:
        raise refuse(
            "E_DUPLICATE_KEY", f"{what} names {error} twice", "keep one of the two"
        ) from None
    except RecursionError:
        raise refuse(code, f"{what} is nested too deeply", hint) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of 4,301 digits
        raise refuse(code, f"{what} is not valid JSON: {shown(str(error))}", hint) from None
    if not isinstance(value, dict):
        raise refuse(code, f"{what} holds a {type(value).__name__}, wanted an object", hint)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(shown(key))
            seen.add(key)
    return made


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")
