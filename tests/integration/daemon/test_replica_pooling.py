"""A model that pools on two engines, beside one that generates on one.

Inputs find their adapter, and a killed engine loses none of them.
"""

import os
import signal
import threading

import numpy as np
import pytest

from lorad import wire
from lorad.client import ApiError, openai
from tests.fakes.tiny_bert import write_bert, write_bert_adapter

pytestmark = pytest.mark.slow

TEXTS = ["a", "some words", "some other words"]


@pytest.fixture(scope="module")
def daemon(make_daemon, tmp_path_factory):
    daemon = make_daemon()
    bert = write_bert(tmp_path_factory.mktemp("bert"), labels=1, pooling="mean")
    second = (
        f'[[models]]\nbase = "{bert}"\nname = "vectors"\ndevice = "cpu"\nthreads = 1\n'
        'tasks = ["embed"]\nreplicas = 2\n\n[lora]\nadapter_pool = "2MiB"\n'
    )
    daemon.config.write_text(daemon.config.read_text().replace("[lora]\n", second))
    daemon.start()
    daemon.wait_engines()
    daemon.upload("writes", 1, load=True)
    with daemon.client() as client:
        folder = write_bert_adapter(daemon.root / ".up-bert", 1)
        client.upload(folder, wire.UploadStart(name="embeds", load=True))
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


def embed(daemon, model):
    with openai(daemon.inference) as client:
        told = client.embeddings.create(model=model, input=TEXTS)
        return np.array([item.embedding for item in told.data])


def engines(daemon):
    with daemon.client() as client:
        return {model.name: model for model in client.status().models}


def test_only_the_model_that_has_replicas_says_so(daemon):
    assert [one.name for one in engines(daemon)["vectors"].replicas] == ["0", "1"]
    assert engines(daemon)["tiny"].replicas == ()
    assert daemon.adapter("writes").replicas == ()
    assert len(daemon.adapter("embeds").replicas) == 1
    with daemon.client() as client:
        lines = client.metrics().splitlines()
    states = [line for line in lines if line.startswith("lorad_slots_used{")]
    assert [line.partition(" ")[0] for line in states] == [
        'lorad_slots_used{model="tiny",replica=""}',
        'lorad_slots_used{model="vectors",replica="0"}',
        'lorad_slots_used{model="vectors",replica="1"}',
    ]


def test_inputs_go_on_when_their_engine_is_killed(daemon, poll):
    said = {name: embed(daemon, name) for name in ("vectors", "embeds")}
    (home,) = daemon.adapter("embeds").replicas
    over, wrong, asked = threading.Event(), [], []

    def ask(name):
        while not over.is_set():
            try:
                if not np.allclose(embed(daemon, name), said[name], atol=1e-5):
                    wrong.append("other vectors")
            except ApiError as error:
                wrong.append(error.message)
            asked.append(name)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("vectors", "embeds") * 2]
    for thread in threads:
        thread.start()
    poll(lambda: len(asked) > 10, "some answers")
    engine = next(one for one in engines(daemon)["vectors"].replicas if one.name == home)
    os.kill(engine.engine_pid, signal.SIGKILL)
    so_far = len(asked)
    poll(lambda: len(asked) > so_far + 20, "answers of the other engine")
    poll(lambda: daemon.adapter("embeds").replicas[:1] != (), "it to be up")
    poll(
        lambda: all(one.state == "ready" for one in engines(daemon)["vectors"].replicas),
        "the engine to be there again",
    )
    over.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    poll(lambda: home in daemon.adapter("embeds").replicas, "it to be where it was")
    assert engines(daemon)["vectors"].engine_restarts == 1


def test_inputs_of_an_engine_that_hangs_are_answered_by_the_other(daemon, poll):
    daemon.wait_engines()
    said, restarts = embed(daemon, "embeds"), engines(daemon)["vectors"].engine_restarts
    (home, *_) = daemon.adapter("embeds").replicas
    engine = next(one for one in engines(daemon)["vectors"].replicas if one.name == home)
    os.kill(engine.engine_pid, signal.SIGSTOP)
    try:
        assert np.allclose(embed(daemon, "embeds"), said, atol=1e-5)
        assert engines(daemon)["vectors"].engine_restarts == restarts  # it was not waited for
    finally:
        os.kill(engine.engine_pid, signal.SIGCONT)
    daemon.wait_engines()
    assert np.allclose(embed(daemon, "embeds"), said, atol=1e-5)
