"""Serve's request router: the replica of a request is the one where its adapter is.

Goes in: requests whose argument is a `Call`; what the replicas publish.  Comes out: replicas in the
order in which they are asked, by `Tally`.  It runs in the ingress, on Serve's own thread.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from lorad.ray.desk import desk
from lorad.ray.messages import Call, told_of
from lorad.ray.tally import Tally

#: The ingress hears of a loss at once, or not at all.
WHERE_SECONDS = 60.0


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Named to Serve as `lorad.ray.router:AffinityRouter`."""

    #: Seconds.  Serve's own is a tenth, which a busy machine misses now and then, and who misses it
    #: is passed over: its adapters then load elsewhere.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, **_: Any) -> None:
        self._tally = Tally()
        self._desk = desk(self._deployment_id.app_name, self._deployment_id.name)
        self._calls: dict[str, str] = {}  # Serve's id of a request -> the call's
        self._unsent: dict[str, PendingRequest] = {}  # chosen for, and not yet taken

    # ------------------------------------------------------------- what Serve calls
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        stats = {r.replica_id.unique_id: r.routing_stats or r.replica_metadata for r in replicas}
        self._tally.update({id: told_of(each) for id, each in stats.items()})
        self._desk.members = tuple(self._tally.seen())

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        call = _call_of(pending_request)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if call is None:  # nothing of lorad's
            return [candidate_replicas]
        if call.member:  # one that is gone cannot answer: whoever gets it says so
            named = by_id.get(call.member)
            return [[named]] if named is not None else [candidate_replicas]
        self._catch_up()
        self._tally.origin = call.origin
        choice = self._tally.choose(call.rev, call.without)
        if choice is None or choice.name not in by_id:
            return [candidate_replicas]  # its daemon says best what is wrong
        self._tally.enter(call.id, choice.name, call.rev)
        self._calls[pending_request.metadata.internal_request_id] = call.id
        self._unsent[call.id] = pending_request
        others = [r for id, r in by_id.items() if id != choice.name and id not in call.without]
        return [[by_id[choice.name]], others]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        call = _call_of(pending_request)
        if call is None or call.member:
            return
        self._desk.where[call.id] = replica_id.unique_id
        if self._unsent.pop(call.id, None) is not None:
            self._tally.move(call.id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Also when a full replica has refused it: then it is chosen for anew."""
        call = self._calls.pop(internal_request_id, None)
        if call is not None:
            self._catch_up()
            self._unsent.pop(call, None)
            self._tally.leave(call)
            # The ingress takes it out, unless its client left before it was sent.
            self._event_loop.call_later(WHERE_SECONDS, self._desk.where.pop, call, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tally.lose(replica_id.unique_id)
        self._desk.members = tuple(self._tally.seen())

    # ------------------------------------------------------------- inside
    def _catch_up(self) -> None:
        """With what the ingress has seen begin, and with clients that left before they were sent
        anywhere, of which Serve says nothing."""
        while self._desk.news:
            self._tally.begin(self._desk.news.popleft())
        for id in [id for id, pending in self._unsent.items() if pending.future.cancelled()]:
            self._unsent.pop(id)
            self._tally.leave(id)


def _call_of(pending: PendingRequest) -> Call | None:
    first = next(iter(pending.args), None)
    return first if isinstance(first, Call) else None
