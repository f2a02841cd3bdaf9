"""No prompt, no answer and no key reaches a log, an event or a dump, at any level, in any form."""

import json
import signal
import socket

import pytest

from lorad.client import ApiError
from lorad.wire_operations import PullStart

PROMPT = "Xylophon"  # its letters come in no other word of a log
KEY = "lorad_abcdefgh_" + "Zq9" * 14 + "Z"
TOKEN = "hf_" + "Qz7" * 12


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    daemon.configure('[log]\nlevel = "debug"\nformat = "json"\n')
    daemon.start()
    daemon.upload("bible", 1)
    return daemon


def raw(daemon, data):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(daemon.inference))
        sock.sendall(data)
        sock.recv(4096)


def say_it_in_every_way(daemon):
    """Requests that are served, refused, malformed, given up; each with the prompt and the key."""
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": KEY}
    messages = [{"role": "user", "content": PROMPT}]
    bodies = [
        ("/v1/completions", {"model": "bible", "prompt": PROMPT, "max_tokens": 2}),
        ("/v1/chat/completions", {"model": "bible", "messages": messages, "max_tokens": 2}),
        ("/v1/chat/completions", {"model": "bible", "messages": PROMPT}),
        ("/v1/completions", {"model": "bible", "prompt": PROMPT, "max_tokens": PROMPT}),
        ("/v1/completions", {"model": "bible", "prompt": PROMPT * 4000}),
        ("/v1/completions", {"model": "bible", "prompt": PROMPT, "stop": [PROMPT] * 99}),
        ("/v1/completions", {"model": "nobody", "prompt": PROMPT}),
        ("/tokenize", {"model": "bible", "prompt": PROMPT}),
        ("/nowhere", {"prompt": PROMPT}),
    ]
    with daemon.http() as http:
        for path, body in bodies:
            http.post(path, json=body, headers=headers)
            http.post(path, content=json.dumps(body)[:-1], headers=headers)
        http.get(f"/v1/models/{KEY}", headers=headers)
        with http.stream(
            "POST",
            "/v1/completions",
            json={**daemon.body("bible", 3000, stream=True), "prompt": PROMPT},
            headers=headers,
        ) as answer:
            next(answer.iter_lines())
            daemon.process.send_signal(signal.SIGUSR1)
    raw(daemon, f"POST /v1/completions HTTP/1.1\r\n{KEY}: {PROMPT} \x01\r\n\r\n".encode())
    raw(daemon, f"{PROMPT} {KEY}\r\n\r\n".encode())


def test_debug_logs_events_and_dumps_hold_no_prompt_and_no_key(daemon, poll):
    say_it_in_every_way(daemon)
    with daemon.client() as client:
        lines = client.recent_logs(limit=1000).items
        events = client.recent_events(limit=1000).items
    poll(lambda: "Current thread" in daemon.log.read_text(), "the dump")
    everywhere = daemon.log.read_text() + repr(lines) + repr(events)
    assert any(line.level == "info" for line in lines) and events
    for secret in (PROMPT, KEY, KEY[15:], TOKEN):
        assert secret not in everywhere, secret
    told = [json.loads(line) for line in daemon.log.read_text().splitlines() if line[:1] == "{"]
    assert any(line.get("event") == "adapter.added" for line in told)
    assert all({"time", "level", "logger", "message"} <= set(line) for line in told)


@pytest.mark.slow
def test_a_pull_tells_neither_its_token_nor_its_password(daemon):
    with daemon.client() as client:
        with pytest.raises(ApiError):
            client.plan_pull(PullStart(reference="http://127.0.0.1:9/x", name="x", token=TOKEN))
        begun = client.pull(
            PullStart(reference=f"http://user:{TOKEN}@127.0.0.1:9/x", name="x", token=TOKEN)
        )
        ended = client.operation(begun.id, wait=30)
        assert ended.state == "failed"
        everywhere = daemon.log.read_text() + repr(client.recent_events(limit=1000).items)
        everywhere += repr(client.operations().items)
    assert TOKEN not in everywhere
