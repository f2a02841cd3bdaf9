"""Serve's request router towards the ingresses: operators all go to the same one.

Goes in: requests as Serve's proxy hands them on.  Comes out: ingresses in the order in which they
are asked.  An upload is several requests, and so is a pull that somebody waits for: they are the
business of the ingress where they began.  Applications go to whichever has the least to do.
"""

import pickle

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

#: Paths of operators.
ADMIN = "/admin/"


class IngressRouter(RequestRouter):  # type: ignore[misc]
    """Named to Serve as `lorad.ray.ingress_router:IngressRouter`."""

    queue_len_response_deadline_s = 1.0  # as AffinityRouter's

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if len(candidate_replicas) < 2 or not _path(pending_request).startswith(ADMIN):
            return [candidate_replicas]
        first, *others = sorted(candidate_replicas, key=lambda r: str(r.replica_id.unique_id))
        return [[first], others]


def _path(pending: PendingRequest) -> str:
    """Of a request that came by HTTP, which the proxy has pickled for the ingress; else ""."""
    first = next(iter(pending.args), None)
    if not isinstance(first, bytes):
        return ""
    scope = getattr(pickle.loads(first), "asgi_scope", {})
    return str(scope.get("path", ""))
