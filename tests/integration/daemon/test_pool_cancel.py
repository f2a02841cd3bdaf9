"""A client that goes away in the middle of a rerank of 1,000 documents frees what it had at once:
of an encoder, of a decoder that only scores, and of one that generates beside it."""

import json
import socket
import time

import pytest

from lorad import wire
from tests.fakes.tiny_bert import write_bert, write_bert_adapter
from tests.fakes.tiny_qwen3 import write_qwen3, write_qwen3_adapter
from tests.integration.daemon.conftest import until

pytestmark = pytest.mark.late

COUNT = 1000
DOCUMENTS = [f"document {n} " * 3 for n in range(COUNT)]
#: Tokens of a rerank at least: a byte each.
LEAST = sum(map(len, DOCUMENTS))
TASKS = {"cross": ["rerank"], "yesno": ["rerank"], "both": ["generate", "rerank"]}


@pytest.fixture(scope="module")
def daemon(make_daemon, tmp_path_factory):
    root, daemon = tmp_path_factory.mktemp("bases"), make_daemon()
    bases = {"cross": write_bert(root / "bert", labels=1)}
    bases["yesno"] = bases["both"] = write_qwen3(root / "qwen3")
    # Small steps: many of them are left whenever a client goes.
    entries = (
        f'[[models]]\nbase = "{bases[name]}"\nname = "{name}"\ndevice = "cpu"\nthreads = 1\n'
        f"tasks = {json.dumps(tasks)}\nmax_batch_tokens = 256\n"
        + ('cpu_pool = "8MiB"\n' if name == "both" else "")
        for name, tasks in TASKS.items()
    )
    daemon.config.write_text(
        "".join(entries) + '[lora]\nslots = 8\nram_cache = "16MiB"\nadapter_pool = "2MiB"\n'
    )
    daemon.start()
    for seed, name in enumerate(TASKS):
        write = write_bert_adapter if name == "cross" else write_qwen3_adapter
        folder = write(daemon.root / f".up-{name}", seed)
        with daemon.client() as client:
            client.upload(folder, wire.UploadStart(name=f"acme/{name}", model=name))
        daemon.wait_state(f"acme/{name}", "registered", "ram", "idle")
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


def status(daemon, name):
    with daemon.client() as client:
        return next(one for one in client.status().models if one.name == name)


def rerank(name, documents, query="which of them?"):
    return {"model": f"acme/{name}", "query": query, "documents": documents}


def begin(daemon, name, query):
    """The rerank, sent and not waited for.  Nothing of another query's is cached."""
    content = json.dumps(rerank(name, DOCUMENTS, query)).encode()
    head = f"POST /v1/rerank HTTP/1.1\r\nhost: l\r\ncontent-length: {len(content)}\r\n\r\n"
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(daemon.inference))
    client.sendall(head.encode() + content)
    return client


@pytest.mark.parametrize("name", TASKS)
def test_a_client_that_goes_away_frees_its_rows_at_once(daemon, name):
    before = status(daemon, name).prompt_tokens
    client = begin(daemon, name, "is it this one?")
    until(lambda: status(daemon, name).prompt_tokens - before > LEAST / 20, "it to be under way")
    client.close()
    gone = time.monotonic()
    until(lambda: not (s := status(daemon, name)).running and not s.waiting, "nobody to run")
    until(lambda: daemon.adapter(f"acme/{name}").state == "idle", "its adapter to be idle")
    assert time.monotonic() - gone < 5
    computed = status(daemon, name).prompt_tokens - before
    assert computed < LEAST / 2, "it was nearly through"
    time.sleep(0.3)
    assert status(daemon, name).prompt_tokens - before == computed, "its rows are computed yet"
    if name == "both":
        assert status(daemon, name).pool.kv_active == 0
    with daemon.http() as http:
        answer = http.post("/v1/rerank", json=rerank(name, DOCUMENTS[:3])).json()
    assert sorted(one["index"] for one in answer["results"]) == [0, 1, 2]


@pytest.mark.parametrize("name", TASKS)
def test_who_stays_has_the_same_scores_beside_those_who_leave(daemon, name):
    with daemon.http() as http:
        quiet = http.post("/v1/rerank", json=rerank(name, DOCUMENTS[:20])).json()["results"]
        before = status(daemon, name).prompt_tokens
        leaving = [begin(daemon, name, f"{n} or which?") for n in range(3)]
        until(lambda: status(daemon, name).prompt_tokens - before > 2000, "them to be under way")
        for client in leaving:
            client.close()
        beside = http.post("/v1/rerank", json=rerank(name, DOCUMENTS[:20])).json()["results"]
    wanted = {one["index"]: one["relevance_score"] for one in quiet}
    for one in beside:
        assert one["relevance_score"] == pytest.approx(wanted[one["index"]], abs=1e-5)
    until(lambda: not (s := status(daemon, name)).running and not s.waiting, "nobody to run")
