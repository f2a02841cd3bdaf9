"""The Serve config file of a deployment: for `serve deploy`, and for a RayService on Kubernetes.

Goes in: a Plan.  Comes out: a dict, or YAML.  Needs no Ray.
"""

from typing import Any

import msgspec

from lorad.ray.plan import Plan, Wish, lasting, numbers_of

APP = "lorad"
REPLICA, INGRESS = "replica", "ingress"
IMPORT_PATH = "lorad.ray.app:build"


def serve_file(plan: Plan, *, app: str, host: str, port: int) -> dict[str, Any]:
    """Numbers of replicas stand beside the arguments: those Serve changes without a restart."""
    replicas = {"name": REPLICA, **numbers_of(plan)}
    ingress = {"name": INGRESS, "num_replicas": plan.wish.ingresses}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port},
        "applications": [
            {
                "name": app,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": arguments(lasting(plan.wish)),
                "deployments": [replicas, ingress],
            }
        ],
    }


def arguments(wish: Wish) -> dict[str, Any]:
    """What differs from the defaults; `msgspec.convert` makes the same wish of it."""
    usual: dict[str, Any] = msgspec.to_builtins(Wish(config="", catalog=""))
    told: dict[str, Any] = msgspec.to_builtins(wish)
    return {key: value for key, value in told.items() if value != usual[key]}


def as_yaml(file: dict[str, Any]) -> str:
    import yaml  # of huggingface-hub and ray; slow to import

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump(file, Dumper=Dumper, sort_keys=False))
