"""What one generating request wants, after parsing: text or ids, how to draw, how much, until when.

Goes in: nothing.  Comes out: the frozen values that the API hands to `requests.RequestService` and
gets back.  Knows no HTTP and no JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from engine.messages import SamplingParams, TokenLogprobs

#: Of a message: role and content, and name, tool_calls and tool_call_id where there are any; of a
#: tool: type and function.  As chat templates read them.
Message = Mapping[str, Any]
Tool = Mapping[str, Any]


FormatKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Format:
    """The form that an answer is to have; `param` is the parameter that says so."""

    kind: FormatKind
    text: str  # JSON of the schema or of the choices; the expression or the grammar as it is
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`messages` for a chat, else `prompts`; answers are numbered prompt by prompt, n each."""

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()  # that the answer may call
    parallel_tool_calls: bool = True
    prompts: tuple[str | tuple[int, ...], ...] = ()
    num_characters: int = 0  # of all that becomes ids, as whoever made it has counted them
    chat: bool = False
    n: int = 1
    sampling: SamplingParams
    max_tokens: int | None = None  # as asked; None = what is left (chat), 16 (completions)
    max_tokens_param: str = "max_tokens"  # which parameter said so, for error messages
    stop: tuple[str, ...] = ()
    echo: bool = False
    skip_special: bool = True  # tokens that the tokenizer calls special are no part of the text
    priority: int | None = None  # None = the adapter's; more than that is not to be had
    timeout: float | None = None  # seconds that the client allows, if less than limits.deadline
    cache_salt: str = ""
    alora_fallback: Literal["", "base"] = ""  # who answers a prompt that does not invoke an aLoRA
    format: Format | None = None  # None = free text
    moves: bool = False  # whoever sent it sends it elsewhere, should it be refused for that
    traceparent: str = ""  # of whose trace the request is a part, as its client says
    tracestate: str = ""
    template_vars: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return self.n * (1 if self.chat else len(self.prompts))


class Piece(Struct, frozen=True, kw_only=True, gc=False):
    """What is new of one answer.  `finish` is set on its last piece only.

    A Struct because one is made for every token: a frozen dataclass takes six times as long.
    """

    index: int
    text: str = ""
    tokens: tuple[TokenLogprobs, ...] = ()  # empty unless log probabilities were asked for
    prompt: tuple[int, ...] = ()  # of an echo; its text is in the first piece
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: str | None = None  # stop | length


@dataclass(frozen=True, slots=True)
class Count:
    """What a request used, in tokens."""

    prompt: int
    completion: int
    cached: int

    @property
    def total(self) -> int:
        return self.prompt + self.completion
