"""Bodies that are nearly right, drawn from a seed: an answer or a 4xx in the envelope, no 500.

A case that fails names its seed; `mutated(seed, ...)` makes it again.
"""

import copy
import json
import random

import httpx
import pytest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "model": "bible",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "max_tokens": 3,
    "stop": ["zz"],
    "logprobs": True,
    "top_logprobs": 1,
    "logit_bias": {"5": 1.5},
    "stream": False,
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"a": True},
}
PLAIN = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 2, "echo": True, "seed": 1}
TOKENIZE = {
    "model": "bible",
    "messages": CHAT["messages"],
    "tools": [TOOL],
    "return_token_strs": True,
}
VECTORS = {
    "model": "tiny",
    "input": ["a", "b"],
    "encoding_format": "base64",
    "dimensions": 4,
    "normalize": True,
    "input_type": "query",
    "truncate": True,
    "truncate_prompt_tokens": 9,
}
RANK = {
    "model": "tiny",
    "query": "a",
    "documents": ["b", {"text": "c"}],
    "top_n": 1,
    "return_documents": True,
    "max_tokens_per_doc": 9,
    "truncate_prompt_tokens": -1,
}
ROUTES = {
    "/v1/chat/completions": ("inference", CHAT),
    "/v1/completions": ("inference", PLAIN),
    "/tokenize": ("inference", TOKENIZE),
    "/detokenize": ("inference", {"model": "tiny", "tokens": [1, 2, 256]}),
    "/v1/embeddings": ("inference", VECTORS),
    "/pooling": ("inference", VECTORS | {"task": "token_embed"}),
    "/classify": ("inference", {"model": "tiny", "input": ["a", "b"], "truncate": True}),
    "/v1/rerank": ("inference", RANK),
    "/v1/score": ("inference", {"model": "tiny", "text_1": "a", "text_2": ["a", "b"]}),
    "/v1/load_lora_adapter": ("admin", {"lora_name": "a", "lora_path": "/a", "load_inplace": True}),
    "/v1/unload_lora_adapter": ("admin", {"lora_name": "a"}),
}
VALUES = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**40, -0.5, 1e308, 0.1),
    *(
        "",
        "x",
        "\0",
        "\x1b]0;",
        "é\u2028",
        "x" * 2000,
        "../x",
        "tiny",
        "none",
        "required",
        "function",
    ),
    *([], [[]], [None], [{}], {}, {"a": {}}, {"type": "text"}, [0, "a"], {"": ""}),
]
CASES = 200


def places(value, path=()):
    """The paths of everything within."""
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def changed(draw, body):
    """One value replaced, taken away, doubled or put elsewhere."""
    *way, last = draw.choice([path for path in places(body) if path])
    holder = body
    for key in way:
        holder = holder[key]
    act = draw.randrange(5)
    if act == 0:
        del holder[last]
    elif act == 1 and isinstance(holder, list):
        holder.extend(copy.deepcopy(holder[last]) for _ in range(draw.choice((1, 40))))
    elif act == 2 and isinstance(holder, dict):
        holder[draw.choice(("x", "type", "name", "n", "messages", "tools"))] = holder.pop(last)
    else:
        value = copy.deepcopy(draw.choice(VALUES))
        holder[last] = value if draw.random() < 0.9 else [copy.deepcopy(value) for _ in range(9)]


def mutated(seed, body):
    """The bytes of a body that is nearly `body`."""
    draw = random.Random(seed)
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 4)):
        if body:
            changed(draw, body)
    data = bytearray(json.dumps(body, ensure_ascii=draw.random() < 0.5).encode())
    if draw.random() < 0.2:
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.choice(b'\x00\xff{}[]",:\\ 9e-')
    return bytes(data)


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_is_a_500(api, path):
    plane, body = ROUTES[path]
    transport = httpx.HTTPTransport(uds=str(getattr(api, plane)), verify=False)
    counts = {200: 0, 400: 0}
    with httpx.Client(transport=transport, base_url="http://lorad", timeout=30) as http:
        right = http.post(path, json=body)
        assert right.status_code == 200, right.text
        for seed in range(CASES):
            data = mutated(seed, body)
            answer = http.post(path, content=data)
            counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404, 413), (seed, data, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code", "details"}, (seed, data)
                assert error["code"] in CODES[answer.status_code], (seed, data, error)
                assert len(error["message"]) < 1000, (seed, data)
                assert "\x1b" not in error["message"] + str(error["param"]), (seed, data)
    assert counts[200] and counts[400], "it reaches both sides of the parser"


TEI = {
    "/rerank": {"query": "a", "texts": ["a", "b"], "truncate": True, "return_text": True},
    "/embed": {"inputs": ["a", "b"], "truncate": True, "normalize": True, "dimensions": 4},
    "/similarity": {
        "inputs": {"source_sentence": "a", "sentences": ["a", "b"]},
        "parameters": {"truncate": True},
    },
}


@pytest.mark.parametrize(("path", "body"), TEI.items())
def test_no_body_is_a_500_in_teis_words(api, path, body):
    transport = httpx.HTTPTransport(uds=str(api.inference), verify=False)
    seen = set()
    with httpx.Client(transport=transport, base_url="http://lorad", timeout=30) as http:
        for seed in range(60):
            data = mutated(seed, body)
            answer = http.post(path, content=data)
            seen.add(answer.status_code)
            assert answer.status_code in (200, 404, 413, 422), (seed, data, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()) == {"error", "error_type"}, (seed, data)
                assert answer.json()["error"].isprintable(), (seed, data)
    assert {200, 413, 422} <= seen


CODES = {
    400: {"invalid_json", "invalid_value", "unsupported_parameter", "context_length_exceeded"},
    404: {"model_not_found"},
    413: {"payload_too_large"},
}
