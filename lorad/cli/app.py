"""`loractl`: the Typer root, and the one place that turns errors into exit codes.

Goes in: argv.  Comes out: an exit status of CONVENTIONS: 0 done, 1 failed, 2 usage, 3 unreachable,
4 no such thing, 5 denied, 6 conflict, 7 timeout, 8 adapter invalid, 9 no room, 10 not ready, 130
interrupted, 141 broken pipe.  Results go to stdout, everything else to stderr.
"""

import itertools
import os
import sys
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from lorad import __version__
from lorad.cli import adapters, daemon, run
from lorad.cli.options import Options, hoist, may_ask, output_format, seconds
from lorad.cli.output import plain
from lorad.cli.reach import advise
from lorad.cli.session import Failed, Session
from lorad.client import ApiError, Unreachable
from lorad.errors import meaning

#: Typer 0.29 brought its own copy of click, so the base is found from what Typer exports.
ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="loractl",
    help="Operate a lorad daemon: adapters, slots, pins, events.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
adapters.register(app)
daemon.register(app)
run.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"loractl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            "-H",
            envvar="LORAD_HOST",
            help="unix:///path/admin.sock; default: the running daemon's.",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="table, wide, json, jsonl or name.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
    no_headers: Annotated[bool, typer.Option("--no-headers")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Results only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Output is never coloured.")] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="How long to wait, e.g. 30s.")
    ] = None,
    no_input: Annotated[bool, typer.Option("--no-input", help="Never ask.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Answer yes.")] = False,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Global options; they may stand before or after the command."""
    try:
        chosen = output_format(output, json)
        limit = seconds(timeout) if timeout is not None else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    context.obj = Session(
        Options(
            host=host,
            output=chosen,
            headers=not no_headers,
            quiet=quiet,
            verbose=verbose,
            timeout=limit,
            interactive=may_ask() and not no_input,
            yes=yes,
        )
    )
    context.call_on_close(context.obj.close)


def main() -> NoReturn:
    """Entry point of the `loractl` script."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(argv: list[str]) -> int:
    """Run one command line; returns the exit status and never raises for a foreseeable failure."""
    argv = hoist(argv)
    as_json = "--json" in argv or _asks_json(argv)
    try:
        status = typer.main.get_command(app).main(argv, prog_name="loractl", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except BrokenPipeError:
        # The reader left; a second failure while Python flushes at exit must not print either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted; what the daemon had begun goes on", file=sys.stderr)
        return 130
    except ClickException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "loractl"
        _report(as_json, "usage", error.format_message(), hint=f"{command} --help")
        return 2
    except Unreachable as error:
        advice = advise(error)
        _report(as_json, "unreachable", str(error), why=advice.why, hint=advice.hint)
        return advice.exit
    except ApiError as error:
        _report(as_json, error.code, error.message, hint=error.hint, details=error.details)
        return meaning(error.code).exit
    except Failed as error:
        _report(as_json, error.code, error.message, hint=error.hint, details=error.details)
        return meaning(error.code).exit
    except OSError as error:
        what = f"{error.strerror or error}: {error.filename or ''}"
        _report(as_json, "os_error", what.rstrip(": "))
        return 1


def _asks_json(argv: list[str]) -> bool:
    pairs = itertools.pairwise(argv)
    return any(a in ("-o", "--output") and b in ("json", "jsonl") for a, b in pairs)


def _report(
    as_json: bool,
    code: str,
    message: str,
    *,
    why: str = "",
    hint: str = "",
    details: dict[str, str] | None = None,
) -> None:
    """One error on stderr: cause, reason, next step."""
    if as_json:
        body = {"code": code, "message": message, "hint": hint, "details": details or {}}
        print(msgspec.json.encode({"error": body}).decode(), file=sys.stderr)
        return
    reason = (details or {}).get("reason", "")
    print(f"error: {plain(message)}" + (f"  [{plain(reason)}]" if reason else ""), file=sys.stderr)
    if why:
        print(f"  why: {plain(why)}", file=sys.stderr)
    if hint:
        print(f"  try: {plain(hint)}", file=sys.stderr)


if __name__ == "__main__":
    main()
