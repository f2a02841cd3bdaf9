"""Why a deployment is not ready: what its replicas ask for and the cluster does not have.

Goes in: an application's status as Serve tells it, what was planned.  Comes out: one line, with
what to try where that is known.  Serve says nothing of it for half a minute, and then no remedy.
"""

from collections.abc import Mapping
from typing import Any

from lorad.ray.plan import Plan
from lorad.ray.serve_file import REPLICA

_TRY = {
    "GPU": '--gpus 0, or device = "cpu", goes without',
    "CPU": "a lower --cpus asks for less",
}


def pending(application: Any, planned: Plan) -> str:
    """ "" if nothing is known to be missing: replicas load."""
    replicas = application.deployments.get(REPLICA)
    if replicas is not None:
        import ray

        asked = {"GPU": planned.gpus, "CPU": planned.wish.cpus}
        if short := missing(replicas.replica_states, asked, ray.cluster_resources()):
            return short
    return next((" ".join(said.split()) for said in _said(application)), "")


def missing(
    states: Mapping[Any, int], asked: Mapping[str, float], cluster: Mapping[str, float]
) -> str:
    """`asked`: of a replica, by resource; `cluster`: of all nodes together, whoever has them."""
    starting = sum(n for state, n in states.items() if _word(state) == "STARTING")
    there = starting + sum(n for state, n in states.items() if _word(state) == "RUNNING")
    for resource, each in asked.items():
        have = float(cluster.get(resource, 0.0))
        fitting = int(have // each) if each else there
        waiting = min(starting, there - fitting)
        if waiting > 0:
            who = f"{waiting} replica waits" if waiting == 1 else f"{waiting} replicas wait"
            of_each = "" if waiting == 1 else " each"
            has = f"{have:g}" if have else "none"
            asks = f"{each:g} {resource}{of_each}"
            return f"{who} for {asks}; the cluster has {has}: {_TRY[resource]}"
    return ""


def _said(application: Any) -> list[str]:
    """What Serve says of those that are not ready."""
    return [
        str(one.message)
        for one in application.deployments.values()
        if one.message and _word(one.status) != "HEALTHY"
    ]


def _word(state: Any) -> str:
    return str(getattr(state, "value", state))
