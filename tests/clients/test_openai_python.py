"""openai-python, as constraints.txt pins it, through both doors; versions 1 and 2 pass them too."""

import asyncio
import json

import pytest

from lorad.client import openai as over_socket

pytestmark = [pytest.mark.clients, pytest.mark.slow]
openai = pytest.importorskip("openai")


def knock(door, **options):
    if door.socket is not None:
        return over_socket(door.socket, **options)
    return openai.OpenAI(base_url=f"{door.url}/v1", api_key=door.key, **options)


def test_the_tour(door, given, check_tour):
    client = knock(door)
    asked = {"model": "acme/sql", "max_tokens": 12, "temperature": 0}
    chats = client.chat.completions
    seen = {"models": [model.id for model in client.models.list()]}
    chat = chats.create(**asked, messages=given.messages)
    seen["chat"] = chat.choices[0].message.content
    seen["rev"] = chat.system_fingerprint.rpartition("-")[2]
    seen["streamed"] = ""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in chats.create(**asked, messages=given.messages, **options):
        seen["streamed"] += "".join(c.delta.content or "" for c in chunk.choices)
        if chunk.usage:
            seen["usage"] = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]
    seen["plain"] = client.completions.create(**asked, prompt="Once").choices[0].text
    scored = chats.create(**asked, messages=given.messages, logprobs=True, top_logprobs=2)
    tokens = scored.choices[0].logprobs.content
    seen["logprobs"] = [len(tokens), len(tokens[0].top_logprobs)]
    asked["max_tokens"] = 200
    formed = chats.create(**asked, messages=given.messages, response_format=given.format)
    seen["colour"] = json.loads(formed.choices[0].message.content)["colour"]
    tooled = {"messages": given.messages, "tools": [given.tool], "tool_choice": "required"}
    with chats.stream(**asked | {"model": "tooled"}, **tooled) as stream:
        call = stream.get_final_completion().choices[0].message.tool_calls[0].function
    seen["called"], seen["argument"] = call.name, json.loads(call.arguments)["colour"]
    with pytest.raises(openai.NotFoundError) as missing:
        chats.create(**asked | {"model": "nobody"}, messages=given.messages)
    seen["missing"] = [missing.value.status_code, missing.value.code]
    with pytest.raises(openai.BadRequestError) as wrong:
        chats.create(**asked | {"temperature": 9}, messages=given.messages)
    seen["wrong"] = [wrong.value.status_code, wrong.value.param]
    if door.socket is None:
        with pytest.raises(openai.AuthenticationError) as stranger:
            client.with_options(api_key="wrong").models.list()
        seen["stranger"] = [stranger.value.status_code, stranger.value.code]
    client.close()
    check_tour(seen)


def test_retries_are_those_that_may_help_and_wait_as_told(steered_door, given, check_retries):
    client = knock(steered_door, max_retries=1)

    def ask():
        try:
            client.chat.completions.create(model="tiny", messages=given.messages)
        except openai.APIStatusError as error:
            return error.code
        return None

    check_retries(ask)
    client.close()


def test_a_stream_that_is_left_is_aborted(steered, steered_door, given):
    steered.api.hold_engine(4)
    client = knock(steered_door)
    stream = client.chat.completions.create(model="tiny", messages=given.messages, stream=True)
    next(iter(stream))
    stream.close()
    steered.api.until(lambda: steered.api.engine.aborts)
    assert len(steered.api.engine.aborts) == 1
    client.close()


def test_many_at_once_from_one_asynchronous_client(door, given, expected):
    if door.socket is not None:
        older = not hasattr(openai, "DefaultAsyncHttpx2Client")
        http = pytest.importorskip("httpx" if older else "httpx2")
        client = openai.DefaultAsyncHttpxClient if older else openai.DefaultAsyncHttpx2Client
        transport = http.AsyncHTTPTransport(uds=str(door.socket))
        options = {"http_client": client(transport=transport)}
    else:
        options = {}

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{door.url}/v1", api_key=door.key, **options
        ) as client:
            asked = {"model": "acme/sql", "max_tokens": 12, "temperature": 0}
            create = client.chat.completions.create
            return await asyncio.gather(
                *(create(**asked, messages=given.messages) for _ in range(8))
            )

    answers = asyncio.run(ask())
    assert {answer.choices[0].message.content for answer in answers} == {expected["chat"]}
