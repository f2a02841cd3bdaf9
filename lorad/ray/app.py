"""The Serve application: how replicas, router and ingress are put together.

Goes in: the arguments of the application, as a Serve config file has them.  Comes out: what Serve
deploys.  `lorad deploy ray` and `serve deploy` both come by here.
"""

import hashlib
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from lorad import __version__
from lorad.ray.ingress import Ingress
from lorad.ray.plan import Plan, lasting, numbers_of, plan, wish_of
from lorad.ray.replica import Replica
from lorad.ray.serve_file import INGRESS, REPLICA
from lorad.ray.wanted import ASK_SECONDS, GRACE_SECONDS

#: Of one ingress: connections of clients.  What a replica cannot take, its daemon refuses.
INGRESS_ONGOING = 10_000
#: A line a request, twice, would be most of the logs.
_QUIET = {"enable_access_log": False}


def build(told: dict[str, Any]) -> Application:
    """Raises BadConfig."""
    wish = wish_of(told)
    args = msgspec.to_builtins(lasting(wish))
    replicas = _versioned(serve.deployment(Replica, name=REPLICA, **_replicas(plan(wish))), args)
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        num_replicas=wish.ingresses,
        max_ongoing_requests=INGRESS_ONGOING,
        ray_actor_options={"num_cpus": wish.ingress_cpus},
        logging_config=_QUIET,
        health_check_period_s=ASK_SECONDS,
        graceful_shutdown_timeout_s=GRACE_SECONDS,
    )
    return _versioned(ingress, args).bind(replicas.bind(args), args)


def _versioned(deployment: Deployment, args: dict[str, Any]) -> Deployment:
    """Serve would take what comes from a command line for new each time, and start it anew."""
    told = msgspec.json.encode([__version__, args], order="sorted")
    version = hashlib.sha256(told).hexdigest()[:16]
    return deployment.options(version=version, _internal=True)


def _replicas(plan: Plan) -> dict[str, Any]:
    wish = plan.wish
    return {
        **numbers_of(plan),
        "max_ongoing_requests": plan.max_ongoing,
        "ray_actor_options": {"num_cpus": wish.cpus, "num_gpus": plan.gpus},
        "logging_config": _QUIET,
        # An idle daemon ends within seconds; what still runs then ends with its actor.
        "graceful_shutdown_timeout_s": plan.drain_seconds + 10.0,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "request_router_config": RequestRouterConfig(
            request_router_class="lorad.ray.router:AffinityRouter",
            request_routing_stats_period_s=wish.stats_seconds,
            request_routing_stats_timeout_s=10.0,
        ),
    }
