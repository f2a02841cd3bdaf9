"""Parameters that are known and not served: what each may say, and what to do instead.

Goes in: the top level keys of a body.  Comes out: nothing, or LoradError `unsupported_parameter`.
A refused parameter passes with the values that change nothing (`null` always does), so that
clients which spell out defaults work; it is never ignored when it means something.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from lorad.errors import LoradError


@dataclass(frozen=True, slots=True)
class Refused:
    """`neutral`: JSON values that ask for nothing."""

    instead: str
    neutral: tuple[object, ...] = ()


_FUNCTIONS = "use tools"
_TEXT_ONLY = "only text is served"

_BOTH: dict[str, Refused] = {
    "use_beam_search": Refused("beam search is not served; leave it out", (False,)),
    "length_penalty": Refused("beam search is not served; leave it out", (1,)),
    "bad_words": Refused("use logit_bias", ([],)),
    "include_stop_str_in_output": Refused("append the stop string yourself", (False,)),
    "spaces_between_special_tokens": Refused("leave it out", (True,)),
    "truncate_prompt_tokens": Refused("shorten the prompt; /tokenize counts tokens"),
    "prompt_logprobs": Refused("use echo with logprobs on /v1/completions"),
    "return_token_ids": Refused("use /tokenize", (False,)),
}

CHAT: dict[str, Refused] = _BOTH | {
    "functions": Refused(_FUNCTIONS, ([],)),
    "function_call": Refused(_FUNCTIONS, ("none", "auto")),
    "modalities": Refused(_TEXT_ONLY, (["text"],)),
    "audio": Refused(_TEXT_ONLY),
    "prediction": Refused("leave it out"),
    "reasoning_effort": Refused("use chat_template_kwargs, if the template knows reasoning"),
    "verbosity": Refused("ask for it in a message", ("medium",)),
    "web_search_options": Refused("leave it out"),
    "service_tier": Refused("use priority", ("auto", "default")),
    "store": Refused("nothing is stored; leave it out", (False,)),
    "metadata": Refused("nothing is stored; leave it out", ({},)),
    "echo": Refused("use /v1/completions", (False,)),
    "chat_template": Refused("put it into the adapter's folder as chat_template.jinja"),
    "add_generation_prompt": Refused("leave it out", (True,)),
    "continue_final_message": Refused("use /v1/completions", (False,)),
    "documents": Refused("put them into a message", ([],)),
}

COMPLETION: dict[str, Refused] = _BOTH | {
    "suffix": Refused("put it into the prompt", ("",)),
    "best_of": Refused("use n, and choose yourself", (1,)),
}


TOKENIZE: dict[str, Refused] = {
    "continue_final_message": Refused("leave it out", (False,)),
    "chat_template": CHAT["chat_template"],
    "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
    "truncate_prompt_tokens": Refused("shorten the prompt"),
}

_CUT = {"truncation_direction": Refused("inputs are cut at their end", ("right", "Right"))}
_ONE_MODEL = "each model reads texts as it was trained to"

#: Of `/v1/embeddings` and `/pooling`.
EMBEDDINGS: dict[str, Refused] = {
    "messages": Refused("put the text into input"),
    "add_special_tokens": Refused("send token ids", (True,)),
    "late_chunking": Refused("use /pooling, and pool the tokens yourself", (False,)),
    "embed_dtype": Refused("fp32 is told", ("float32",)),
    "endianness": Refused("base64 is little-endian", ("native", "little")),
    "output_dtype": Refused("fp32 is told", ("float",)),
    "embedding_type": Refused("use encoding_format", ("float",)),
    "embedding_types": Refused("use encoding_format", (["float"],)),
    "chat_template": Refused(_ONE_MODEL),
    **_CUT,
}
CLASSIFY: dict[str, Refused] = {
    "messages": EMBEDDINGS["messages"],
    "activation": Refused("scores are as the model's files say", (True,)),
    "use_activation": Refused("scores are as the model's files say", (True,)),
    **_CUT,
}
SCORE: dict[str, Refused] = {
    "activation": CLASSIFY["activation"],
    "use_activation": CLASSIFY["use_activation"],
    "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
}
RERANK: dict[str, Refused] = {
    "rank_fields": Refused("the field text is read", (["text"],)),
    "max_chunks_per_doc": Refused("send parts as documents of their own", (1,)),
    "return_embeddings": Refused("use /v1/embeddings", (False,)),
    "activation": CLASSIFY["activation"],
    "use_activation": CLASSIFY["use_activation"],
}
TEI_RERANK: dict[str, Refused] = _CUT
TEI: dict[str, Refused] = _CUT | {
    "encoding_format": Refused("use /v1/embeddings", ("float",)),
}


def check(
    given: Mapping[str, Raw], refused: Mapping[str, Refused], served: frozenset[str], strict: bool
) -> None:
    """`served`: the keys that the request's Struct has; others are ignored unless `strict`."""
    for key, raw in given.items():
        if key in refused:
            value = msgspec.json.decode(raw)
            if value is not None and value not in refused[key].neutral:
                message = f"{key} is not supported: {refused[key].instead}"
                raise LoradError("unsupported_parameter", message, param=key)
        elif strict and key not in served:
            message = f"{key} is not a parameter of this route"
            hint = "limits.strict_params = false ignores unknown ones"
            raise LoradError("unsupported_parameter", message, param=key, hint=hint)
