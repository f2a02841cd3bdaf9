"""Two models in one daemon: a tiny Llama that generates, a tiny BERT that pools, adapters on each.

Each has an engine process of its own.  They are asked at the same moment, routed by the model's
name or an adapter's, and one may die without the other's streams noticing.
"""

import json
import os
import signal
import threading

import httpx
import numpy as np
import pytest

from lorad import wire
from lorad.client import ApiError, openai
from tests.fakes.tiny_bert import HIDDEN, write_bert, write_bert_adapter

pytestmark = pytest.mark.slow

LONG = 1500  # tokens: a stream that is there all the while
TEXTS = ["a", "some words", "some other words"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"), labels=1, pooling="mean")


@pytest.fixture(scope="module")
def daemon(make_daemon, bert):
    daemon = make_daemon()
    daemon.configure()
    second = (
        f'[[models]]\nbase = "{bert}"\nname = "vectors"\ndevice = "cpu"\nthreads = 1\n'
        'tasks = ["embed", "rerank", "classify"]\n\n[lora]\nadapter_pool = "2MiB"\n'
    )
    daemon.config.write_text(daemon.config.read_text().replace("[lora]\n", second))
    daemon.start()
    daemon.upload("writes", 1)
    with daemon.client() as client:
        folder = write_bert_adapter(daemon.root / ".up-bert", 1)
        client.upload(folder, wire.UploadStart(name="acme/embeds", load=True))
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


def embed(daemon, model, texts=TEXTS):
    with openai(daemon.inference) as client:
        return np.array(
            [item.embedding for item in client.embeddings.create(model=model, input=texts).data]
        )


def streamed(daemon, model, begun, pieces):
    """A long stream, to its end; `begun` is set at the first token."""
    with (
        daemon.http() as http,
        http.stream(
            "POST", "/v1/completions", json=daemon.body(model, LONG, stream=True)
        ) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                told = json.loads(line.removeprefix("data: "))
                pieces.append(told["choices"][0]["text"] if "choices" in told else told)
                begun.set()


def status(daemon):
    with daemon.client() as client:
        return client.status()


def of(daemon, name):
    return next(one for one in status(daemon).models if one.name == name)


def test_both_are_listed_each_with_its_adapters_and_its_purpose(daemon):
    with openai(daemon.inference) as client:
        cards = {card.id: card for card in client.models.list().data}
    assert set(cards) == {"tiny", "vectors", "writes", "acme/embeds"}
    assert cards["writes"].parent == "tiny" and cards["acme/embeds"].parent == "vectors"
    assert cards["tiny"].max_model_len != cards["vectors"].max_model_len
    assert cards["acme/embeds"].lorad["dimensions"] == HIDDEN
    assert cards["writes"].lorad.get("dimensions") is None


def test_an_adapter_is_bound_to_the_only_base_that_it_fits(daemon):
    assert daemon.adapter("writes").model == "tiny"
    assert daemon.adapter("acme/embeds").model == "vectors"
    assert {one.name: one.num_adapters for one in status(daemon).models} == {
        "tiny": 1,
        "vectors": 1,
    }


def test_what_an_operator_says_is_held_against_the_files(daemon):
    with pytest.raises(ApiError) as refused:
        daemon.upload("elsewhere", 2, model="vectors")
    assert refused.value.code == "adapter_invalid"
    with pytest.raises(ApiError, match="no model 'nobody' is served here"):
        daemon.upload("elsewhere", 2, model="nobody")
    assert daemon.adapter("elsewhere") is None


def test_an_inbox_folder_says_its_model_in_lorad_toml(daemon):
    daemon.drop("said", 3, model="tiny")
    assert daemon.wait_state("said", "registered", "ram").model == "tiny"
    daemon.drop("wrong", 4, model="vectors")
    row = daemon.wait_state("wrong", "quarantined")
    assert row.model == "vectors" and row.reason
    with daemon.client() as client:
        client.remove("said")
        client.remove("wrong")


def test_a_model_is_asked_only_for_what_it_does(daemon):
    assert daemon.ask("vectors").json()["error"]["code"] == "invalid_value"
    assert daemon.ask("acme/embeds").status_code == 400
    with daemon.http() as http:
        for model in ("tiny", "writes"):
            answer = http.post("/v1/embeddings", json={"model": model, "input": "a"})
            assert answer.json()["error"]["code"] == "unsupported_parameter"
        found = http.post("/rerank", json={"query": "a", "texts": ["a", "b"]})
        assert len(found.json()) == 2, "without a model, the one that ranks is meant"


def test_vectors_are_made_while_another_model_writes(daemon):
    alone = {name: daemon.text(name) for name in ("tiny", "writes")}
    vectors = {name: embed(daemon, name) for name in ("vectors", "acme/embeds")}
    assert np.abs(vectors["vectors"] - vectors["acme/embeds"]).max() > 1e-3
    begun, pieces = threading.Event(), []
    stream = threading.Thread(target=streamed, args=(daemon, "writes", begun, pieces))
    stream.start()
    try:
        assert begun.wait(60)
        for name, expected in vectors.items():
            assert np.abs(embed(daemon, name) - expected).max() < 1e-5
        assert stream.is_alive(), "the stream was over before the vectors came"
        assert of(daemon, "tiny").running == 1 and status(daemon).running == 1
    finally:
        stream.join(120)
    assert "".join(pieces).startswith(alone["writes"])


def test_one_engine_dies_and_the_others_stream_goes_on(daemon, poll):
    told, pid = embed(daemon, "acme/embeds"), of(daemon, "vectors").engine_pid
    other = of(daemon, "tiny").engine_pid
    begun, pieces = threading.Event(), []
    stream = threading.Thread(target=streamed, args=(daemon, "tiny", begun, pieces))
    stream.start()
    try:
        assert begun.wait(60)
        os.kill(pid, signal.SIGKILL)
        poll(lambda: of(daemon, "vectors").state != "ready", "the engine to be missed")
        with daemon.http() as http:
            whole, well = http.get("/readyz"), http.get("/readyz?model=tiny")
            assert (whole.status_code, well.status_code) == (503, 200)
            assert "vectors" in whole.json()["error"]["message"]
            assert http.get("/readyz?model=vectors").status_code == 503
            assert http.get("/readyz?model=nobody").status_code == 404
            listed = {card["id"] for card in http.get("/v1/models").json()["data"]}
            assert listed == {"tiny", "writes"}
            refused = http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
            assert refused.json()["error"]["code"] == "engine_restarting"
        assert daemon.ask("writes").status_code == 200
        poll(lambda: of(daemon, "vectors").state == "ready", "the engine to be back")
    finally:
        stream.join(120)
    assert not any(isinstance(piece, dict) for piece in pieces), "the stream ended with an error"
    assert of(daemon, "tiny").engine_pid == other and of(daemon, "vectors").engine_pid != pid
    assert of(daemon, "vectors").engine_restarts == 1 and of(daemon, "tiny").engine_restarts == 0
    assert daemon.wait_state("acme/embeds", "idle", "active"), "what was resident is so again"
    assert np.abs(embed(daemon, "acme/embeds") - told).max() < 1e-5


def test_metrics_say_of_which_model_they_are(daemon):
    for model in ("tiny", "writes"):
        daemon.text(model)
    for model in ("vectors", "acme/embeds"):
        embed(daemon, model)
    restarts = {one.name: float(one.engine_restarts) for one in status(daemon).models}
    with daemon.client() as client:
        lines = client.metrics().splitlines()
    found = [line for line in lines if line.startswith("lorad_slots_used{")]
    assert sorted(found) == [
        'lorad_slots_used{model="tiny"} 1.0',
        'lorad_slots_used{model="vectors"} 1.0',
    ]
    for model, number in restarts.items():
        assert f'lorad_engine_restarts_total{{model="{model}"}} {number}' in lines
    made = 'lorad_generation_tokens_total{adapter="writes",model="tiny"}'
    assert any(line.startswith(made) for line in lines)
    prompts = [line for line in lines if line.startswith("lorad_prompt_tokens_total{")]
    bases = [line for line in prompts if 'adapter="__base__"' in line]
    assert len(bases) == 2 and all(float(line.split()[-1]) > 0 for line in bases)
    assert sum(line.startswith("vllm:lora_requests_info{") for line in lines) == 1


def test_the_board_says_whose_each_row_is(daemon):
    with daemon.client() as client:
        board = client.board()
    assert {name: row.model for name, row in board.slots.items()} == {
        "writes": "tiny",
        "acme/embeds": "vectors",
    }
    assert [one.name for one in board.status.models] == ["tiny", "vectors"]
    assert board.status.slots_total == sum(one.slots_total for one in board.status.models)
    names = {check.name for check in board.health.checks}
    assert {"engine tiny", "engine vectors"} <= names


def test_pins_loads_and_removal_reach_the_right_engine(daemon):
    with daemon.client() as client:
        done = client.evict("writes", "acme/embeds", to="disk")
        assert [item.ok for item in done.items] == [True, True]
        assert client.slots().slots_used == 0
        client.pin("writes", "acme/embeds")
        assert {a.name for a in client.slots().items} == {"writes", "acme/embeds"}
        assert {a.name for a in client.adapters(model="vectors").items} == {"acme/embeds"}
        assert client.explain("acme/embeds").served
        client.unpin("writes", "acme/embeds")
        client.remove("acme/embeds")
        folder = write_bert_adapter(daemon.root / ".up-waits", 2)
        client.upload(folder, wire.UploadStart(name="acme/waits"))
    with pytest.raises(httpx.HTTPStatusError), daemon.http() as http:
        http.post("/v1/embeddings", json={"model": "acme/embeds", "input": "a"}).raise_for_status()


def test_an_engine_that_is_given_up_stays_down_and_the_rest_serves_on(daemon, poll):
    def crashed():
        one = of(daemon, "vectors")
        if one.state == "ready" and one.engine_pid is not None:
            os.kill(one.engine_pid, signal.SIGKILL)
            poll(lambda: of(daemon, "vectors").engine_pid != one.engine_pid, "its death")
        return one.state == "stopped"

    poll(crashed, "the fifth crash")
    assert "crashed 5 times" in of(daemon, "vectors").reason
    with daemon.http() as http:
        refused = http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
        assert refused.status_code == 503 and "is gone" in refused.json()["error"]["message"]
        assert http.get("/readyz").status_code == 503
        assert http.get("/readyz?model=tiny").status_code == 200
    assert daemon.ask("writes").status_code == 200
    assert any(event.cause == "gave_up" for event in daemon.events())


def test_adapters_of_a_model_that_left_the_configuration_wait_for_it(daemon):
    assert daemon.stop() == 0, daemon.tail()
    whole = daemon.config.read_text()
    first, _, rest = whole.partition("[[models]]\n")[2].partition("[[models]]\n")
    renamed = rest.replace('name = "vectors"', 'name = "others"')
    daemon.config.write_text(f"[[models]]\n{first}[[models]]\n{renamed}")
    with daemon.client() as client:
        daemon.start()
        told = [e.message for e in daemon.events() if e.type == "config.warning"]
        assert any("1 adapters are of 'vectors'" in message for message in told)
        assert daemon.ask("acme/waits").status_code == 404
        assert "not served here" in client.explain("acme/waits").why
        assert daemon.ask("writes").status_code == 200
    assert daemon.stop() == 0
    daemon.config.write_text(whole)
    daemon.start()
    assert embed(daemon, "acme/waits").shape == (len(TEXTS), HIDDEN)
