"""Bodies of the generating routes → `Ask`; after this no dict travels.

Goes in: bytes.  Comes out: a checked `Ask` and how to answer it (`Shape`), or a 400 LoradError
with the JSON path in `param`.  What depends on the model (context, vocabulary) is checked later,
by `service/plan.py`.
"""

import re
from dataclasses import dataclass
from functools import cache

from msgspec import Struct

from engine.config import MOST_DRAFT_TOKENS
from engine.messages import SamplingParams
from lorad.api import forced_calls, formats, params
from lorad.api.body import decode, fields
from lorad.api.conversation import invalid, messages, template_vars, wanted_tools
from lorad.config_sections import Limits
from lorad.errors import LoradError
from lorad.service.ask import Ask
from lorad.service.text_threads import num_characters
from lorad.wire_openai import ChatRequest, CompletionRequest, GenerateRequest

MAX_TOP_LOGPROBS = 20
MAX_STOP_CHARACTERS = 4096
_SEED = 1 << 63
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Shape:
    """How the client wants it: as a stream, with usage at its end, with log probabilities."""

    stream: bool
    include_usage: bool
    top_logprobs: int | None


def chat(body: bytes, limits: Limits) -> tuple[Ask, Shape]:
    """`POST /v1/chat/completions`."""
    request = decode(body, ChatRequest, max_depth=limits.json_depth)
    params.check(fields(body), params.CHAT, _served(ChatRequest), limits.strict_params)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs = true")
    _within("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    top = (request.top_logprobs or 0) if request.logprobs else None
    asked, param = request.max_tokens, "max_tokens"
    if request.max_completion_tokens is not None:
        if asked not in (None, request.max_completion_tokens):
            raise invalid("max_completion_tokens", "contradicts max_tokens; give one of them")
        asked, param = request.max_completion_tokens, "max_completion_tokens"
    _within(param, asked, 1, limits.max_tokens)
    n = _n(request, limits)
    _fits_queue(1, n, limits)
    tools, wanted_format = wanted_tools(request), formats.wanted(request, limits)
    if tools and wanted_format:
        raise invalid(wanted_format.param, 'contradicts tools; say tool_choice = "none"')
    wanted_format = wanted_format or forced_calls.wanted(request, tools, limits)
    conversation = messages(request.messages)
    ask = Ask(
        chat=True,
        model=_model(request),
        messages=conversation,
        tools=tools,
        num_characters=num_characters((conversation, tools)),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        n=n,
        sampling=_sampling(request, limits, top),
        max_tokens=asked,
        max_tokens_param=param,
        stop=_stop(request, limits),
        skip_special=request.skip_special_tokens is not False,
        priority=_priority(request),
        cache_salt=request.cache_salt or "",
        alora_fallback=request.alora_fallback or "",
        format=wanted_format,
        template_vars=template_vars(request.chat_template_kwargs),
    )
    return ask, _shape(request, top)


def completion(body: bytes, limits: Limits) -> tuple[Ask, Shape]:
    """`POST /v1/completions`."""
    request = decode(body, CompletionRequest, max_depth=limits.json_depth)
    params.check(fields(body), params.COMPLETION, _served(CompletionRequest), limits.strict_params)
    _within("logprobs", request.logprobs, 0, MAX_TOP_LOGPROBS)
    echo = bool(request.echo)
    _within("max_tokens", request.max_tokens, 0 if echo else 1, limits.max_tokens)
    prompts, n = _prompts(request), _n(request, limits)
    _fits_queue(len(prompts), n, limits)
    ask = Ask(
        model=_model(request),
        prompts=prompts,
        num_characters=num_characters(prompts),
        n=n,
        sampling=_sampling(request, limits, request.logprobs, score_prompt=echo),
        max_tokens=request.max_tokens,
        stop=_stop(request, limits),
        skip_special=request.skip_special_tokens is not False,
        echo=echo,
        priority=_priority(request),
        cache_salt=request.cache_salt or "",
        alora_fallback=request.alora_fallback or "",
        format=formats.wanted(request, limits),
    )
    return ask, _shape(request, request.logprobs)


def timeout(header: str | None) -> float | None:
    """Seconds of an `x-request-timeout` header: how long the client allows for all of it."""
    if header is None:
        return None
    if not _SECONDS.fullmatch(header) or not float(header):
        raise invalid("x-request-timeout", 'must be seconds, above 0, such as "30" or "2.5"')
    return float(header)


# ----------------------------------------------------------------- shared values
def _model(request: GenerateRequest) -> str:
    if not request.model:
        raise invalid("model", "must not be empty")
    return request.model


def _n(request: GenerateRequest, limits: Limits) -> int:
    _within("n", request.n, 1, limits.n)
    return request.n or 1


def _fits_queue(num_prompts: int, n: int, limits: Limits) -> None:
    """What could not wait even alone is no matter of time."""
    for name in ("queue", "queue_per_tenant"):
        most: int = getattr(limits, name)
        if num_prompts * n > most:
            message = f"{num_prompts} prompts with n = {n} are more than limits.{name} = {most}"
            raise LoradError("invalid_value", message, param="prompt" if num_prompts > 1 else "n")


def _priority(request: GenerateRequest) -> int | None:
    _within("priority", request.priority, 0, 100)
    return request.priority


def _stop(request: GenerateRequest, limits: Limits) -> tuple[str, ...]:
    stop = (request.stop,) if isinstance(request.stop, str) else request.stop or ()
    if len(stop) > limits.stop:
        raise invalid("stop", f"{len(stop)} strings; at most {limits.stop} are taken")
    for i, text in enumerate(stop):
        param = "stop" if isinstance(request.stop, str) else f"stop[{i}]"
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise invalid(param, f"must have 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stop))


def _sampling(
    request: GenerateRequest, limits: Limits, logprobs: int | None, *, score_prompt: bool = False
) -> SamplingParams:
    _within("temperature", request.temperature, 0, 2)
    _within("top_p", request.top_p, 0, 1)
    _within("top_k", request.top_k, -1, 1 << 31)
    _within("min_p", request.min_p, 0, 1)
    _within("presence_penalty", request.presence_penalty, -2, 2)
    _within("frequency_penalty", request.frequency_penalty, -2, 2)
    _within("repetition_penalty", request.repetition_penalty, 0.01, 10)
    _within("min_tokens", request.min_tokens, 0, limits.max_tokens)
    _within("speculation_tokens", request.speculation_tokens, 0, MOST_DRAFT_TOKENS)
    _within("seed", request.seed, -_SEED, _SEED - 1)
    if request.allowed_token_ids is not None and not request.allowed_token_ids:
        raise invalid("allowed_token_ids", "must name at least one token")
    stop_ids = request.stop_token_ids or ()
    if len(stop_ids) > limits.stop:
        raise invalid("stop_token_ids", f"{len(stop_ids)} ids; at most {limits.stop} are taken")
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=max(_or(request.top_p, 1.0), 1e-6),  # 0 keeps the best token alone
        top_k=max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        min_tokens=request.min_tokens or 0,
        seed=request.seed,
        logprobs=logprobs,
        prompt_logprobs=logprobs if score_prompt else None,
        logit_bias=_logit_bias(request, limits),
        allowed_token_ids=_once(request.allowed_token_ids),
        stop_token_ids=stop_ids,
        ignore_eos=bool(request.ignore_eos),
        draft_tokens=request.speculation_tokens,
    )


def _once(ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """They go to the engine with each sequence: 300,000 that are 49,000 took 0.4 s of the loop for
    128, and 0.1 without the copies."""
    return None if ids is None else tuple(dict.fromkeys(ids))


def _logit_bias(request: GenerateRequest, limits: Limits) -> dict[int, float]:
    bias = request.logit_bias or {}
    if len(bias) > limits.logit_bias:
        raise invalid("logit_bias", f"{len(bias)} tokens; at most {limits.logit_bias} are taken")
    for token, value in bias.items():
        _within(f"logit_bias.{token}", value, -100, 100)
    return bias


def _prompts(request: CompletionRequest) -> tuple[str | tuple[int, ...], ...]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise invalid("prompt", "must not be empty")
    ids = tuple(item for item in prompt if isinstance(item, int))
    if len(ids) == len(prompt):
        return (ids,)
    prompts = tuple(item for item in prompt if not isinstance(item, int))
    if ids or len({type(item) for item in prompts}) > 1:
        raise invalid("prompt", "mixes text and token ids")
    return prompts


def _shape(request: GenerateRequest, top_logprobs: int | None) -> Shape:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise invalid("stream_options", "needs stream = true")
    wants_usage = request.stream_options is not None and request.stream_options.include_usage
    return Shape(stream=stream, include_usage=bool(wants_usage), top_logprobs=top_logprobs)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _within(param: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # an int may be beyond any float
        raise invalid(param, f"must be {low:g} to {high:g}")


@cache
def _served(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)
