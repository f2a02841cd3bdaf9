"""Plain completions as openai-python 3.x types them."""

import openai
import pytest


def test_an_answer_parses_and_defaults_to_sixteen_tokens(api, client):
    api.engine.reply = b"x" * 40
    answer = client.completions.create(model="bible", prompt="In the")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.system_fingerprint.endswith("-b2b2b2b2")
    assert bytes(api.engine.submits[0].prompt) == b"In the"


def test_a_stream_ends_with_finish_and_usage(api, client):
    stream = client.completions.create(
        model="tiny", prompt="p", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last, usage = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == "Hello world"
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "stop")
    assert usage.choices == []
    assert usage.usage.total_tokens == 13


def test_prompts_of_every_form_are_answered_in_order(api, client):
    api.engine.reply = lambda submit: bytes(submit.prompt)[::-1]
    for prompt in (["ab", "cd"], [[97, 98], [99, 100]]):
        answer = client.completions.create(model="tiny", prompt=prompt, n=2)
        assert [c.text for c in answer.choices] == ["ba", "ba", "dc", "dc"]
        assert answer.usage.prompt_tokens == 4
    assert client.completions.create(model="tiny", prompt=[97, 98]).choices[0].text == "ba"


def test_logprobs_are_parallel_lists(api, client):
    api.engine.reply = b"hey"
    answer = client.completions.create(model="tiny", prompt="p", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["h", "e", "y"]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"a": -0.5, "h": -0.25}


def test_echo_puts_the_prompt_and_its_logprobs_in_front(api, client):
    api.engine.reply = b"hey"
    answer = client.completions.create(model="tiny", prompt="ab", echo=True, logprobs=0)
    choice = answer.choices[0]
    assert choice.text == "abhey"
    assert choice.logprobs.tokens == ["a", "b", "h", "e", "y"]
    assert choice.logprobs.token_logprobs == [None, -0.25, -0.25, -0.25, -0.25]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert answer.usage.completion_tokens == 4


def test_echo_with_no_tokens_only_scores_the_prompt(api, client):
    answer = client.completions.create(
        model="tiny", prompt="abc", echo=True, logprobs=0, max_tokens=0
    )
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.usage.completion_tokens == 0


def test_echo_streams_too(api, client):
    chunks = list(client.completions.create(model="tiny", prompt="ab", echo=True, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "abHello world"


@pytest.mark.parametrize(
    ("extra", "code", "param"),
    [
        ({"suffix": "!"}, "unsupported_parameter", "suffix"),
        ({"best_of": 3}, "unsupported_parameter", "best_of"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"logprobs": 21}, "invalid_value", "logprobs"),
        ({"extra_body": {"alora_fallback": "x"}}, "invalid_value", "alora_fallback"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
        ({"prompt": [1, 99999]}, "invalid_value", "prompt"),
        ({"prompt": [[1], [99999]]}, "invalid_value", "prompt[1]"),
        ({"prompt": ["a", [1]]}, "invalid_value", "prompt"),
        ({"logit_bias": {"99999": 1}}, "invalid_value", "logit_bias"),
        ({"prompt": "x" * 512}, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * 500, "max_tokens": 20}, "context_length_exceeded", "max_tokens"),
    ],
)
def test_what_cannot_be_served_is_named(api, client, extra, code, param):
    asked = {"model": "tiny", "prompt": "p"} | extra
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**asked)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert not api.engine.submits
