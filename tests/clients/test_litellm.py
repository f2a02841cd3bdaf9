"""LiteLLM as a library, through both doors: over the socket with an openai client of ours."""

import asyncio
import json

import pytest

from lorad.client import openai as over_socket

#: Warnings of other people's libraries are theirs.
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches one when imported
        litellm = pytest.importorskip("litellm")
    litellm.suppress_debug_info = True
    yield litellm
    litellm.in_memory_llm_clients_cache.flush_cache()


def options(door, retries=0):
    """Its own number of retries comes before the client's."""
    if door.socket is not None:
        return {"client": over_socket(door.socket), "max_retries": retries}
    return {"api_base": f"{door.url}/v1", "api_key": door.key, "max_retries": retries}


def told(error):
    """lorad's own words: LiteLLM keeps the status, and the rest in the failure behind its own."""
    while error is not None:
        if type(error).__module__.startswith("openai") or getattr(error, "body", None):
            return error.body
        error = error.__cause__ or error.__context__
    return {}


def test_the_tour(door, given, litellm, check_tour, expected):
    way = options(door)

    def chat(model="acme/sql", **more):
        usual = {"messages": given.messages, "max_tokens": 12, "temperature": 0}
        return litellm.completion(model=f"openai/{model}", **usual | more, **way)

    answer = chat()
    seen = {"chat": answer.choices[0].message.content}
    seen["rev"] = answer.system_fingerprint.rpartition("-")[2]
    seen["streamed"] = ""
    for chunk in chat(stream=True, stream_options={"include_usage": True}):
        seen["streamed"] += "".join(c.delta.content or "" for c in chunk.choices)
        if getattr(chunk, "usage", None):
            seen["usage"] = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]
    scored = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    seen["logprobs"] = [len(scored), len(scored[0].top_logprobs)]
    formed = chat(max_tokens=200, response_format=given.format)
    seen["colour"] = json.loads(formed.choices[0].message.content)["colour"]
    tooled = chat("tooled", max_tokens=200, tools=[given.tool], tool_choice="required")
    call = tooled.choices[0].message.tool_calls[0].function
    seen["called"], seen["argument"] = call.name, json.loads(call.arguments)["colour"]
    with pytest.raises(litellm.NotFoundError) as missing:
        chat("nobody")
    seen["missing"] = [missing.value.status_code, told(missing.value)["code"]]
    with pytest.raises(litellm.BadRequestError) as wrong:
        chat(temperature=9)
    seen["wrong"] = [wrong.value.status_code, told(wrong.value)["param"]]
    seen["models"] = expected["models"]  # it lists no models
    seen["plain"] = expected["plain"]
    if door.socket is None:
        plain = litellm.text_completion(
            model="text-completion-openai/acme/sql",
            prompt="Once",
            max_tokens=12,
            temperature=0,
            **way,
        )
        seen["plain"] = plain.choices[0].text
        with pytest.raises(litellm.AuthenticationError) as stranger:
            litellm.completion(
                model="openai/tiny", messages=given.messages, **way | {"api_key": "wrong"}
            )
        seen["stranger"] = [stranger.value.status_code, told(stranger.value)["code"]]
    check_tour(seen)


def test_it_takes_lorad_for_a_vllm_too(daemon, free_ports, given, litellm, expected):
    answer = litellm.completion(
        model="hosted_vllm/acme/sql",
        messages=given.messages,
        max_tokens=12,
        temperature=0,
        api_base=f"http://127.0.0.1:{free_ports[0]}/v1",
        api_key="client-" * 6,
    )
    assert answer.choices[0].message.content == expected["chat"]


def test_retries_are_those_that_may_help_and_wait_as_told(
    steered_door, given, litellm, check_retries
):
    way = options(steered_door, retries=1)

    def ask():
        try:
            litellm.completion(model="openai/tiny", messages=given.messages, **way)
        except openai.APIError as error:
            return told(error)["code"]
        return None

    check_retries(ask)


def test_a_stream_that_is_left_is_aborted(steered, given, litellm):
    steered.api.hold_engine(4)
    door = steered.doors["tcp"]

    async def leave():
        stream = await litellm.acompletion(
            model="openai/tiny", messages=given.messages, stream=True, **options(door)
        )
        await anext(aiter(stream))
        await stream.aclose()

    asyncio.run(leave())
    steered.api.until(lambda: steered.api.engine.aborts)
    assert len(steered.api.engine.aborts) == 1
