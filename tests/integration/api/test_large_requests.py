"""What a request brings that takes long to make ready: once, and beside the event loop."""

import json
import threading

import pytest

from lorad.api import asked, parse
from lorad.config_sections import Limits
from lorad.text import detok
from lorad.text.tokenizer import Tokenizer


def noting(monkeypatch, owner, name: str) -> list[str]:
    """Names of the threads in which it is called from now on."""
    inner, threads = getattr(owner, name), []

    def noted(*given, **named):
        threads.append(threading.current_thread().name)
        return inner(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    return threads


def test_stop_strings_are_made_ready_once_for_all_answers_where_nobody_waits_for_them(
    api, call, monkeypatch
) -> None:
    threads = noting(monkeypatch, detok, "_borders")
    ask = {"model": "tiny", "prompt": ["a", "b", "c"], "n": 4, "stop": ["xyz", "aab"]}
    answer = call(api.inference, "POST", "/v1/completions", ask).json
    assert len(answer["choices"]) == 12
    assert len(threads) == 2 and all(name.startswith("lorad-text") for name in threads)


def test_ids_that_are_echoed_become_text_once_a_prompt_where_nobody_waits_for_them(
    api, call, monkeypatch
) -> None:
    prompts = [[65, 66, 67], [68, 69]]
    ask = {"model": "tiny", "prompt": prompts, "n": 4, "echo": True, "max_tokens": 0}
    threads = noting(monkeypatch, Tokenizer, "decode")
    answer = call(api.inference, "POST", "/v1/completions", ask).json
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == texts[3] and texts[4] == texts[7] and len(set(texts)) == 2
    assert len(threads) == 2 and all(name.startswith("lorad-text") for name in threads)


@pytest.mark.parametrize(
    ("path", "reader", "body"),
    [
        ("/v1/completions", parse, {"prompt": [65] * 500}),
        ("/v1/chat/completions", parse, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", asked, {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_a_large_body_is_read_where_nobody_waits_for_it_and_means_the_same(
    api, call, monkeypatch, path, reader, body
) -> None:
    threads = noting(monkeypatch, reader, "decode")
    ask = {"model": "tiny", "max_tokens": 4, "temperature": 0, **body}
    few = call(api.inference, "POST", path, ask)
    monkeypatch.setattr(asked, "BESIDE", 16)
    many = call(api.inference, "POST", path, ask)
    assert many.status == few.status == 200
    assert many.json.get("choices") == few.json.get("choices")
    assert many.json.get("tokens") == few.json.get("tokens")
    assert not threads[0].startswith("lorad-text") and threads[1].startswith("lorad-text")
    wrong = call(api.inference, "POST", path, {**ask, "model": 5})
    assert wrong.status == 400 and wrong.json["error"]["param"] == "model"


def test_ids_that_may_be_drawn_go_to_the_engine_once_each() -> None:
    body = {"model": "m", "prompt": "a", "allowed_token_ids": [7, 5, 7, 5] * 9}
    ask, _ = parse.completion(json.dumps(body).encode(), Limits())
    assert ask.sampling.allowed_token_ids == (7, 5)
