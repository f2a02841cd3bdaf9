"""An `Ask` and its token ids → one SamplingParams for each sequence, or the reason why not.

Goes in: the request, its prompts as ids, the engine's facts.  Comes out: parameters in the order of
the answers (prompt by prompt, n each), with `max_tokens` filled in and seeds told apart.  Pure.
"""

from collections.abc import Sequence

import msgspec

from engine.messages import EngineInfo, SamplingParams
from lorad.errors import LoradError
from lorad.service.ask import Ask

#: Of a completion that says nothing.
COMPLETION_MAX_TOKENS = 16
_SEEDS = 1 << 63


def plan(
    ask: Ask,
    prompts: Sequence[tuple[int, ...]],
    info: EngineInfo,
    ends: frozenset[int],
    max_tokens: int,
    num_tokens: int = 0,
) -> list[SamplingParams]:
    """`ends` stop a sequence; `max_tokens` caps a chat that names none; `num_tokens` is the size
    of an adapter's own vocabulary, 0: it has the base's.

    Raises invalid_value, context_length_exceeded.
    """
    # Lengths first: to look at a million ids, which no context holds, took 20 to 40 ms of the loop.
    rooms = [_max_tokens(ask, len(prompt), info.max_model_len, max_tokens) for prompt in prompts]
    _check_vocabulary(ask, prompts, num_tokens or info.vocab_size)
    # An end token of the base may be a word in an adapter's own vocabulary: then none of them is
    # one by itself.
    usual = frozenset(info.eos_token_ids)
    ignore_eos = ask.sampling.ignore_eos or not usual <= ends
    stops = tuple(sorted(ends if ignore_eos else ends - usual))
    planned = []
    for room in rooms:
        for draw in range(ask.n):
            seed = ask.sampling.seed
            planned.append(
                msgspec.structs.replace(
                    ask.sampling,
                    max_tokens=room,
                    min_tokens=min(ask.sampling.min_tokens, room),
                    seed=None if seed is None else (seed + draw) % _SEEDS,
                    stop_token_ids=stops,
                    ignore_eos=ignore_eos,
                )
            )
    return planned


def _check_vocabulary(ask: Ask, prompts: Sequence[tuple[int, ...]], size: int) -> None:
    named = [("logit_bias", ask.sampling.logit_bias)]
    named += [("stop_token_ids", dict.fromkeys(ask.sampling.stop_token_ids, 0.0))]
    named += [("allowed_token_ids", dict.fromkeys(ask.sampling.allowed_token_ids or (), 0.0))]
    for number, (prompt, given) in enumerate(zip(prompts, ask.prompts, strict=False)):
        param = f"prompt[{number}]" if len(prompts) > 1 else "prompt"
        if not prompt:
            raise LoradError("invalid_value", f"{param} is empty", param=param)
        if not isinstance(given, str):
            named.append((param, dict.fromkeys(prompt, 0.0)))
    for param, ids in named:
        for token in ids:
            if not 0 <= token < size:
                message = f"{param}: token id {token} is outside the vocabulary of {size}"
                raise LoradError("invalid_value", message, param=param)


def _max_tokens(ask: Ask, num_prompt: int, context: int, cap: int) -> int:
    left = context - num_prompt
    if left < 1:
        asked = "messages" if ask.chat else "prompt"
        message = f"the context holds {context} tokens, and the {asked} alone took {num_prompt}"
        raise LoradError("context_length_exceeded", message, param=asked)
    if ask.max_tokens is None:
        return min(left, cap if ask.chat else COMPLETION_MAX_TOKENS)
    if ask.max_tokens > left:
        message = (
            f"the context holds {context} tokens, but {num_prompt} of prompt and "
            f"{ask.max_tokens} to generate are {num_prompt + ask.max_tokens}"
        )
        raise LoradError("context_length_exceeded", message, param=ask.max_tokens_param)
    return max(ask.max_tokens, 1)
