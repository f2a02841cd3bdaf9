"""The OpenAI bodies of the inference socket, as msgspec Structs: requests, answers, stream chunks.

Goes in: JSON of a client.  Comes out: typed requests whose optional fields are None when absent or
null (`api/parse.py` checks ranges and knows the parameters that are refused), and answers exactly
as openai-python types them.  Knows no adapter, no token and no engine.

Accepted without effect, since they are only labels of the caller's: `user`, `safety_identifier`,
`prompt_cache_key`.
"""

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType, field

from lorad.wire_tools import ToolCall, ToolCallDelta, ToolChoice, ToolGiven

#: What clients type as a Literal; an aborted or failed sequence never ends in a finish reason.
Finish = Literal["stop", "length", "tool_calls", "content_filter"]


# ----------------------------------------------------------------- requests
class ContentPart(Struct, frozen=True):
    """One part of a message; only `type` "text" is served."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """`tool_calls` of an assistant, `tool_call_id` of a tool's result."""

    role: str
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class JsonSchema(Struct, frozen=True, kw_only=True):
    """The schema is followed whatever `strict` says; `name` and `description` are labels."""

    name: str
    schema: Raw
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's own spelling; one of them."""

    json: Raw = field(default_factory=Raw)
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """What both generating routes share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | tuple[str, ...] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None
    # beyond OpenAI's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    speculation_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    alora_fallback: Literal["base"] | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    # vLLM's names for the same; a schema as JSON, or as text that holds it
    guided_json: Raw = field(default_factory=Raw)
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatRequest(GenerateRequest, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: tuple[ChatMessage, ...]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: tuple[ToolGiven, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(GenerateRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`.  `prompt`: text, texts, token ids, or lists of token ids."""

    prompt: str | tuple[str | int | tuple[int, ...], ...]
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: a `prompt`, or `messages` to put through the chat template.

    `add_special_tokens` unless said otherwise for a prompt and not for messages, whose template
    writes its own; `return_token_strs` asks for the tokens as the vocabulary spells them.
    """

    model: str
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    return_token_strs: bool | None = None
    tools: tuple[ToolGiven, ...] | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: str
    tokens: tuple[int, ...]


# ----------------------------------------------------------------- usage
class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """`completion_tokens` counts to the token that completed a stop string."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


# ----------------------------------------------------------------- log probabilities
class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists, one entry a token; the first prompt token of an echo has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


# ----------------------------------------------------------------- chat answers
class AssistantMessage(Struct, frozen=True, kw_only=True):
    """`content` is null when there are calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str


class ChatDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """`usage` is absent unless asked for, then null on all chunks but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


# ----------------------------------------------------------------- completion answers
class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """An answer, and a chunk too: the OpenAI API gives both the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


# ----------------------------------------------------------------- models and tokens
class ModelFacts(Struct, frozen=True, kw_only=True):
    state: str
    rank: int | None = None
    pinned: bool = False
    priority: int | None = None
    tasks: tuple[str, ...] = ("generate",)  # or of embed classify rerank
    dimensions: int | None = None  # numbers of a vector, of a model that makes any


class ModelCard(Struct, frozen=True, kw_only=True):
    """`root` is the revision that answers now, `parent` the base of an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lorad"
    root: str
    parent: str | None
    max_model_len: int
    lorad: ModelFacts


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(Struct, frozen=True, kw_only=True):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True, kw_only=True):
    prompt: str
