"""Tools and calls as openai-python 3.x types them."""

import json
from dataclasses import replace

import openai
import pytest

from engine import grammar
from lorad.text.tokenizer import Tokenizer
from tests.fakes.api_server import TOOL_TEMPLATE, byte_text

ASK = [{"role": "user", "content": "Weather?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS = '{"city": "Köln"}'
HERMES = f'Wait.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'


def ask(client, **more):
    given = {"model": "bible", "messages": ASK, "tools": [TOOL]} | more
    return client.chat.completions.create(**given)


@pytest.mark.parametrize(("reply", "content"), [(HERMES, "Wait."), (LLAMA, None)])
def test_a_call_is_apart_from_the_text(api, client, reply, content):
    api.engine.reply = reply.encode()
    [choice] = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert call.id.startswith("call_")


def test_the_template_gets_the_tools(api, client):
    ask(client)
    prompt = bytes(api.engine.submits[0].prompt).decode()
    assert prompt == f"<tools>{json.dumps([TOOL])}\n<user>Weather?\n<assistant>"


def test_a_conversation_goes_on_with_the_result(api, client):
    api.engine.reply = LLAMA.encode()
    message = ask(client).choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    api.engine.reply = b"It is cold."
    answer = ask(client, messages=[*ASK, message, result])
    assert answer.choices[0].message.content == "It is cold."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    prompt = bytes(api.engine.submits[1].prompt).decode()
    called = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert f"<assistant>{called}\n<tool>12 degrees\n<assistant>" in prompt


@pytest.mark.parametrize(("reply", "content"), [(HERMES, "Wait."), (LLAMA, "")])
def test_a_call_comes_in_deltas(api, client, reply, content):
    api.engine.reply = reply.encode()
    chunks = list(ask(client, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == content
    [first, *rest] = [call for delta in deltas for call in delta.tool_calls or []]
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert first.id
    assert len(rest) > 3
    assert all(call.id is None and call.function.name is None for call in rest)
    assert "".join(call.function.arguments for call in (first, *rest)) == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_the_sdks_own_stream_helper_puts_the_call_together(api, client):
    api.engine.reply = HERMES.encode()
    with client.chat.completions.stream(model="bible", messages=ASK, tools=[TOOL]) as stream:
        [choice] = stream.get_final_completion().choices
    assert choice.message.content == "Wait."
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS


def test_several_answers_call_each_for_itself(api, client):
    replies = iter([LLAMA, "No."])
    api.engine.reply = lambda submit: next(replies).encode()
    answer = ask(client, n=2)
    assert [c.finish_reason for c in answer.choices] == ["tool_calls", "stop"]
    replies = iter([LLAMA, "No."])
    finishes = {}
    for chunk in ask(client, n=2, stream=True):
        finishes[chunk.choices[0].index] = chunk.choices[0].finish_reason
    assert finishes == {0: "tool_calls", 1: "stop"}


def test_one_call_alone_where_they_may_not_be_parallel(api, client):
    api.engine.reply = f"{HERMES}\n{HERMES.removeprefix('Wait.')}".encode()
    assert len(ask(client).choices[0].message.tool_calls) == 2
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    indexes = {
        call.index
        for chunk in ask(client, parallel_tool_calls=False, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    }
    assert indexes == {0}


def test_a_call_that_is_cut_off_ends_in_length(api, client):
    api.engine.reply = LLAMA.encode()
    [choice] = ask(client, max_tokens=len(LLAMA) - 6).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_no_log_probability_is_lost(api, client):
    api.engine.reply = HERMES.encode()
    seen = bytearray()
    for chunk in ask(client, logprobs=True, stream=True):
        if chunk.choices[0].logprobs:
            for entry in chunk.choices[0].logprobs.content:
                seen += bytes(entry.bytes)
    assert seen.decode() == HERMES


def test_what_looks_like_a_call_is_text_where_no_tools_are(api, client):
    api.engine.reply = HERMES.encode()
    for more in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        [choice] = ask(client, **more).choices
        assert (choice.message.content, choice.finish_reason) == (HERMES, "stop")
        assert b"<tools>" not in bytes(api.engine.submits[-1].prompt)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"model": "acme/sql"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_cannot_be_promised_is_refused(api, client, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)
    assert not api.engine.submits


def call_of(name, schema):
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": schema},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


WEATHER = call_of("get_weather", TOOL["function"]["parameters"])
OTHER = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("choice", "schema"),
    [
        (NAMED, WEATHER),
        ("required", {"anyOf": [WEATHER, call_of("f", {"type": "object"})]}),
    ],
)
def test_a_call_that_must_be_is_all_that_the_answer_can_be(api, client, choice, schema):
    pytest.importorskip("llguidance")
    api.engine.reply = f'{{"name":"get_weather","arguments":{ARGUMENTS}}}'.encode()
    [answer] = ask(client, tools=[TOOL, OTHER], tool_choice=choice).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert answer.message.tool_calls[0].function.arguments == ARGUMENTS
    sent = json.loads(api.engine.submits[0].sampling.grammar)
    assert sent == json.loads(grammar.json_schema(json.dumps(schema)))


def with_parameters(schema, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def test_what_a_tools_schema_refers_to_is_found(api, client):
    pytest.importorskip("llguidance")
    shelf = {"$defs": {"city": {"type": "string"}}}
    schema = {"type": "object", "properties": {"to": {"$ref": "#/$defs/city"}}}
    ask(client, tools=[with_parameters(schema | shelf)], tool_choice="required")
    sent = json.loads(api.engine.submits[0].sampling.grammar)
    assert sent == json.loads(grammar.json_schema(json.dumps(call_of("f", schema) | shelf)))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": "required", "tools": [with_parameters({"not": {}})]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [with_parameters({"$defs": 3})]}, "tools"),
        (
            {"tool_choice": "required", "tools": [with_parameters({"items": {"$ref": "#"}})]},
            "tools",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    with_parameters({"$defs": {"a": {"type": "string"}}}),
                    with_parameters({"$defs": {"a": {"type": "integer"}}}, "g"),
                ],
            },
            "tools",
        ),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(api, client, more, param):
    pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.param == param
    assert not api.engine.submits


def test_a_vocabulary_whose_tags_are_special_tokens_calls_too(api, client, monkeypatch):
    text = byte_text(TOOL_TEMPLATE)
    text.tokenizer._inner.add_special_tokens(["<tool_call>", "</tool_call>"])
    text = replace(text, tokenizer=Tokenizer(text.tokenizer._inner, specials={}))
    backends = api.requests._backends
    monkeypatch.setitem(backends, "tiny", replace(backends["tiny"], text=lambda rev: text))
    said = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'.encode()
    api.engine.reply = lambda submit: [*b"Wait.", 257, *said, 258]
    [choice] = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
    [choice] = ask(client, tools=openai.omit).choices
    assert choice.message.content == "Wait." + said.decode(), "special tokens are no text"
    [choice] = ask(client, tools=openai.omit, extra_body={"skip_special_tokens": False}).choices
    assert choice.message.content == f"Wait.<tool_call>{said.decode()}</tool_call>"
