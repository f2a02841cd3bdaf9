"""The bytes of a stream, as a client without an SDK sees them."""

import json
import selectors

from lorad.config_sections import Limits

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
CHAT = "/v1/chat/completions"


def test_every_event_is_one_line_of_whole_utf8(api, call):
    text = "a\u2028b\u0085c 世界\n🎉"
    api.engine.reply = text.encode()
    answer = call(api.inference, "POST", CHAT, ASK)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = answer.events
    assert done == b"data: [DONE]"
    said = ""
    for event in chunks:
        line = event.decode()  # strict: no half character
        assert line.startswith("data: ")
        assert len(line.splitlines()) == 1
        said += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    assert said == text


def test_half_a_character_at_the_end_is_shown_as_such(api, call):
    api.engine.reply = "é".encode()
    answer = call(api.inference, "POST", CHAT, ASK | {"max_tokens": 1})
    assert "�" in answer.body.decode()


def test_the_head_waits_for_the_first_token_so_that_a_failure_has_its_status(api, call):
    api.engine.reply, api.engine.error = b"", ("deadline_exceeded", "too late")
    answer = call(api.inference, "POST", CHAT, ASK)
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"


def test_a_wait_is_filled_with_comments(make_api, connect):
    api = make_api(Limits(), ping_seconds=0.02)
    gate = api.hold_engine()
    body = json.dumps(ASK).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: l\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    raw = connect(api.inference).send(head + body)
    got = b""
    while got.count(b": ping\n\n") < 3:
        got += raw.socket.recv(4096)
    api.run(gate.set)
    while b"[DONE]" not in got:
        got += raw.socket.recv(4096)
    assert got.startswith(b"HTTP/1.1 200 OK")


def test_an_error_after_a_comment_is_an_event(make_api, connect):
    api = make_api(Limits(), ping_seconds=0.02)
    gate = api.hold_engine()
    api.engine.reply, api.engine.error = b"x", ("no_room", "nothing can go")
    body = json.dumps(ASK | {"max_tokens": 1}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: l\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    raw = connect(api.inference).send(head + body)
    got = b""
    while b": ping\n\n" not in got:
        got += raw.socket.recv(4096)
    api.run(gate.set)
    while b"nothing can go" not in got:
        got += raw.socket.recv(4096)
    assert b"[DONE]" not in got


def test_a_stop_string_across_tokens_is_never_shown_in_part(api, call):
    api.engine.reply = "eins ⟂⟂ zwei".encode()
    answer = call(api.inference, "POST", CHAT, ASK | {"stop": "⟂⟂"})
    said = [json.loads(e[6:])["choices"][0] for e in answer.events[:-1]]
    assert "".join(c["delta"].get("content", "") for c in said) == "eins "
    assert said[-1]["finish_reason"] == "stop"


def test_tokens_of_one_step_beyond_a_stop_are_not_counted(api, call):
    api.engine.reply, api.engine.per_delta = b"abcSTOPdef", 10
    ask = ASK | {"stop": ["STOP"], "stream": False, "logprobs": True}
    answer = call(api.inference, "POST", CHAT, ask).json
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["usage"]["completion_tokens"] == 7
    assert len(answer["choices"][0]["logprobs"]["content"]) == 7


def asked(raw, body):
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: l\r\ncontent-length: {len(content)}\r\n\r\n"
    return raw.send(head.encode() + content)


def said(events):
    """The text of each answer, by index."""
    texts = {}
    for event in events:
        [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
        texts.setdefault(choice["index"], []).append(choice["delta"].get("content", ""))
    return {index: "".join(parts) for index, parts in texts.items()}


def read_all(raws):
    """Everything until each has had its last chunk."""
    got = dict.fromkeys(raws, b"")
    with selectors.DefaultSelector() as ready:
        for raw in raws:
            ready.register(raw.socket, selectors.EVENT_READ, raw)
        while ready.get_map():
            found = ready.select(30)
            assert found, "nobody said anything for long"
            for key, _ in found:
                got[key.data] += key.fileobj.recv(1 << 16)
                if got[key.data].endswith(b"\r\n0\r\n\r\n"):
                    ready.unregister(key.fileobj)
    return got


def test_many_streams_at_once_have_each_their_own_words(make_api, connect, parsed):
    api = make_api(Limits(max_tokens=1000))
    api.engine.reply = lambda submit: f"{submit.sampling.seed}: ".encode() * 50
    raws = [asked(connect(api.inference), ASK | {"seed": n, "max_tokens": 400}) for n in range(100)]
    for n, got in enumerate(read_all(raws).values()):
        *events, done = parsed(got).events
        assert done == b"data: [DONE]"
        assert said(events) == {0: f"{n}: " * 50}


def test_a_reader_who_was_away_gets_all_of_it_in_fewer_events(make_api, connect, call, parsed):
    api = make_api(Limits(max_tokens=1000, stall_write=20.0))
    text = "".join(f"{n} é " for n in range(70))
    api.engine.reply = text.encode()
    raw = asked(connect(api.inference), ASK | {"n": 16, "max_tokens": 480})
    api.until(lambda: len(api.engine.submits) == 16 and not api.engine.running)
    assert api.requests.active == 1  # nobody waits for it, but nothing of it is lost
    assert call(api.inference, "POST", CHAT, ASK | {"max_tokens": 3}).status == 200
    [got] = read_all([raw]).values()
    *events, done = parsed(got).events
    assert done == b"data: [DONE]"
    assert said(events) == dict.fromkeys(range(16), text)
    assert len(events) < 16 * len(text) / 2
    assert max(map(len, events)) < 1 << 16
    api.until(lambda: api.requests.active == 0)
