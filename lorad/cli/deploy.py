"""`lorad deploy ray`: the same daemon in every replica of a Ray Serve application.

Goes in: a lorad.toml, where the cluster is, how many replicas.  Comes out: a running application,
or with --check the Serve config file that says the same.  Ray is imported by this command alone.
"""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from lorad.cli.options import seconds as parsed
from lorad.cli.output import print_line
from lorad.errors import StartError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")  # it is part of what Serve calls actors

app = typer.Typer(
    name="deploy",
    help="Deploy lorad on many machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def root() -> None:
    """Deploy lorad on many machines."""


@app.command()
def ray(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A lorad.toml.")],
    catalog: Annotated[
        str,
        typer.Option(
            "--catalog",
            metavar="DIR|s3://...",
            help="Where all replicas have their adapters from; every node sees it.",
        ),
    ],
    address: Annotated[
        str,
        typer.Option(
            "--address", envvar="RAY_ADDRESS", metavar="HOST:PORT", help="Of the cluster's head."
        ),
    ] = "auto",
    name: Annotated[str, typer.Option("--name", help="Of the application.")] = "lorad",
    replicas: Annotated[int, typer.Option("--replicas", "-n", metavar="N", help="Daemons.")] = 1,
    least: Annotated[
        int, typer.Option("--min", metavar="N", help="With --max: as many as the load asks for.")
    ] = 0,
    most: Annotated[int, typer.Option("--max", metavar="N", help="At most so many.")] = 0,
    cpus: Annotated[
        float, typer.Option("--cpus", metavar="N", help="Of a replica, as Ray counts them.")
    ] = 1.0,
    gpus: Annotated[
        float | None,
        typer.Option("--gpus", metavar="N", help="Of a replica; default: what its engines use."),
    ] = None,
    ingresses: Annotated[
        int, typer.Option("--ingresses", metavar="N", help="Gateways in front of them.")
    ] = 1,
    homes: Annotated[
        str | None,
        typer.Option("--homes", metavar="DIR", help="On each node: what its replicas keep."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where Serve listens on each node.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=1, max=65535)] = 8000,
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="The nodes alone have the base: do not look for it here."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print the Serve config file, and deploy nothing.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it takes requests.")
    ] = True,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="How long to wait: 30s, 10m ...")
    ] = "10m",
) -> None:
    """Serve CONFIG from a Ray cluster, adapters where their requests go."""
    from lorad.ray import plan as plans
    from lorad.ray.bases import check_bases
    from lorad.ray.serve_file import as_yaml, serve_file

    patience = _seconds(timeout)
    if not _NAME.fullmatch(name):
        raise typer.BadParameter("letters, digits, - and _", param_hint="--name")
    try:
        wish = plans.Wish(
            config=_text(config),
            catalog=catalog,
            replicas=replicas,
            min_replicas=least,
            max_replicas=most,
            cpus=cpus,
            gpus=gpus,
            ingresses=ingresses,
            homes=homes or plans.HOMES,
        )
        plan = plans.plan(wish)
        plans.check_open(wish, host)
        if not elsewhere:
            check_bases(plans.settings_of(wish))
        if check:
            file = serve_file(plan, app=name, host=host, port=port)
            print_line(as_yaml(file).rstrip())
            return
        from lorad.ray.deploying import Target, deploy

        target = Target(address=address, app=name, host=host, port=port)
        deploy(wish, target, seconds=patience if wait else None, say=_say)
    except StartError as error:
        error.print()
        raise typer.Exit(error.exit) from None
    _say(f"{name} runs at http://{host}:{port}" if wait else f"{name} is on its way")


def _text(path: Path) -> str:
    from lorad.errors import BadConfig

    try:
        return path.read_text(encoding="utf-8").strip() + "\n"
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadConfig(f"{path}: {why}", hint="name a lorad.toml that is here") from None


def _seconds(text: str) -> float:
    try:
        return parsed(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--timeout") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr)
