"""`lorad`: the daemon's own command line.

Goes in: argv and the environment.  Comes out: an exit status of CONVENTIONS §2.2: 0 after a drain,
1 crash, 2 bad configuration, 3 cannot bind, 4 registry unusable, 5 no usable device, 6 another
lorad holds the lock.  Errors are one line and the next step, never a traceback.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from engine.collector import collecting_nothing
from engine.last_words import spare_stderr
from lorad import __version__
from lorad.cli import deploy
from lorad.cli.misuse import ClickException, shows_help, told
from lorad.cli.output import complain, one_line, print_line
from lorad.errors import BadConfig, StartError

if TYPE_CHECKING:
    from lorad.config import Settings

app = typer.Typer(
    name="lorad",
    help="Serve base models with very many LoRA adapters.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(deploy.app)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="Read this file last.")
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print every setting with its origin, and end.")
]
Check = Annotated[
    bool, typer.Option("--check", help="Look for what a start would refuse, and end.")
]
Level = Annotated[
    str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
]
Form = Annotated[str | None, typer.Option("--log-format", metavar="FORM", help="text or json.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lorad {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    config: Config = None,
    print_config: PrintConfig = False,
    check: Check = False,
    log_level: Level = None,
    log_format: Form = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Without a command: serve."""
    if context.invoked_subcommand is None:
        raise typer.Exit(_serve(config, print_config, check, log_level, log_format))


@app.command()
def serve(
    config: Config = None,
    print_config: PrintConfig = False,
    check: Check = False,
    log_level: Level = None,
    log_format: Form = None,
) -> None:
    """Run the daemon in the foreground; it logs to stderr."""
    raise typer.Exit(_serve(config, print_config, check, log_level, log_format))


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="ORG/NAME|PATH", help="The base; default: SmolLM2-135M-Instruct."
        ),
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option("--adapters", metavar="DIR", help="A folder of PEFT folders for that base."),
    ] = None,
    rag: Annotated[
        bool, typer.Option("--rag", help="Embed, rerank and answer, with three models.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the daemon running.")] = False,
) -> None:
    """Four adapters in one batch, one replaced under a stream."""
    try:  # numpy, openai and more: not needed to serve
        if rag:
            from lorad.demo_rag import main as run_demo
        else:
            from lorad.demo import main as run_demo
    except ModuleNotFoundError as error:
        missing = error.name or "a package"
        typer.echo(f"error: the demo needs {missing}\n  try: pip install {missing}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(run_demo(model, adapters, keep))


@app.command()
def gateway(
    member: Annotated[
        list[str],
        typer.Option(
            "--member",
            metavar="NAME=PLACE",
            help="A daemon: the folder of its sockets, or INFERENCE_URL,ADMIN_URL. Once for each.",
        ),
    ],
    catalog: Annotated[
        str,
        typer.Option("--catalog", metavar="PLACE", help="A shared folder, or s3://BUCKET/PREFIX."),
    ],
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="For its sockets and uploads.")
    ],
    bind: Annotated[
        str, typer.Option("--bind", metavar="HOST:PORT", help="Serve on TCP, too.")
    ] = "",
    api_keys: Annotated[
        str,
        typer.Option("--api-keys", metavar="FILE", help="Keys of applications that come over TCP."),
    ] = "",
    admin_keys: Annotated[
        str,
        typer.Option("--admin-keys", metavar="FILE", help="Keys of operators who come over TCP."),
    ] = "",
    member_key: Annotated[
        Path | None,
        typer.Option("--member-key", metavar="FILE", help="The key of members' admin URLs."),
    ] = None,
    lease: Annotated[
        float,
        typer.Option(
            "--lease",
            metavar="SECONDS",
            min=0,
            help="Without a look at the catalog for so long, it serves no adapters; 0 is for ever.",
        ),
    ] = 60.0,
    several: Annotated[
        bool,
        typer.Option(
            "--several", help="Others are behind the same address: share uploads and operations."
        ),
    ] = False,
    config: Config = None,
) -> None:
    """Serve several daemons as one, over a shared catalog of adapters."""
    from lorad import config_sources, logs

    try:
        settings = config_sources.load_for_gateway(config, os.environ)
        logs.setup(settings.log.level, settings.log.format, os.environ)
        from lorad.fleet import serving  # imports the server

        wanted = serving.Wanted(
            sites=serving.sites_of(member, serving.member_key(member_key)),
            catalog=catalog,
            folder=folder,
            bind=bind,
            api_keys=api_keys,
            admin_keys=admin_keys,
            lease_seconds=lease,
            several=several,
        )
        raise typer.Exit(serving.run(wanted, settings))
    except StartError as error:
        error.print(logs.error_mark(os.environ))
        raise typer.Exit(error.exit) from None


def _serve(
    config: Path | None,
    print_config: bool,
    check: bool,
    log_level: str | None,
    log_format: str | None,
) -> int:
    from lorad import config_sources, logs

    flags = {"log.level": log_level, "log.format": log_format}
    given = {key: value for key, value in flags.items() if value is not None}
    try:
        settings, places = config_sources.load(config, os.environ, given)
    except BadConfig as error:
        error.print(logs.error_mark(os.environ))
        return error.exit
    if print_config:
        print_line(config_sources.dump(settings))
        return 0
    if check:
        return _check(settings)
    # Who says "end", or "read your configuration", before anybody listens means it: it waits,
    # instead of ending us.  Unblocked by `Daemon._handle_signals`, ahead of every child.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
    with collecting_nothing():
        from lorad.checks import check_start  # before the server is imported: sooner refused
    try:
        check_start(settings)
    except StartError as error:
        error.print(logs.error_mark(os.environ))
        return error.exit
    with collecting_nothing():
        from lorad import daemon  # imports the server: not needed to print or check

    return daemon.run(
        settings,
        places,
        os.environ,
        reload=lambda: config_sources.load(config, os.environ, given)[0],
    )


def _check(settings: "Settings") -> int:
    from lorad.checks import check_all, described, doubts  # reads a tokenizer: not needed to print

    try:
        check_all(settings)
    except StartError as error:
        error.print()
        return error.exit
    for doubt in doubts(settings):
        print(f"lorad: warning: {doubt}", file=sys.stderr)
    print("\n".join((*described(settings), "the configuration is valid")))
    return 0


def main() -> NoReturn:
    """The `lorad` command.  A log that cannot be written to is no reason to end, nor to fail."""
    spare_stderr()
    sys.exit(invoke(sys.argv[1:]))


def invoke(argv: list[str]) -> int:
    """Run one command line; returns the exit status."""
    command: Any = typer.main.get_command(app)
    try:
        status = command.main(argv, prog_name="lorad", standalone_mode=False)
    except typer.Abort:
        return 1
    except ClickException as error:
        if shows_help(error):
            complain(error.format_message())
        else:
            message, hint = told(error, "lorad")
            BadConfig(one_line(message), hint=hint).print()
        return int(error.exit_code)
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    main()
