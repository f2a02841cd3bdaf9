"""Chat completions as openai-python 3.x types them."""

import openai
import pytest

ASK = [{"role": "user", "content": "Say it."}]


def test_an_answer_parses_with_its_usage_and_the_revision_that_gave_it(api, client):
    api.engine.cached_tokens = 3
    raw = client.chat.completions.with_raw_response.create(model="acme/sql", messages=ASK)
    answer = raw.parse()
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "acme/sql"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    prompt = "<user>Say it.\n<assistant>"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len("Hello world") + 1  # and the end of turn
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.system_fingerprint == "lorad-0.1.0-ba5eba5e-a1a1a1a1"
    assert raw.headers["x-lorad-rev"] == "a1" * 32
    assert answer._request_id == raw.headers["x-request-id"]
    assert bytes(api.engine.submits[0].prompt).decode() == prompt
    assert api.engine.submits[0].rev == "a1" * 32


def test_the_base_model_answers_under_its_own_name(api, client):
    answer = client.chat.completions.create(model="tiny", messages=ASK)
    assert answer.system_fingerprint.endswith("-base")
    assert api.engine.submits[0].rev is None


def test_text_parts_are_joined_and_a_developer_is_a_system(api, client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}],
    )
    assert bytes(api.engine.submits[0].prompt) == b"<system>be brief\n<user>a\nb\n<assistant>"


def test_a_stream_begins_with_the_role_and_ends_with_finish_then_usage(api, client):
    stream = client.chat.completions.create(
        model="acme/sql", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {c.id for c in chunks} == {chunks[0].id}
    assert {c.created for c in chunks} == {chunks[0].created}
    assert {c.model for c in chunks} == {"acme/sql"}
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content for c in middle) == "Hello world"
    assert all(c.choices[0].finish_reason is None for c in (first, *middle))
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == 12
    assert all(c.usage is None for c in (first, *middle, last))


def test_a_stream_without_include_usage_has_no_usage(api, client):
    chunks = list(client.chat.completions.create(model="tiny", messages=ASK, stream=True))
    assert "usage" not in chunks[0].model_fields_set
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_sdks_own_stream_helper_puts_the_message_together(api, client):
    with client.chat.completions.stream(model="tiny", messages=ASK) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"


def test_several_answers_come_interleaved_and_differ_in_seed(api, client):
    api.engine.reply = lambda submit: f"seed {submit.sampling.seed}".encode()
    gate = api.hold_engine(3)
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, n=3, seed=7, temperature=1.5, stream=True
    )
    texts = ["", "", ""]
    order = []
    for chunk in stream:
        choice = chunk.choices[0]
        order.append(choice.index)
        api.run(gate.set)
        texts[choice.index] += choice.delta.content or ""
    assert texts == ["seed 7", "seed 8", "seed 9"]
    assert sorted(order) != order


def test_several_answers_in_one_body_count_the_prompt_once(api, client):
    answer = client.chat.completions.create(model="tiny", messages=ASK, n=2)
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens == len("<user>Say it.\n<assistant>")
    assert answer.usage.completion_tokens == 24


def test_logprobs_come_for_each_token_of_the_text(api, client):
    api.engine.reply = "é".encode()
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0xC3], [0xA9]]
    assert content[0].token == "�"
    assert content[0].logprob == -0.25
    assert [top.token for top in content[0].top_logprobs] == ["a", "b"]


def test_logprobs_are_in_the_chunks_of_a_stream(api, client):
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, logprobs=True, top_logprobs=0, stream=True
    )
    seen = [
        entry.token
        for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert "".join(seen) == "Hello world"


def test_a_stop_string_ends_the_text_the_count_and_the_sequence(api, client):
    api.engine.reply = b"one two three four"
    answer = client.chat.completions.create(model="tiny", messages=ASK, stop=[" three"])
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("one two three")
    assert api.engine.aborts == [api.engine.submits[0].request_id]


def test_max_tokens_ends_with_length(api, client):
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_completion_tokens=5)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_without_max_tokens_may_fill_what_is_left_up_to_the_limit(api, client):
    client.chat.completions.create(model="tiny", messages=ASK)
    assert api.engine.submits[0].sampling.max_tokens == 200
    long = [{"role": "user", "content": "x" * 400}]
    client.chat.completions.create(model="tiny", messages=long)
    left = 512 - len("<user>\n<assistant>") - 400
    assert api.engine.submits[1].sampling.max_tokens == left


def test_every_sampling_parameter_reaches_the_engine(api, client):
    client.chat.completions.create(
        model="tiny",
        messages=ASK,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"65": -100},
        seed=3,
        user="someone",
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [66],
            "allowed_token_ids": [65, 66],
            "speculation_tokens": 3,
            "priority": 40,
            "cache_salt": "s",
            "unheard_of": 1,
        },
    )
    submit = api.engine.submits[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert sampling.logit_bias == {65: -100.0}
    assert sampling.allowed_token_ids == (65, 66)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.05, 1.1)
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert (sampling.stop_token_ids, sampling.draft_tokens) == ((66,), 3)
    assert (submit.priority, submit.cache_salt) == (40, "s")
    assert 0 < submit.deadline_seconds <= 600


def test_guesses_longer_than_any_model_may_make_are_refused(api, client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"speculation_tokens": 9}
        )
    assert (caught.value.param, caught.value.code) == ("speculation_tokens", "invalid_value")
    client.chat.completions.create(model="tiny", messages=ASK)
    assert api.engine.submits[0].sampling.draft_tokens is None, "the engine's own"


def test_characters_are_never_split_between_chunks(api, client):
    text = "Grüße, 世界 🎉\u2028 end"
    api.engine.reply = text.encode()
    chunks = list(client.chat.completions.create(model="tiny", messages=ASK, stream=True))
    pieces = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
    ],
)
def test_a_parameter_that_is_not_served_is_refused_by_name(api, client, extra, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, **extra)
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == param
    assert not api.engine.submits


def test_spelled_out_defaults_of_such_parameters_pass(api, client):
    client.chat.completions.create(
        model="tiny",
        messages=ASK,
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        service_tier="auto",
        store=False,
    )
    assert len(api.engine.submits) == 1


def test_an_image_is_refused_where_it_stands(api, client):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": [image]}]
        )
    assert caught.value.param == "messages[0].content[0].type"
