"""Activated LoRAs through a daemon: registered, shown, restarted, and asked with and without."""

import pytest

#: `tests/parity/test_alora.py` says the same of the engine.
pytestmark = pytest.mark.late

CALL = [65, 66]
WORDS = list(range(100, 150))
MODELS = ("tiny", "judge", "critic", "plain")


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    daemon.inbox.mkdir(parents=True)
    config = {"alora_invocation_tokens": CALL}
    daemon.drop("judge", 1, config=config)
    daemon.drop("critic", 2, config=config)
    daemon.drop("plain", 1)
    daemon.start()
    for name in ("judge", "critic", "plain"):
        daemon.wait_state(name, "registered")
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


def ask(daemon, model, prompt, **more):
    answer = daemon.ask(model, prompt=prompt, **more)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["text"], cached


def test_its_prefix_is_shared_and_its_answer_its_own(daemon):
    prompt = [*WORDS, *CALL, 1, 2, 3]
    texts, cached = zip(*(ask(daemon, m, prompt) for m in MODELS), strict=True)
    assert cached == (0, 48, 48, 0)
    assert len(set(texts)) == 4
    assert ask(daemon, "judge", prompt)[0] == texts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_the_invocation_is_a_400_that_names_both(daemon, stream):
    answer = daemon.ask("judge", prompt=WORDS, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invocation_missing", "prompt")
    assert error["message"].startswith("judge: ") and str(CALL) in error["message"]


def test_told_to_the_base_answers_in_its_place(daemon):
    assert ask(daemon, "judge", WORDS, alora_fallback="base")[0] == ask(daemon, "tiny", WORDS)[0]


def test_it_is_shown_and_still_one_after_a_restart(daemon):
    def tokens():
        with daemon.client() as client:
            return [
                client.adapter(name).serving.alora_tokens for name in ("judge", "critic", "plain")
            ]

    before = tokens()
    assert before == [tuple(CALL), tuple(CALL), ()]
    daemon.stop()
    daemon.start()
    assert tokens() == before
    assert daemon.ask("judge", prompt=WORDS).status_code == 400
