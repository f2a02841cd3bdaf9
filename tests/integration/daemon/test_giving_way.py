"""A model that pools beside one that generates gives way while a stream runs, and no longer."""

import pytest

from tests.fakes.tiny_bert import write_bert

pytestmark = pytest.mark.late

LONG = 3000  # tokens: it is cut off


@pytest.fixture
def daemon(make_daemon, tmp_path):
    daemon = make_daemon()
    daemon.configure()
    second = (
        f'[[models]]\nbase = "{write_bert(tmp_path / "bert")}"\nname = "vectors"\ndevice = "cpu"\n'
        "threads = 1\nbeside_generators = 0.25\n\n[lora]\n"
    )
    daemon.config.write_text(daemon.config.read_text().replace("[lora]\n", second))
    daemon.start()
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


def test_the_engine_that_pools_keeps_to_its_share_while_somebody_streams(daemon, poll):
    def shares():
        with daemon.client() as client:
            return {one.name: one.device_share for one in client.status().models}

    def embed():
        with daemon.http() as http:
            answer = http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
        return answer.json()["data"][0]["embedding"]

    alone = embed()
    assert shares() == {"tiny": 1.0, "vectors": 1.0}
    body = daemon.body("tiny", LONG, stream=True)

    def kept():
        """In the life of a stream, which may be shorter than what status is made of is apart."""
        with daemon.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                if shares() == {"tiny": 1.0, "vectors": 0.25}:
                    assert embed() == pytest.approx(alone, abs=1e-5)
                    return True
        return False

    poll(kept, "it to be told of a stream")
    poll(lambda: shares() == {"tiny": 1.0, "vectors": 1.0}, "it to be told that the stream ended")
