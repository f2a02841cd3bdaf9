"""huggingface_hub's InferenceClient, which knows TEI's routes, over TCP and with a key."""

import numpy as np
import pytest

#: Warnings of other people's libraries are theirs.
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def door(steered):
    """It speaks no Unix socket."""
    return steered.doors["tcp"]


def client(door, path="", **options):
    return hub.InferenceClient(model=f"{door.url}{path}", token=door.key, **options)


def embedded(door, texts, **more):
    """Without it."""
    with door.http() as http:
        body = {"model": "tiny", "input": texts} | more
        return [item["embedding"] for item in http.post("/v1/embeddings", json=body).json()["data"]]


@pytest.mark.parametrize("path", ["", "/embed", "/embed?model=tiny"])
def test_features_of_a_text_and_of_texts_are_vectors(door, path):
    told = client(door, path).feature_extraction(["ab", "c"])
    assert told.dtype == np.float32 and np.allclose(told, embedded(door, ["ab", "c"]), atol=1e-6)
    assert np.allclose(client(door, path).feature_extraction("ab"), told[:1], atol=1e-6)


def test_what_it_may_say_of_vectors_is_done(door):
    asked = client(door, "/embed")
    cut = asked.feature_extraction("abc", dimensions=3, normalize=False, encoding_format="float")
    assert np.allclose(cut, embedded(door, "abc", dimensions=3, normalize=False))
    long = asked.feature_extraction("x" * 99, truncate=True, truncation_direction="right")
    assert np.allclose(long, embedded(door, "x" * 99, truncate=True), atol=1e-6)


@pytest.mark.parametrize("path", ["", "/similarity"])
def test_sentences_are_compared(door, path):
    same, other = client(door, path).sentence_similarity("ab", ["ab", "hh"])
    assert same == pytest.approx(1.0) and 0 < other < same


@pytest.mark.parametrize(
    ("path", "key", "status", "word"),
    [
        ("/embed?model=nobody", None, 404, "nobody"),
        ("/embed", None, 413, "64"),
        ("/embed", "wrong", 401, ""),
    ],
    ids=["unknown", "long", "stranger"],
)
def test_an_error_has_its_status_and_says_why(door, path, key, status, word):
    asked = hub.InferenceClient(model=f"{door.url}{path}", token=key or door.key)
    with pytest.raises(hub.errors.HfHubHTTPError) as failed:
        asked.feature_extraction("x" * 99 if status == 413 else "x")
    assert failed.value.response.status_code == status
    assert word in failed.value.response.text
