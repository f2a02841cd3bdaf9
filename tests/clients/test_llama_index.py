"""llama-index: vectors through its OpenAI-like embedding, and its ranker of nodes for TEI."""

import asyncio
import functools

import httpx
import numpy as np
import pytest

#: Warnings of other people's libraries are theirs.
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
openai = pytest.importorskip("openai")
embedding = pytest.importorskip("llama_index.embeddings.openai_like")
tei = pytest.importorskip("llama_index.postprocessor.tei_rerank.base")
schema = pytest.importorskip("llama_index.core.schema")
httpx2 = pytest.importorskip("httpx2")


def embedder(door, model="tiny", **more):
    way = {"api_base": f"{door.url}/v1", "api_key": door.key}
    if door.socket is not None:
        path = str(door.socket)
        blocking, waiting = httpx2.HTTPTransport(uds=path), httpx2.AsyncHTTPTransport(uds=path)
        way["http_client"] = openai.DefaultHttpx2Client(transport=blocking)
        way["async_http_client"] = openai.DefaultAsyncHttpx2Client(transport=waiting)
    return embedding.OpenAILikeEmbedding(model_name=model, **way, **more)


def embedded(door, texts, **more):
    """Without it."""
    with door.http() as http:
        body = {"model": "tiny", "input": texts} | more
        return [item["embedding"] for item in http.post("/v1/embeddings", json=body).json()["data"]]


def test_texts_and_queries_are_vectors(steered_door):
    texts = [f"text {n}" for n in range(25)]
    made = embedder(steered_door, embed_batch_size=10)
    assert np.allclose(made.get_text_embedding_batch(texts), embedded(steered_door, texts))
    assert np.allclose(made.get_query_embedding("ab"), embedded(steered_door, "ab")[0])
    told = asyncio.run(made.aget_text_embedding_batch(texts[:3]))
    assert np.allclose(told, embedded(steered_door, texts[:3]))


def test_an_adapter_and_dimensions_are_asked_for_by_name(steered_door):
    told = embedder(steered_door, "acme/sql", dimensions=3).get_text_embedding("ab")
    wanted = embedded(steered_door, "ab", model="acme/sql", dimensions=3)[0]
    assert len(told) == 3 and np.allclose(told, wanted)


def test_an_unknown_model_is_the_sdks_error(steered_door):
    with pytest.raises(openai.NotFoundError) as missing:
        embedder(steered_door, "nobody", max_retries=0).get_text_embedding("ab")
    assert missing.value.code == "model_not_found"


def test_nodes_are_ranked_as_with_tei(steered_door, monkeypatch):
    transport = httpx.HTTPTransport(uds=str(steered_door.socket)) if steered_door.socket else None
    monkeypatch.setattr(tei.httpx, "Client", functools.partial(httpx.Client, transport=transport))
    ranker = tei.TextEmbeddingInference(
        base_url=steered_door.url, top_n=2, auth_token=f"Bearer {steered_door.key}"
    )
    nodes = [schema.NodeWithScore(node=schema.TextNode(text=text)) for text in ("zz", "abc", "ab")]
    best, second = ranker.postprocess_nodes(nodes, query_str="abc")
    assert (best.node.text, second.node.text) == ("abc", "ab")
    with steered_door.http() as http:
        body = {"query": "abc", "texts": ["zz", "abc", "ab"]}
        told = {one["index"]: one["score"] for one in http.post("/rerank", json=body).json()}
    assert best.score == pytest.approx(told[1]) and second.score == pytest.approx(told[2])
