"""Streams byte by byte: the exact lines that clients of the OpenAI API have learnt to read."""

import json
import re

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
PROMPT = {"model": "tiny", "prompt": "hi", "stream": True}


def lines(answer):
    """The events, with what differs from run to run replaced by what it is."""
    body = answer.body
    body = re.sub(rb'"id":"(chatcmpl|cmpl)-[0-9a-f]{24}"', rb'"id":"\1-ID"', body)
    body = re.sub(rb'"created":[0-9]{10}', b'"created":NOW', body)
    assert body.endswith(b"\n\n")
    return body.decode().split("\n\n")[:-1]


def chat(choices, usage=""):
    return (
        'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":NOW,"model":"tiny",'
        f'"choices":{choices},"system_fingerprint":"lorad-0.1.0-ba5eba5e-base"{usage}}}'
    )


def plain(choices, usage=""):
    return (
        'data: {"id":"cmpl-ID","object":"text_completion","created":NOW,"model":"tiny",'
        f'"choices":{choices},"system_fingerprint":"lorad-0.1.0-ba5eba5e-base"{usage}}}'
    )


def delta(content, index=0, logprobs="null"):
    return f'[{{"index":{index},"delta":{content},"logprobs":{logprobs},"finish_reason":null}}]'


def ended(reason, index=0):
    return f'[{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"}}]'


HELLO = '{"role":"assistant","content":""}'


def test_a_chat_is_role_then_content_then_finish_then_done(api, call):
    api.engine.reply, api.engine.per_delta = b"Hi!", 8
    assert lines(call(api.inference, "POST", CHAT, ASK)) == [
        chat(delta(HELLO)),
        chat(delta('{"content":"Hi!"}')),
        chat(ended("stop")),
        "data: [DONE]",
    ]


def test_usage_is_null_in_every_chunk_but_the_last_when_it_is_asked_for(api, call):
    api.engine.reply, api.engine.per_delta, api.engine.cached_tokens = b"Hi", 2, 4
    ask = ASK | {"stream_options": {"include_usage": True}, "max_tokens": 2}
    none = ',"usage":null'
    used = (
        ',"usage":{"prompt_tokens":20,"completion_tokens":2,"total_tokens":22,'
        '"prompt_tokens_details":{"cached_tokens":4}}'
    )
    assert lines(call(api.inference, "POST", CHAT, ask)) == [
        chat(delta(HELLO), none),
        chat(delta('{"content":"Hi"}'), none),
        chat(ended("length"), none),
        chat("[]", used),
        "data: [DONE]",
    ]


def test_what_json_and_line_splitters_mind_is_escaped(api, call):
    api.engine.reply, api.engine.per_delta = 'a"\\\n\t\x00\u2028\u0085é🎉'.encode(), 99
    spelled = r"a\"\\\n\t\u0000\u2028\u0085é🎉"
    assert lines(call(api.inference, "POST", CHAT, ASK)) == [
        chat(delta(HELLO)),
        chat(delta(f'{{"content":"{spelled}"}}')),
        chat(ended("stop")),
        "data: [DONE]",
    ]


def test_logprobs_stand_beside_their_text(api, call):
    api.engine.reply = b"H"
    ask = ASK | {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    scored = (
        '{"content":[{"token":"H","logprob":-0.25,"bytes":[72],'
        '"top_logprobs":[{"token":"a","logprob":-0.5,"bytes":[97]}]}],"refusal":null}'
    )
    assert lines(call(api.inference, "POST", CHAT, ask)) == [
        chat(delta(HELLO)),
        chat(delta('{"content":"H"}', logprobs=scored)),
        chat(ended("length")),
        "data: [DONE]",
    ]


def test_each_of_several_answers_has_its_own_role_and_finish(api, call):
    api.engine.reply = b"x"
    told = lines(call(api.inference, "POST", CHAT, ASK | {"n": 2, "max_tokens": 1}))
    assert told[-1] == "data: [DONE]"
    for index in (0, 1):
        assert [line for line in told if f'"index":{index}' in line] == [
            chat(delta(HELLO, index)),
            chat(delta('{"content":"x"}', index)),
            chat(ended("length", index)),
        ]


def test_a_plain_completion_has_text_and_then_a_finish(api, call):
    api.engine.reply, api.engine.per_delta = b"ok", 2
    ask = PROMPT | {"max_tokens": 2, "stream_options": {"include_usage": True}}
    none = ',"usage":null'
    used = (
        ',"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,'
        '"prompt_tokens_details":{"cached_tokens":0}}'
    )

    def choice(text, reason="null"):
        return f'[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{reason}}}]'

    assert lines(call(api.inference, "POST", PLAIN, ask)) == [
        plain(choice("ok"), none),
        plain(choice("", '"length"'), none),
        plain("[]", used),
        "data: [DONE]",
    ]


def test_an_echo_comes_first_with_the_scores_of_its_tokens(api, call):
    api.engine.reply = b"!"
    ask = PROMPT | {"max_tokens": 1, "echo": True, "logprobs": 1}
    told = lines(call(api.inference, "POST", PLAIN, ask))
    scores = (
        '{"tokens":["h","i","!"],"token_logprobs":[null,-0.25,-0.25],'
        '"top_logprobs":[null,{"a":-0.5,"i":-0.25},{"a":-0.5,"!":-0.25}],"text_offset":[0,1,2]}'
    )
    assert told[0] == plain(
        f'[{{"index":0,"text":"hi!","logprobs":{scores},"finish_reason":null}}]'
    )


def test_the_head_says_what_follows(api, call):
    answer = call(api.inference, "POST", CHAT, ASK | {"model": "acme/sql"})
    assert answer.raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["x-lorad-rev"] == "a1" * 32
    assert answer.headers["x-request-id"].startswith("req_")


def test_an_http_1_0_client_gets_the_events_without_chunks(api, connect):
    api.engine.reply, api.engine.per_delta = b"Hi", 4
    body = json.dumps(ASK).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nhost: l\r\ncontent-length: {len(body)}\r\n\r\n"
    answer = connect(api.inference).send(head.encode() + body).answer()
    assert "transfer-encoding" not in answer.headers
    assert [line[:6] for line in lines(answer)] == ["data: "] * 4
    assert answer.body.endswith(b"data: [DONE]\n\n")
