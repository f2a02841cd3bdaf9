"""`tool_choice` "required", or a tool by its name: the form of an answer that can only be a call.

Goes in: a decoded request and its tools.  Comes out: a `Format` that holds one call, as JSON that
`text/tool_calls.py` reads at the beginning of any answer; None where the model may choose; or a 400
LoradError.  Whether the tools' schemas can be followed is seen when the format is compiled.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lorad.api import formats
from lorad.api.conversation import invalid
from lorad.config_sections import Limits
from lorad.errors import LoradError
from lorad.service.ask import Format, Tool
from lorad.wire_openai import ChatRequest

PARAM = "tool_choice"
#: Where schemas keep what they refer to; a tool's have to move to the root of the call's.
_SHELVES = ("$defs", "definitions")
_ANYTHING = {"type": "object"}


def wanted(request: ChatRequest, tools: Sequence[Tool], limits: Limits) -> Format | None:
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    if not tools:
        raise invalid(PARAM, "needs tools")
    functions = [tool["function"] for tool in tools]
    if not isinstance(choice, str):
        if choice.type != "function" or choice.function is None:
            text = 'tool_choice.type: only "function" is supported, with a function.name'
            raise LoradError("unsupported_parameter", text, param=f"{PARAM}.type")
        name = choice.function.name
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise invalid(f"{PARAM}.function.name", f"{name[:64]!r} is none of the tools")
    text = msgspec.json.encode(_schema(functions)).decode()
    return formats.checked(Format("json_schema", text, PARAM), request, limits)


def _schema(functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a call of one of them; the name comes first, so that a stream can tell it at once."""
    shelves: dict[str, dict[str, Any]] = {}
    calls = [_call(function, shelves) for function in functions]
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **shelves}


def _call(function: dict[str, Any], shelves: dict[str, dict[str, Any]]) -> dict[str, Any]:
    schema: dict[str, Any] = function.get("parameters") or _ANYTHING
    for shelf in _SHELVES:
        held = schema.get(shelf, {})
        if not isinstance(held, dict):
            raise invalid("tools", f"{function['name']}: {shelf} must be an object")
        for name, kept in held.items():
            if shelves.setdefault(shelf, {}).setdefault(name, kept) != kept:
                raise invalid("tools", f"have two different {shelf}/{name[:40]}")
    if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in _refs(schema)):
        rule = f"{function['name']}: a $ref must begin with #/$defs/ where a call is forced"
        raise LoradError("invalid_value", rule, param="tools")
    own = {key: value for key, value in schema.items() if key not in _SHELVES}
    own.setdefault("type", "object")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": own},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _refs(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
