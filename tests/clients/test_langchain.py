"""LangChain's ChatOpenAI and OpenAI through both doors: over the socket with a client of ours."""

import asyncio

import pytest

#: Warnings of other people's libraries are theirs.
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
openai = pytest.importorskip("openai")
langchain = pytest.importorskip("langchain_openai")
httpx2 = pytest.importorskip("httpx2")


def options(door):
    """How LangChain finds the way in."""
    way = {"base_url": f"{door.url}/v1", "api_key": door.key}
    if door.socket is not None:
        path = str(door.socket)
        blocking, waiting = httpx2.HTTPTransport(uds=path), httpx2.AsyncHTTPTransport(uds=path)
        way["http_client"] = openai.DefaultHttpx2Client(transport=blocking)
        way["http_async_client"] = openai.DefaultAsyncHttpx2Client(transport=waiting)
    return way


def test_the_tour(door, given, check_tour):
    way = options(door)

    def chat(model="acme/sql", **more):
        usual = {"max_tokens": 12, "temperature": 0, "stream_usage": True}
        return langchain.ChatOpenAI(model=model, **usual | more, **way)

    said = given.messages[0]["content"]
    answer = chat().invoke(said)
    seen = {"chat": answer.content}
    seen["rev"] = answer.response_metadata["system_fingerprint"].rpartition("-")[2]
    assert asyncio.run(chat().ainvoke(said)).content == answer.content
    whole = None
    for chunk in chat().stream(said):
        whole = chunk if whole is None else whole + chunk
    seen["streamed"] = whole.content
    seen["usage"] = [whole.usage_metadata[f"{way}_tokens"] for way in ("input", "output")]
    plain = langchain.OpenAI(model="acme/sql", max_tokens=12, temperature=0, **way)
    seen["plain"] = plain.invoke("Once")
    scored = chat(logprobs=True, top_logprobs=2).invoke(said).response_metadata["logprobs"]
    seen["logprobs"] = [len(scored["content"]), len(scored["content"][0]["top_logprobs"])]
    schema = given.format["json_schema"]["schema"] | {"title": "thing"}
    formed = chat(max_tokens=200).with_structured_output(schema, method="json_schema")
    seen["colour"] = formed.invoke(said)["colour"]
    tooled = chat("tooled", max_tokens=200).bind_tools([given.tool], tool_choice="required")
    [call] = tooled.invoke(said).tool_calls
    seen["called"], seen["argument"] = call["name"], call["args"]["colour"]
    with pytest.raises(openai.NotFoundError) as missing:
        chat("nobody").invoke(said)
    seen["missing"] = [missing.value.status_code, missing.value.code]
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(temperature=9).invoke(said)
    seen["wrong"] = [wrong.value.status_code, wrong.value.param]
    seen["models"] = [model.id for model in chat().root_client.models.list()]
    if door.socket is None:
        with pytest.raises(openai.AuthenticationError) as stranger:
            langchain.ChatOpenAI(model="tiny", **way | {"api_key": "wrong"}).invoke(said)
        seen["stranger"] = [stranger.value.status_code, stranger.value.code]
    check_tour(seen)


def test_a_call_and_its_result_are_sent_back_as_they_came(door, given):
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain.ChatOpenAI(model="tooled", max_tokens=200, temperature=0, **options(door))
    asked = [HumanMessage("Paint it.")]
    bound = model.bind_tools([given.tool], tool_choice="paint")
    called = bound.invoke(asked)
    [call] = called.tool_calls
    after = bound.invoke([*asked, called, ToolMessage("done", tool_call_id=call["id"])])
    assert [c["name"] for c in after.tool_calls] == ["paint"]
    assert after.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]


def test_retries_are_those_that_may_help_and_wait_as_told(steered_door, given, check_retries):
    model = langchain.ChatOpenAI(model="tiny", max_retries=1, **options(steered_door))

    def ask():
        try:
            model.invoke("x")
        except openai.APIStatusError as error:
            return error.code
        return None

    check_retries(ask)


def test_a_stream_that_is_left_is_aborted(steered, steered_door):
    steered.api.hold_engine(4)
    stream = langchain.ChatOpenAI(model="tiny", **options(steered_door)).stream("x")
    next(stream)
    stream.close()
    steered.api.until(lambda: steered.api.engine.aborts)
    assert len(steered.api.engine.aborts) == 1
