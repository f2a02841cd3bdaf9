"""Vectors through openai-python and LangChain, and a rerank with curl."""

import json
import shutil
import subprocess

import httpx
import openai
import pytest


def test_floats_and_base64_are_the_same_vectors(client):
    """Without a format openai-python asks for base64, and decodes it."""
    plain = client.embeddings.create(
        model="acme/sql", input=["hello", "wörld"], encoding_format="float"
    )
    coded = client.embeddings.create(model="acme/sql", input=["hello", "wörld"])
    assert [d.embedding for d in plain.data] == [d.embedding for d in coded.data]
    assert [d.index for d in plain.data] == [0, 1] and plain.object == "list"
    assert plain.model == "acme/sql"
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 15


def test_token_ids_one_text_and_dimensions(client):
    [one] = client.embeddings.create(model="tiny", input="x", dimensions=3).data
    assert len(one.embedding) == 3
    assert len(client.embeddings.create(model="tiny", input=[97, 98]).data) == 1
    assert len(client.embeddings.create(model="tiny", input=[[97], [98]]).data) == 2


def test_errors_are_those_of_the_sdk(client):
    with pytest.raises(openai.BadRequestError) as failed:
        client.embeddings.create(model="tiny", input="")
    assert (failed.value.code, failed.value.param) == ("invalid_value", "input")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody", input="x")


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
def test_curl_as_the_guide_writes_it(api):
    body = {"query": "cats", "documents": ["dogs", "cats"], "top_n": 1}
    command = ["curl", "-sS", "--unix-socket", str(api.inference), "http://lorad/v1/rerank"]
    command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    [best] = json.loads(done.stdout)["results"]
    assert best["index"] == 1


@pytest.mark.slow
def test_langchain_embeds_documents_and_queries(api):
    langchain = pytest.importorskip("langchain_openai")
    transport = httpx.HTTPTransport(uds=str(api.inference), verify=False)
    with httpx.Client(transport=transport) as http:
        made = langchain.OpenAIEmbeddings(
            model="tiny",
            base_url="http://lorad/v1",
            api_key="x",
            http_client=http,
            check_embedding_ctx_length=False,
        )
        documents = made.embed_documents(["a", "b"])
        assert documents[0] == made.embed_query("a") != documents[1]
