"""Tools in the OpenAI bodies, as msgspec Structs: what may be called, what was, and a call that
comes in pieces.

Goes in and comes out: parts of `wire_openai`'s requests and answers.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class FunctionCall(Struct, frozen=True):
    """`arguments` is JSON as the model wrote it: it may be none."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """Of an answer, and of an earlier one that is sent back."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionGiven(Struct, frozen=True, kw_only=True):
    """`parameters`: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolGiven(Struct, frozen=True, kw_only=True):
    """Something that an answer may call; only `type` "function" is served."""

    type: str
    function: FunctionGiven | None = None


class FunctionName(Struct, frozen=True, kw_only=True):
    name: str


class ToolChoice(Struct, frozen=True, kw_only=True):
    """One tool by its name."""

    type: str
    function: FunctionName | None = None


class FunctionDelta(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A call's first delta has its id and its name; its arguments are those of all, in order."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta
