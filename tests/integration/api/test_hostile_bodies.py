"""Whatever a body holds, the answer is its own or a 4xx in the envelope, never a 500."""

import json

import msgspec
import pytest

from lorad.errors import LoradError
from lorad.wire_openai import ChatRequest, CompletionRequest

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MESSAGE = {"role": "user", "content": "hi"}
ASK = {"model": "tiny", "messages": [MESSAGE]}
DEEP = b"[" * 100_000 + b"]" * 100_000

NOT_JSON = {
    "empty": b"",
    "half": b'{"model": "tiny"',
    "trailing": json.dumps(ASK).encode() + b"}",
    "nan": b'{"model":"tiny","messages":[],"temperature":NaN}',
    "infinity": b'{"model":"tiny","messages":[],"temperature":Infinity}',
    "deep array": DEEP[:60_000],
    "deep in an unknown key": b'{"model":"tiny","x":' + DEEP[70_000:130_000] + b"}",
    "deep object": b'{"a":' * 10_000,
    "invalid utf-8": b'{"model":"\xff\xfe","messages":[]}',
    "invalid utf-8 in an unknown key": b'{"model":"tiny","messages":[],"x":"\xff"}',
    "lone surrogate": b'{"model":"\\ud800","messages":[]}',
    "bom": b"\xef\xbb\xbf{}",
    "utf-16": json.dumps(ASK).encode("utf-16"),
}

WRONG = {
    "an array": ([], None),
    "a string": ("x", None),
    "no model": ({"messages": [MESSAGE]}, "model"),
    "no messages": ({"model": "tiny"}, "messages"),
    "empty messages": ({"model": "tiny", "messages": []}, "messages"),
    "empty model": (ASK | {"model": ""}, "model"),
    "wrong role": (ASK | {"messages": [MESSAGE, {"role": "x", "content": ""}]}, "messages[1].role"),
    "function role": (
        ASK | {"messages": [{"role": "function", "content": "x"}]},
        "messages[0].role",
    ),
    "content number": (ASK | {"messages": [MESSAGE | {"content": 1}]}, "messages[0].content"),
    "no content": (ASK | {"messages": [{"role": "user"}]}, "messages[0].content"),
    "n of a billion": (ASK | {"n": 10**9}, "n"),
    "n of zero": (ASK | {"n": 0}, "n"),
    "n beyond any integer": (ASK | {"n": 10**400}, "n"),
    "negative max_tokens": (ASK | {"max_tokens": -1}, "max_tokens"),
    "huge max_tokens": (ASK | {"max_tokens": 10**12}, "max_tokens"),
    "two budgets": (ASK | {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    "temperature": (ASK | {"temperature": 2.5}, "temperature"),
    "top_p": (ASK | {"top_p": -0.1}, "top_p"),
    "top_k": (ASK | {"top_k": -2}, "top_k"),
    "min_p": (ASK | {"min_p": 1.1}, "min_p"),
    "penalty": (ASK | {"presence_penalty": 3}, "presence_penalty"),
    "repetition": (ASK | {"repetition_penalty": 0}, "repetition_penalty"),
    "seed": (ASK | {"seed": 2**63}, "seed"),
    "top_logprobs alone": (ASK | {"top_logprobs": 2}, "top_logprobs"),
    "top_logprobs": (ASK | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "too many stops": (ASK | {"stop": ["a"] * 17}, "stop"),
    "empty stop": (ASK | {"stop": ["a", ""]}, "stop[1]"),
    "long stop": (ASK | {"stop": "a" * 5000}, "stop"),
    "bias key": (ASK | {"logit_bias": {"a": 1}}, "logit_bias"),
    "bias value": (ASK | {"logit_bias": {"1": 101}}, "logit_bias.1"),
    "bias outside": (ASK | {"logit_bias": {"-5": 1}}, "logit_bias"),
    "huge bias": (ASK | {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    "nothing allowed": (ASK | {"allowed_token_ids": []}, "allowed_token_ids"),
    "allowed beyond": (ASK | {"allowed_token_ids": [5, 99999]}, "allowed_token_ids"),
    "stop ids": (ASK | {"stop_token_ids": [99999]}, "stop_token_ids"),
    "options alone": (ASK | {"stream_options": {"include_usage": True}}, "stream_options"),
    "priority": (ASK | {"priority": 101}, "priority"),
    "template": (ASK | {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
}


@pytest.mark.parametrize("case", NOT_JSON)
def test_what_is_not_json_is_invalid_json(api, call, case):
    answer = call(api.inference, "POST", CHAT, NOT_JSON[case])
    assert (answer.status, answer.code) == (400, "invalid_json")


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_its_path(api, call, case):
    body, param = WRONG[case]
    answer = call(api.inference, "POST", CHAT, body)
    assert answer.status == 400
    assert answer.code in ("invalid_value", "unsupported_parameter")
    assert answer.json["error"]["param"] == param
    assert not api.engine.submits


VALUES = [None, True, -1, 0, 10**30, -0.5, 1e300, "", "x" * 300, [], [[]], [None], {}, {"a": {}}]


@pytest.mark.parametrize(
    ("route", "kind", "good"),
    [(CHAT, ChatRequest, ASK), (PLAIN, CompletionRequest, {"model": "tiny", "prompt": "p"})],
)
def test_no_value_of_any_parameter_is_a_500(api, call, route, kind, good):
    for field in msgspec.structs.fields(kind):
        for value in VALUES:
            answer = call(api.inference, "POST", route, good | {field.name: value})
            assert answer.status in (200, 400, 404), (field.name, value, answer.raw)
            if answer.status != 200:
                assert answer.json["error"]["code"], (field.name, value)


def test_unknown_keys_are_ignored_unless_strict(api, call, make_api):
    body = ASK | {"frobnicate": {"a": [1]}}
    assert call(api.inference, "POST", CHAT, body).status == 200
    strict = make_api(msgspec.structs.replace(api.limits, strict_params=True))
    answer = call(strict.inference, "POST", CHAT, body)
    assert (answer.code, answer.json["error"]["param"]) == ("unsupported_parameter", "frobnicate")


def test_the_admin_bodies_are_as_strict(api, call):
    for body in (b"[1]", b'{"names": [1]}', b'{"nmaes": []}', DEEP[:60_000], b'{"names":["\xff"]}'):
        answer = call(api.admin, "POST", "/admin/v1/load", body)
        assert answer.status == 400
    assert not api.adapters.calls


def test_what_an_error_quotes_drives_no_terminal(api, call):
    api.engine.not_ready = LoradError("invalid_value", "no such type: \x1b]0;title\x07\n  next é")
    answer = call(api.inference, "POST", CHAT, ASK)
    assert answer.json["error"]["message"] == "no such type: ?]0;title? next é"
