"""`/tokenize` and `/detokenize`, in vLLM's shapes: what the model's own tokenizer and chat template
make of text, and the way back.

Goes in: a body that names a model.  Comes out: ids, or text.  An unknown model answers here exactly
as it does on the generating routes.
"""

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from lorad.api import params
from lorad.api.asked import checked
from lorad.api.conversation import messages, template_vars, tools
from lorad.api.deps import deps_of
from lorad.api.identity import caller_of
from lorad.api.respond import json
from lorad.errors import LoradError
from lorad.service.seams import Text
from lorad.wire_openai import Detokenized, DetokenizeRequest, TokenizeRequest, Tokens

Encode = Callable[[Text], list[int]]
#: That a token stands for, or so.
CHARACTERS = 4


async def tokenize(request: Request) -> Response:
    deps = deps_of(request)
    asked = await checked(request, TokenizeRequest, params.TOKENIZE)
    if (asked.prompt is None) == (asked.messages is None):
        raise LoradError("invalid_value", "give prompt or messages, one of them", param="prompt")
    encode = _chat(asked) if asked.messages is not None else _plain(asked)
    size = len(await request.body())  # it has fewer characters

    def work(text: Text) -> tuple[list[int], list[str] | None]:
        ids = encode(text)
        return ids, text.spell(ids) if asked.return_token_strs else None

    requests, caller = deps.requests, caller_of(request)
    (ids, spelled), model = await requests.with_text(asked.model, work, caller, size)
    context = requests.engine(model).max_model_len
    return json(Tokens(count=len(ids), max_model_len=context, tokens=ids, token_strs=spelled))


async def detokenize(request: Request) -> Response:
    """Special tokens are shown, so that what `/tokenize` gave comes back whole; ids that the
    vocabulary lacks are nothing."""
    asked = await checked(request, DetokenizeRequest, {})
    ids: Sequence[int] = asked.tokens
    prompt, _ = await deps_of(request).requests.with_text(
        asked.model,
        lambda text: text.decode(ids, skip_special=False),
        caller_of(request),
        CHARACTERS * len(ids),
    )
    return json(Detokenized(prompt=prompt))


def _plain(asked: TokenizeRequest) -> Encode:
    """What makes ids of it."""
    add_special, prompt = asked.add_special_tokens is not False, asked.prompt or ""
    return lambda text: text.encode(prompt, add_special)


def _chat(asked: TokenizeRequest) -> Encode:
    """As `/v1/chat/completions` would read them."""

    def encode(text: Text) -> list[int]:
        given, variables = messages(asked.messages or ()), template_vars(asked.chat_template_kwargs)
        variables |= {"add_generation_prompt": asked.add_generation_prompt is not False}
        rendered = text.render(given, variables, tools(asked.tools or ()))
        return text.encode(rendered, bool(asked.add_special_tokens))

    return encode
