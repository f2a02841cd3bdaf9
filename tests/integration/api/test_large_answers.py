"""Answers with the probabilities of many tokens: written beside the event loop, and the same."""

import threading

import pytest

from lorad.api.shapes import ChatShape, CompletionShape

ASKS = {
    CompletionShape: (
        "/v1/completions",
        {"model": "tiny", "prompt": ["ab", "cde"], "echo": True, "logprobs": 2},
    ),
    ChatShape: (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    ),
}


@pytest.mark.parametrize("shape", ASKS, ids=lambda shape: shape.__name__)
def test_many_probabilities_are_written_where_nobody_waits_for_them(
    api, call, monkeypatch, shape
) -> None:
    path, ask = ASKS[shape]
    written, threads = shape.body, []

    def body(self, *told):
        threads.append(threading.current_thread().name)
        return written(self, *told)

    monkeypatch.setattr(shape, "body", body)
    few = call(api.inference, "POST", path, ask).json
    monkeypatch.setattr("lorad.api.generate.ON_LOOP", 16)
    many = call(api.inference, "POST", path, ask).json
    plain = {name: value for name, value in ask.items() if name not in ("logprobs", "echo")}
    call(api.inference, "POST", path, plain)
    assert many["choices"] == few["choices"]
    loop = threads[0]
    assert threads == [loop, threads[1], loop] and threads[1].startswith("lorad-text")
