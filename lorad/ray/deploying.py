"""Deploying to a running cluster, and waiting until it serves.

Goes in: a Wish, where the cluster is.  Comes out: nothing, or CannotDeploy with the next step.  The
only way by which a command line gets to Ray.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lorad.errors import StartError
from lorad.ray.pending import pending
from lorad.ray.plan import Plan, Wish, plan
from lorad.ray.serve_file import arguments

POLL_SECONDS = 0.5
KNOCK_SECONDS = 5.0
ANSWER_SECONDS = 30.0


class CannotDeploy(StartError):
    """Ray is missing or away, or the application does not come up."""


class LeftAlone(CannotDeploy):
    """Ctrl+C while it comes up."""

    exit = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    address: str
    app: str
    host: str
    port: int


def deploy(
    wish: Wish, target: Target, *, seconds: float | None, say: Callable[[str], None]
) -> None:
    """`seconds`: how long to wait until it runs; None: not at all.

    Raises CannotDeploy, BadConfig.
    """
    planned = plan(wish)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        hint = "pip install '.[ray]' in a checkout of lorad"
        raise CannotDeploy(f"deploying needs {error.name or 'ray'}", hint=hint) from None
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # said in fewer words below
    _knock(target.address)
    handed_over = False
    try:
        ray.init(
            address=target.address,
            namespace="serve",
            log_to_driver=False,
            logging_level="error",
        )
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise _unreachable(target.address, error) from None
    try:
        from lorad.ray.app import build

        serve.start(
            proxy_location="EveryNode", http_options={"host": target.host, "port": target.port}
        )
        _check_address(target)
        application = serve.RunTarget(
            target=build(arguments(wish)), name=target.app, route_prefix="/"
        )
        serve.run_many(
            [application],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        handed_over = True
        if seconds is not None:
            _wait(target.app, planned, seconds, say)
    except StartError:
        raise
    except KeyboardInterrupt:
        what = "goes on without this command" if handed_over else "may be deployed, or not yet"
        hint = "look with: serve status, or end it all: serve shutdown"
        raise LeftAlone(f"interrupted; {target.app} {what}", hint=hint) from None
    except Exception as error:  # Ray's own have nothing in common
        hint = "ray status and serve status tell how the cluster is; then repeat"
        raise CannotDeploy(f"Ray does not deploy it: {_first_line(error)}", hint=hint) from error
    finally:
        ray.shutdown()


def _check_address(target: Target) -> None:
    """Serve that runs already stays where it listens, and says so in a log alone.  It may be open
    to other machines, where this deployment is not to be.  Raises CannotDeploy."""
    from ray.serve.context import _get_global_client

    there = _get_global_client().http_config
    if (there.host, there.port) != (target.host, target.port):
        raise CannotDeploy(
            f"Serve runs on this cluster already, at {there.host}:{there.port}, and stays there",
            hint=f"--host {there.host} --port {there.port}, or end it all: serve shutdown",
        )


def _knock(address: str) -> None:
    """Ray itself tries for minutes, and says nothing.  Raises CannotDeploy."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # auto, or something that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> CannotDeploy:
    return CannotDeploy(
        f"no Ray cluster is reachable at {address}: {_first_line(error)}",
        hint="ray start --head on this machine, or --address HOST:6379",
    )


def _wait(app: str, planned: Plan, seconds: float, say: Callable[[str], None]) -> None:
    from ray import serve

    until, said = time.monotonic() + seconds, ""
    while True:
        found = serve.status().applications.get(app)
        state = str(found.status.value) if found is not None else "NOT_STARTED"
        message = "" if found is None else _first_line(found.message) or pending(found, planned)
        if state == "RUNNING":
            message = _why_not_ready(app)
            if not message:
                return
        if found is not None and state in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise CannotDeploy(
                f"{app} is {state.lower().replace('_', ' ')}: {_why(found) or message}",
                hint="serve status has the whole of it, ray logs what its replicas said",
            )
        told = f"{state.lower().replace('_', ' ')} {message}".strip()
        if told != said:
            say(f"{app}: {told}")
            said = told
        if time.monotonic() > until:
            raise CannotDeploy(
                f"{app} is not running after {seconds:g} s: {told}",
                hint="it goes on; look with: serve status",
            )
        time.sleep(POLL_SECONDS)


def _why_not_ready(app: str) -> str:
    from ray import serve

    try:
        handle = serve.get_app_handle(app)
        return str(handle.why_not_ready.remote().result(timeout_s=ANSWER_SECONDS))
    except Exception as error:  # an ingress that dies is started anew
        return f"its ingress does not answer: {_first_line(error) or type(error).__name__}"


def _why(application: Any) -> str:
    """What the deployments that failed have to say at the end of their tracebacks."""
    failed = {
        name: _last_line(one.message)
        for name, one in application.deployments.items()
        if str(one.status.value) not in ("HEALTHY", "UPDATING")
    }
    return "; ".join(f"{name}: {words}" for name, words in failed.items())


def _last_line(told: object) -> str:
    return next((line for line in reversed(str(told).splitlines()) if line.strip()), "")


def _first_line(told: object) -> str:
    return next((line for line in str(told).splitlines() if line.strip()), "")
