"""Answers in the form that was asked for, from a whole daemon: on base and adapter, streamed."""

import json

import openai as sdk
import pytest

pytest.importorskip("llguidance")

from lorad.client import openai

#: `tests/contract/test_formats.py` says the same of the routes, and
#: `tests/integration/engine/test_guides.py` of the engine.
pytestmark = pytest.mark.late

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
ASK = [{"role": "user", "content": "a thing"}]


@pytest.fixture(scope="module")
def daemon(make_daemon, make_adapter):
    daemon = make_daemon()
    daemon.inbox.mkdir(parents=True)
    daemon.drop("bible", 1)
    tooled = make_adapter(daemon.root / "tooled", 2)
    (tooled / "chat_template.jinja").write_text("{{ tools | tojson }}{{ messages[0].content }}")
    tooled.rename(daemon.inbox / "tooled")
    yield daemon.start()
    assert daemon.stop() == 0, daemon.tail()


@pytest.fixture(scope="module")
def client(daemon):
    made = openai(daemon.inference)
    yield made
    made.close()


def check(text: str) -> None:
    thing = json.loads(text)
    assert set(thing) == {"colour", "sizes"} and thing["colour"] in ("red", "green")
    assert len(thing["sizes"]) <= 2 and all(type(n) is int and n <= 9 for n in thing["sizes"])


@pytest.mark.parametrize("model", ["tiny", "bible"])
def test_whole_answers_and_streams_are_documents_of_the_schema(daemon, client, model):
    daemon.wait_state("bible", "registered", "idle", "active", "resident")
    asked = {"model": model, "messages": ASK, "response_format": FORMAT, "max_tokens": 300}
    answer = client.chat.completions.create(
        **asked, n=3, seed=5, logprobs=True, frequency_penalty=1.0
    )
    assert len({choice.message.content for choice in answer.choices}) > 1
    ended = [c for c in answer.choices if c.finish_reason == "stop"]
    assert ended
    for choice in ended:
        check(choice.message.content)
        assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    stream = client.chat.completions.create(**asked, seed=5, frequency_penalty=1.0, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    streamed = "".join(choice.delta.content or "" for choice in chunks)
    assert streamed == answer.choices[0].message.content


def test_a_choice_is_one_of_those_that_were_given_and_a_cut_document_says_length(client):
    answer = client.completions.create(
        model="tiny", prompt="pick", extra_body={"guided_choice": ["Grüße", "no"]}, max_tokens=20
    )
    assert answer.choices[0].text in ("Grüße", "no")
    assert answer.choices[0].finish_reason == "stop"
    cut = client.chat.completions.create(
        model="tiny", messages=ASK, response_format={"type": "json_object"}, max_tokens=2
    )
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content.startswith("{")


def test_a_schema_that_cannot_be_followed_is_refused_and_the_daemon_goes_on(client):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(sdk.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, response_format=bad)
    assert caught.value.param == "response_format.json_schema.schema"
    assert client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2).choices


def function(name, schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [function("paint", SCHEMA), function("wash", {"type": "object", "maxProperties": 0})]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
def test_a_call_that_must_be_is_one(daemon, client, choice):
    """Of random weights, which would never call anything."""
    daemon.wait_state("tooled", "registered", "idle", "active", "resident")
    asked = {"model": "tooled", "messages": ASK, "tools": TOOLS, "tool_choice": choice}
    answer = client.chat.completions.create(**asked, n=4, seed=3, max_tokens=300)
    ended = [c for c in answer.choices if c.finish_reason == "tool_calls"]
    assert ended
    for choice_ in ended:
        [call] = choice_.message.tool_calls
        assert choice_.message.content is None
        if call.function.name == "paint":
            check(call.function.arguments)
        else:
            assert (choice, json.loads(call.function.arguments)) == ("required", {})
    stream = client.chat.completions.create(**asked, seed=3, max_tokens=300, stream=True)
    parts = [
        part.function.arguments
        for chunk in stream
        for part in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(parts) == answer.choices[0].message.tool_calls[0].function.arguments
