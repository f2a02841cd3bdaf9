"""Which ingress a request goes to, as Serve's proxy asks."""

import asyncio
import pickle
from types import SimpleNamespace

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    StreamingHTTPRequest,
)

from lorad.ray.ingress_router import IngressRouter

DEPLOYMENT = DeploymentID(name="ingress", app_name="test")


def ingress(id):
    return SimpleNamespace(replica_id=ReplicaID(unique_id=id, deployment_id=DEPLOYMENT))


@pytest.fixture
def choose():
    router = IngressRouter(DEPLOYMENT, DeploymentHandleSource.PROXY)

    def to(*args, ids):
        pending = SimpleNamespace(
            args=list(args), routing_context=SimpleNamespace(should_backoff=False)
        )
        ranked = asyncio.run(router.choose_replicas([ingress(id) for id in ids], pending))
        return [[each.replica_id.unique_id for each in rank] for rank in ranked]

    return to


def http(path):
    return pickle.dumps(StreamingHTTPRequest({"path": path}, proxy_actor_name="proxy"))


def test_all_that_operators_ask_goes_to_the_same_ingress(choose) -> None:
    for path in ("/admin/v1/uploads", "/admin/v1/uploads/1/files/a", "/admin/v1/status"):
        assert choose(http(path), ids=("c", "a", "b"))[0] == ["a"]
        assert choose(http(path), ids=("b", "c", "a"))[0] == ["a"]


def test_applications_go_to_any(choose) -> None:
    assert choose(http("/v1/completions"), ids=("c", "a")) == [["c", "a"]]
    assert choose(ids=("c", "a")) == [["c", "a"]]  # a call that is none of HTTP
    assert choose(http("/admin/v1/status"), ids=("c",)) == [["c"]]
