"""What is deployed, as numbers: read from an operator's lorad.toml and the options of a deployment.

Goes in: a `Wish`, which is plain enough to stand in a Serve config file.  Comes out: a `Plan`, or
BadConfig.  Knows nothing of Ray, and looks at no file of the model: it may be on other machines.
"""

import tempfile
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad import config_sources
from lorad.config import Settings
from lorad.errors import BadConfig, LoradError
from lorad.sources.reference import parse_reference

#: Calls of operators and of the catalog, beside all requests that a daemon takes: none waits for
#: a place, and a full daemon answers "queue_full" itself, by its own rules.
SPARE_CALLS = 64
#: A daemon that no request has reached for so long, beyond what it takes to replace its engine, is
#: replaced whole.
AWAY_SECONDS = 60.0
HOMES = "/var/tmp/lorad-ray"


class Wish(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of the application, as `lorad deploy ray` writes them."""

    config: str  # the text of a lorad.toml; its paths are those of the nodes
    catalog: str  # of all replicas' adapters: a folder that every node sees, or s3://BUCKET/PREFIX
    replicas: int = 1
    min_replicas: int = 0  # with max_replicas: how many is up to Serve
    max_replicas: int = 0
    cpus: float = 1.0  # of a replica, as Ray counts them
    gpus: float | None = None  # None: as many as its engines use
    ingresses: int = 1
    ingress_cpus: float = 1.0
    homes: str = HOMES  # on every node: state, store and cache of the replicas there
    stats_seconds: float = 1.0  # how often a replica tells the routers how it is


class Plan(Struct, frozen=True, kw_only=True):
    """A wish, with what follows from the configuration."""

    wish: Wish
    seats: int  # requests that run at once in a replica
    max_ongoing: int  # calls that Serve sends to a replica at once
    gpus: float
    drain_seconds: float
    away_seconds: float

    @property
    def scales(self) -> bool:
        return self.wish.max_replicas > 0


def numbers_of(plan: Plan) -> dict[str, Any]:
    """How many replicas, as Serve wants it: what it changes without starting any anew."""
    wish = plan.wish
    if not plan.scales:
        return {"num_replicas": wish.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": wish.min_replicas,
            "max_replicas": wish.max_replicas,
            "initial_replicas": min(max(wish.replicas, wish.min_replicas), wish.max_replicas),
            "target_ongoing_requests": plan.seats,
        }
    }


def lasting(wish: Wish) -> Wish:
    """Without what Serve changes while replicas run on: of another one they are started anew."""
    return msgspec.structs.replace(wish, replicas=1, min_replicas=0, max_replicas=0, ingresses=1)


def wish_of(told: Any) -> Wish:
    """Of the arguments that Serve hands on.  Raises BadConfig."""
    try:
        return msgspec.convert(told, Wish)
    except msgspec.ValidationError as error:
        raise BadConfig(
            f"the arguments of the application: {error}",
            hint="lorad deploy ray --check prints a file with all of them",
        ) from None


def plan(wish: Wish) -> Plan:
    """Raises BadConfig."""
    _check(wish)
    settings = settings_of(wish)
    models = settings.models
    engines = [m for m in models if m.device != "cpu"]
    return Plan(
        wish=wish,
        seats=sum(m.max_num_seqs * m.replicas for m in models),
        max_ongoing=settings.limits.queue
        + sum(m.max_num_seqs * m.replicas for m in models)
        + SPARE_CALLS,
        gpus=float(sum(m.replicas * m.tensor_parallel for m in engines))
        if wish.gpus is None
        else wish.gpus,
        drain_seconds=settings.shutdown.drain_timeout,
        away_seconds=AWAY_SECONDS + max(m.stall_after + m.replace_after for m in models),
    )


def check_open(wish: Wish, host: str) -> None:
    """Daemons take the actor beside them for their peer: to them everybody is who runs it."""
    if settings_of(wish).tcp.api_keys_file or _is_loopback(host):
        return
    raise BadConfig(
        f"--host {host} without tcp.api_keys_file lets everybody use every adapter",
        hint='[tcp] api_keys_file = "/etc/lorad/api-keys", on every node',
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check(wish: Wish) -> None:
    def need(ok: bool, what: str, hint: str = "") -> None:
        if not ok:
            raise BadConfig(what, hint=hint)

    s3 = wish.catalog.startswith("s3://")
    need(
        s3 or Path(wish.catalog).is_absolute(),
        f"catalog: {wish.catalog!r} is neither an absolute path nor s3://BUCKET/PREFIX",
        "a folder that every node sees: --catalog /shared/adapters",
    )
    if s3:
        _check_bucket(wish.catalog)
    need(wish.replicas >= 1, "replicas: 1 or more", "serve shutdown ends them all")
    need(wish.ingresses >= 1, "ingresses: 1 or more", "leave it out for 1")
    need(0 < wish.stats_seconds < inf, "stats_seconds: above 0 seconds", "leave it out for 1")
    need(
        0 <= wish.cpus < inf and 0 <= wish.ingress_cpus < inf,
        "cpus: 0 or more",
        "as Ray counts them: --cpus 1",
    )
    need(
        wish.gpus is None or 0 <= wish.gpus < inf,
        "gpus: 0 or more",
        "leave it out for what its engines use",
    )
    need(
        Path(wish.homes).is_absolute(),
        "homes: an absolute path, the same on every node",
        f"--homes {HOMES}",
    )
    scales = bool(wish.min_replicas or wish.max_replicas)
    if scales:  # none at all would mean that nobody can answer who asks whether there is one
        need(
            1 <= wish.min_replicas <= wish.max_replicas,
            "min and max replicas: 1 <= min <= max",
            "name both: --min 1 --max 8",
        )


def _check_bucket(catalog: str) -> None:
    try:
        parse_reference(catalog)
    except LoradError as error:
        raise BadConfig(f"catalog: {error.message}", hint=error.hint) from None


def settings_of(wish: Wish) -> Settings:
    """As every replica will read it, where its base is.  Raises BadConfig."""
    with tempfile.TemporaryDirectory(prefix="lorad-") as folder:
        file = Path(folder) / "lorad.toml"
        file.write_text(wish.config)
        env = {"CONFIGURATION_DIRECTORY": folder + "/none", "HOME": folder}
        try:
            return config_sources.read(file, env)[0]
        except BadConfig as error:
            message = str(error).replace(str(file), "lorad.toml")
            raise BadConfig(message, hint=error.hint) from None
