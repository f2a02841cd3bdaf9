"""Messages and tools become what chat templates read, or a 400 that says where."""

import json

import msgspec
import pytest

from lorad.api.conversation import messages, wanted_tools
from lorad.errors import LoradError
from lorad.wire_openai import ChatRequest

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"x": 1}}}


def request(*given, **more):
    body = {"model": "m", "messages": list(given)} | more
    return msgspec.json.decode(json.dumps(body), type=ChatRequest)


def read(*given):
    return list(messages(request(*given).messages))


def test_a_call_is_sent_back_with_its_arguments_as_an_object():
    [message] = read({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
        ],
    }


def test_a_call_without_arguments_has_none():
    call = CALL | {"function": {"name": "f", "arguments": ""}}
    [message] = read({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_result_names_its_call():
    [message] = read({"role": "tool", "content": "12", "tool_call_id": "c1", "name": "f"})
    assert message == {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "f"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "tool", "tool_call_id": "c1"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
    ],
)
def test_a_message_that_makes_no_sense_is_named(message, param):
    with pytest.raises(LoradError) as caught:
        read(message)
    assert caught.value.param == param


@pytest.mark.parametrize("arguments", ["[1]", "{", "null", "3", '{"a":' * 90_000, "{'a': 1}"])
def test_arguments_that_are_no_object_are_named(arguments):
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(LoradError) as caught:
        read({"role": "assistant", "tool_calls": [call]})
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_tools_are_what_templates_print():
    bare = {"type": "function", "function": {"name": "g", "strict": False}}
    assert wanted_tools(request(tools=[TOOL, bare])) == (
        TOOL,
        {"type": "function", "function": {"name": "g"}},
    )
    assert list(wanted_tools(request(tools=[TOOL]))[0]["function"]) == [
        "name",
        "description",
        "parameters",
    ]


@pytest.mark.parametrize("choice", [None, "auto"])
def test_tools_may_be_called(choice):
    assert len(wanted_tools(request(tools=[TOOL], tool_choice=choice))) == 1


def test_none_is_called_where_none_is_chosen():
    assert wanted_tools(request(tools=[TOOL], tool_choice="none")) == ()


def function(**fields):
    return [{"type": "function", "function": {"name": "f"} | fields}]


@pytest.mark.parametrize(
    ("tools", "code", "param"),
    [
        ([{"type": "web_search"}], "unsupported_parameter", "tools[0].type"),
        ([{"type": "function"}], "invalid_value", "tools[0].function"),
        (function(name=""), "invalid_value", "tools[0].function.name"),
        (function(name="x" * 65), "invalid_value", "tools[0].function.name"),
        (function(name="a b"), "invalid_value", "tools[0].function.name"),
        (function(strict=True), "unsupported_parameter", "tools[0].function.strict"),
        (function() * 2, "invalid_value", "tools"),
        (function() * 129, "invalid_value", "tools"),
    ],
)
def test_a_tool_that_is_none_is_named(tools, code, param):
    with pytest.raises(LoradError) as caught:
        wanted_tools(request(tools=tools))
    assert (caught.value.code, caught.value.param) == (code, param)
