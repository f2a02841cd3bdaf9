"""Cohere's own clients, which rank: the first version's over /v1/rerank, the second's over
/v2/rerank, and what each of them reads of an error."""

import asyncio

import httpx
import pytest

#: Warnings of other people's libraries are theirs.
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
cohere = pytest.importorskip("cohere")

DOCUMENTS = ["zzz", "abc", "ab"]
VERSIONS = {"Client": "1", "ClientV2": "2"}


@pytest.fixture(params=VERSIONS)
def kind(request):
    return request.param


def connect(kind, door, *, waiting=False, key=None):
    """`waiting`: the asynchronous one."""
    transport = None
    if door.socket is not None:
        made = httpx.AsyncHTTPTransport if waiting else httpx.HTTPTransport
        transport = made(uds=str(door.socket))
    http = httpx.AsyncClient if waiting else httpx.Client
    name = f"Async{kind}" if waiting else kind
    return getattr(cohere, name)(
        api_key=key or door.key, base_url=door.url, httpx_client=http(transport=transport)
    )


def ranked(door, **more):
    """Without it."""
    with door.http() as http:
        body = {"model": "tiny", "query": "abc", "documents": DOCUMENTS} | more
        return [
            (one["index"], one["relevance_score"])
            for one in http.post("/v1/rerank", json=body).json()["results"]
        ]


def test_documents_are_ranked_as_without_it(steered_door, kind):
    told = connect(kind, steered_door).rerank(model="tiny", query="abc", documents=DOCUMENTS)
    assert [(one.index, one.relevance_score) for one in told.results] == ranked(steered_door)
    assert told.id and told.meta.billed_units.search_units == 1
    assert told.meta.api_version.version == VERSIONS[kind]


def test_as_many_are_told_as_were_asked_for(steered_door, kind):
    cut = {"max_tokens_per_doc": 2} if kind == "ClientV2" else {}
    asked = connect(kind, steered_door)
    told = asked.rerank(model="tiny", query="abc", documents=DOCUMENTS, top_n=1, **cut)
    wanted = ranked(steered_door, top_n=1, **cut)
    assert [(one.index, one.relevance_score) for one in told.results] == wanted


def test_documents_of_the_first_version_may_be_objects_and_come_back(steered_door):
    told = connect("Client", steered_door).rerank(
        model="tiny",
        query="abc",
        documents=[{"text": one} for one in DOCUMENTS],
        return_documents=True,
    )
    assert [one.document.text for one in told.results][:2] == ["abc", "ab"]


def test_an_adapter_ranks_by_its_name_and_without_blocking(steered_door, kind):
    async def ask():
        client = connect(kind, steered_door, waiting=True)
        return await client.rerank(model="acme/sql", query="abc", documents=DOCUMENTS)

    told = asyncio.run(ask())
    assert [one.index for one in told.results] == [i for i, _ in ranked(steered_door)]


def test_errors_are_those_that_it_knows(steered_door, kind):
    asked = connect(kind, steered_door)
    with pytest.raises(cohere.errors.NotFoundError) as missing:
        asked.rerank(model="nobody", query="x", documents=["y"])
    assert missing.value.body["error"]["code"] == "model_not_found"
    with pytest.raises(cohere.errors.BadRequestError) as wrong:
        asked.rerank(model="tiny", query="x", documents=["y"], top_n=0)
    assert wrong.value.body["error"]["param"] == "top_n"
    if steered_door.socket is None:
        with pytest.raises(cohere.errors.UnauthorizedError):
            connect(kind, steered_door, key="wrong").rerank(
                model="tiny", query="x", documents=["y"]
            )
