"""Messages, tools and template variables of a request, as chat templates read them.

Goes in: the Structs of a decoded body.  Comes out: plain values in the shapes of transformers'
`apply_chat_template`, or a 400 LoradError with the JSON path in `param`.  Knows no model: whether
its template takes tools is seen when it is rendered.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from lorad.errors import LoradError
from lorad.service.ask import Message, Tool
from lorad.wire_openai import ChatMessage, ChatRequest, ContentPart
from lorad.wire_tools import ToolCall, ToolGiven

TemplateVars = dict[str, str | int | float | bool | None]

MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RESERVED_VARS = ("self", "messages", "tools", "add_generation_prompt")
_ROLES = {
    **{"system": "system", "developer": "system", "user": "user"},
    **{"assistant": "assistant", "tool": "tool"},
}


# ----------------------------------------------------------------- messages
def messages(given: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Text parts are joined by newlines, a developer is a system."""
    if not given:
        raise invalid("messages", "must not be empty")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(given))


def _message(message: ChatMessage, path: str) -> Message:
    if message.role not in _ROLES:
        text = f"{path}.role: {message.role[:40]!r} is not served; use {', '.join(_ROLES)}"
        code = "unsupported_parameter" if message.role == "function" else "invalid_value"
        raise LoradError(code, text, param=f"{path}.role")
    calls = message.tool_calls or ()
    if calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls", "belongs to an assistant's message")
    made: dict[str, Any] = {
        "role": _ROLES[message.role],
        # Where there is none, templates that add it to text want text.
        "content": "" if message.content is None and calls else _content(message.content, path),
    }
    if message.name is not None:
        made["name"] = message.name
    if message.role == "tool" and message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if calls:
        called = enumerate(calls)
        made["tool_calls"] = [_call(call, f"{path}.tool_calls[{i}]") for i, call in called]
    return made


def _content(content: str | tuple[ContentPart, ...] | None, path: str) -> str:
    if content is None:
        raise invalid(f"{path}.content", "is required")
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        where = f"{path}.content[{i}]"
        if part.type != "text":
            text = f"{where}.type: {part.type[:40]!r} is not supported: only text is served"
            raise LoradError("unsupported_parameter", text, param=f"{where}.type")
        if part.text is None:
            raise invalid(f"{where}.text", "is required")
        texts.append(part.text)
    return "\n".join(texts)


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    """With its arguments as an object: templates write them as their model was taught to."""
    where = f"{path}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise invalid(where, "must be the JSON of an object") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


# ----------------------------------------------------------------- tools
def wanted_tools(request: ChatRequest) -> tuple[Tool, ...]:
    """What the model may call; none with `tool_choice` "none"."""
    given = tools(request.tools or ())
    return () if request.tool_choice == "none" else given


def tools(given: Sequence[ToolGiven]) -> tuple[Tool, ...]:
    """Tools as templates print them: type, then name, description and parameters."""
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"has {len(given)} entries; at most {MAX_TOOLS} are taken")
    made = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    if len({tool["function"]["name"] for tool in made}) < len(made):
        raise invalid("tools", "has two of one name")
    return made


def _tool(tool: ToolGiven, path: str) -> Tool:
    if tool.type != "function":
        text = f"{path}.type: {tool.type[:40]!r} is not supported: only functions are"
        raise LoradError("unsupported_parameter", text, param=f"{path}.type")
    function = tool.function
    if function is None:
        raise invalid(f"{path}.function", "is required")
    if not _TOOL_NAME.fullmatch(function.name):
        rule = "must be 1 to 64 letters, digits and any of _ - ."
        raise invalid(f"{path}.function.name", rule)
    if function.strict:
        where = f"{path}.function.strict"
        text = f"{where} is not supported: arguments are the model's own; leave it out"
        raise LoradError("unsupported_parameter", text, param=where)
    made: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        made["description"] = function.description
    if function.parameters is not None:
        made["parameters"] = function.parameters
    return {"type": "function", "function": made}


# ----------------------------------------------------------------- template variables
def template_vars(given: TemplateVars | None) -> TemplateVars:
    """`chat_template_kwargs`, without what a template gets from us."""
    for name in given or ():
        if not name.isidentifier() or name in _RESERVED_VARS:
            raise invalid("chat_template_kwargs", f"must not hold {name[:40]!r}")
    return dict(given or {})


def invalid(param: str, rule: str) -> LoradError:
    return LoradError("invalid_value", f"{param} {rule}", param=param)
