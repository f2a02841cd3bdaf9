"""What a request brings that takes long to make ready: once, and beside the event loop."""

import threading

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
