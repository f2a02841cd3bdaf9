"""The request router as Serve calls it, without Serve: replicas and requests are stand-ins."""

import asyncio
from types import SimpleNamespace

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from lorad.fleet.members import Ask
from lorad.ray.desk import desk
from lorad.ray.messages import Call, Told
from lorad.ray.router import AffinityRouter
from lorad.routing.affinity import ranking

REV = "b" * 64
ASK = Ask("POST", "/v1/completions")
DEPLOYMENT = DeploymentID(name="replica", app_name="test")


def replica_id(id):
    return ReplicaID(unique_id=id, deployment_id=DEPLOYMENT)


class FakeReplica:
    def __init__(self, id, **told):
        self.replica_id = replica_id(id)
        self.routing_stats, self.replica_metadata = Told(**told).stats(), {}
        self.max_ongoing_requests = 100

    async def get_queue_len(self, *, deadline_s):
        return 0


def pending(call, id=""):
    return SimpleNamespace(
        args=[call],
        metadata=SimpleNamespace(internal_request_id=id or f"serve-{call.id}"),
        routing_context=SimpleNamespace(should_backoff=False),
        future=asyncio.get_running_loop().create_future(),
    )


class Bench:
    """A router with two replicas."""

    def __init__(self):
        self.replicas = [FakeReplica("x", rank="0"), FakeReplica("y", rank="1")]
        self.router = AffinityRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
        )
        self.router.initialize_state()
        self.router.update_replicas(self.replicas)
        self.desk = desk("test", "replica")

    async def choose(self, request):
        ranked = await self.router.choose_replicas(self.replicas, request)
        return [[replica.replica_id.unique_id for replica in rank] for rank in ranked]

    def routed(self, request, to):
        self.router.on_request_routed(request, replica_id(to), None)

    def completed(self, request, at):
        id = request.metadata.internal_request_id
        self.router.on_request_completed(replica_id(at), id)

    def loads(self):
        return {m.name: (m.replica.num_waiting, m.replica.num_running) for m in self.look()}

    def look(self):
        self.router.update_replicas(self.replicas)
        return self.desk.members


def run(scenario):
    async def begin():
        await scenario(Bench())

    asyncio.run(begin())


def call(id, **more):
    return Call(id=id, origin="me", ask=ASK, **more)


HOME, OTHER = ("x", "y") if ranking(REV, ("0", "1"))[0] == "0" else ("y", "x")


def test_a_request_goes_home_and_elsewhere_only_if_there_is_no_place() -> None:
    async def scenario(bench):
        assert await bench.choose(pending(call("1", rev=REV))) == [[HOME], [OTHER]]
        assert await bench.choose(pending(call("2", rev=REV, without=(HOME,)))) == [[OTHER], []]

    run(scenario)


def test_what_is_for_one_replica_goes_there() -> None:
    async def scenario(bench):
        assert await bench.choose(pending(call("1", member="y"))) == [["y"]]
        gone = await bench.choose(pending(call("2", member="gone")))
        assert gone == [["x", "y"]]  # whoever has it says that it is not the one

    run(scenario)


def test_a_request_counts_from_the_choice_until_its_end() -> None:
    async def scenario(bench):
        request = pending(call("1", rev=REV))
        await bench.choose(request)
        assert bench.loads()[HOME] == (1, 0)
        bench.routed(request, HOME)
        assert bench.desk.where["1"] == HOME
        bench.desk.news.append("1")
        await bench.choose(pending(call("admin", member="x")))
        await bench.choose(pending(call("2", rev=REV)))
        assert bench.loads()[HOME] == (1, 1)
        bench.completed(request, HOME)
        assert bench.loads()[HOME] == (1, 0)

    run(scenario)


def test_one_that_found_no_place_is_counted_where_it_was_taken() -> None:
    async def scenario(bench):
        request = pending(call("1", rev=REV))
        await bench.choose(request)
        bench.routed(request, OTHER)
        assert bench.loads() == {HOME: (0, 0), OTHER: (1, 0)}

    run(scenario)


def test_one_that_was_refused_and_chosen_for_again_counts_once() -> None:
    async def scenario(bench):
        request = pending(call("1", rev=REV))
        await bench.choose(request)
        bench.completed(request, HOME)  # of a replica that had no place, says Serve
        await bench.choose(request)
        assert sum(waiting for waiting, _ in bench.loads().values()) == 1

    run(scenario)


def test_a_client_that_left_before_it_was_sent_anywhere_counts_no_more() -> None:
    async def scenario(bench):
        request = pending(call("1", rev=REV))
        await bench.choose(request)
        request.future.cancel()
        await bench.choose(pending(call("2")))
        assert sum(waiting for waiting, _ in bench.loads().values()) == 1

    run(scenario)


def test_a_dead_replica_is_not_seen_any_more() -> None:
    async def scenario(bench):
        bench.router.on_replica_actor_died(replica_id("x"))
        assert [(m.name, m.state) for m in bench.desk.members] == [("x", "lost"), ("y", "ready")]
        bench.replicas = bench.replicas[1:]
        assert await bench.choose(pending(call("1", rev=REV))) == [["y"], []]

    run(scenario)


def test_with_nobody_ready_somebody_is_asked_who_says_why() -> None:
    async def scenario(bench):
        bench.replicas = [FakeReplica(id, rank=id, state="away") for id in "xy"]
        bench.look()
        assert await bench.choose(pending(call("1", rev=REV))) == [["x", "y"]]

    run(scenario)
