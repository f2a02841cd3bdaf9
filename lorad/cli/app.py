"""`loractl`: the Typer root, and the one place that turns errors into exit codes.

Goes in: argv.  Comes out: an exit status of CONVENTIONS: 0 done, 1 failed, 2 usage, 3 unreachable,
4 no such thing, 5 denied, 6 conflict, 7 timeout, 8 adapter invalid, 9 no room, 10 not ready, 130
interrupted, 141 broken pipe.  Results go to stdout, everything else to stderr.
"""

import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from lorad import __version__
from lorad.caller import ApiError, Unreachable
from lorad.cli import (
    adapters,
    audit,
    config,
    daemon,
    doctor,
    events,
    explain,
    gc,
    listing,
    logs,
    metrics,
    operate,
    operations,
    plan,
    pull,
    registry,
    run,
    tenant,
    top,
    verify,
)
from lorad.cli.misuse import ClickException, shows_help, told
from lorad.cli.next_steps import next_step
from lorad.cli.options import Options, asks_json, hoist, may_ask, output_format, seconds
from lorad.cli.output import complain, flush, json_text, one_line, print_line
from lorad.cli.reach import advise
from lorad.cli.session import Broken, Failed, Interrupted, Session, Usage
from lorad.errors import meaning

app = typer.Typer(
    name="loractl",
    help="Operate a lorad daemon: adapters, slots, pins, events.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (
    *(daemon, listing, adapters, pull, explain, verify, gc, metrics),
    *(operations, events, run),
    *(config, doctor, plan, registry, operate, logs),
    *(tenant, audit, top),
):
    part.register(app)

#: Codes of what goes wrong on this side of the socket; all others are rows of lorad.errors.TABLE.
OWN_EXITS: Mapping[str, int] = {
    "usage": 2,
    "unreachable": 3,
    "unreachable_denied": 5,
    "interrupted": 130,
    "partly_failed": 1,
    "cancelled": 1,
    "os_error": 1,
    "registry_unusable": 1,
    "other_version": 1,
    "bad_recording": 1,
    "missing_package": 1,
    "dashboard_failed": 1,
    "bug": 1,
}


def _version(wanted: bool) -> None:
    if wanted:
        print_line(f"loractl {__version__}")
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
            metavar="HOST",
            help="unix:///path/admin.sock; default: the running daemon's.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FORM", help="table, wide, json, jsonl or name."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
    no_headers: Annotated[
        bool, typer.Option("--no-headers", help="No headings above a table.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Results only.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Codes of errors, speed.")
    ] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Output is never coloured.")] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="How long to wait: 30s, 2m ...")
    ] = None,
    no_input: Annotated[bool, typer.Option("--no-input", help="Never ask.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Answer yes.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Global options; they may stand before or after the command."""
    try:
        chosen = output_format(output, json)
        limit = seconds(timeout) if timeout is not None else None
    except ValueError as error:
        raise Usage(str(error)) from None
    if limit == 0:
        raise Usage("--timeout must be above 0; --no-wait does not wait at all")
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


@dataclass(slots=True)
class Trouble:
    """One failure as it is told: what, why, the next step."""

    code: str
    message: str
    why: str = ""
    hint: str = ""
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit(self) -> int:
        return OWN_EXITS[self.code] if self.code in OWN_EXITS else meaning(self.code).exit


@dataclass(frozen=True, slots=True)
class Telling:
    """How failures of this command line are told."""

    command: str
    as_json: bool
    verbose: bool


def main() -> NoReturn:
    """Entry point of the `loractl` script."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(argv: list[str]) -> int:
    """Run one command line; returns the exit status and never raises."""
    root: Any = typer.main.get_command(app)
    front, rest = hoist(argv, _takes_value(root))
    telling = Telling(
        command=next((f"loractl {word}" for word in rest if word in root.commands), "loractl"),
        as_json=asks_json(front, os.environ),
        verbose=any(w == "--verbose" or (w[:1] == "-" != w[1:2] and "v" in w) for w in front),
    )
    try:
        status = root.main([*front, *rest], prog_name="loractl", standalone_mode=False)
        flush()
    except BaseException as error:
        return _fail(error, telling)
    if status == 130:  # Typer's word for Ctrl+C
        return _fail(KeyboardInterrupt(), telling)
    return status if isinstance(status, int) else 0


def _takes_value(root: Any) -> frozenset[str]:
    """Options of the commands that are followed by a value."""
    groups = [c for c in root.commands.values() if hasattr(c, "commands")]
    commands = [c for group in (root, *groups) for c in group.commands.values()]
    parameters = [p for command in commands for p in command.params]
    valued = [p for p in parameters if p.param_type_name == "option" and not p.is_flag]
    return frozenset(name for p in valued for name in p.opts)


def _fail(error: BaseException, telling: Telling) -> int:
    """Tell a failure on stderr; returns its exit status.  The one border where all of them end."""
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        _forsake_stdout()
        return 141
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if shows_help(error):
        complain(error.format_message())  # type: ignore[attr-defined]
        return 2
    trouble = _explain(error, telling.command)
    if isinstance(error, OSError):
        try:
            flush()
        except OSError:
            _forsake_stdout()
    if trouble.code in ("bug", "dashboard_failed") and telling.verbose:
        traceback.print_exception(error)
    _report(trouble, telling)
    return trouble.exit


def _explain(error: BaseException, command: str) -> Trouble:
    match error:
        case ApiError() | Failed():
            hint = error.hint or next_step(error.code, command)
            return Trouble(error.code, error.message, hint=hint, details=error.details)
        case Unreachable():
            advice = advise(error)
            code = "unreachable_denied" if advice.exit == 5 else "unreachable"
            cause = f"cannot reach lorad at {error.host}: {advice.cause}" if advice.cause else error
            return Trouble(code, str(cause), why=advice.why, hint=advice.hint)
        case Broken():
            return Trouble(error.code, str(error), hint=error.hint)
        case Usage():
            return Trouble("usage", str(error), hint=error.hint or f"{command} --help")
        case UnicodeError():
            return Trouble("usage", "an argument is not UTF-8 text", hint=f"{command} --help")
        case Interrupted():
            return Trouble("interrupted", str(error))
        case KeyboardInterrupt() | typer.Abort():
            return Trouble("interrupted", "what the daemon had begun goes on")
        case msgspec.MsgspecError():
            message = f"the daemon's answer is not what this loractl knows: {error}"
            return Trouble("other_version", message, hint="loractl version")
        case OSError():
            what = f"{error.strerror or error}: {error.filename or ''}"
            path = "look at the path, and who may read and write it"
            hint = path if error.filename else "look at where the output goes: a disk may be full"
            return Trouble("os_error", what.rstrip(": "), hint=hint)
    if isinstance(error, ClickException):
        message, hint = told(error, command)
        return Trouble("usage", message, hint=hint)
    what = f"{type(error).__name__}: {error}"
    return Trouble("bug", f"loractl failed: {what}", hint="add -v, and report what it prints")


def _report(trouble: Trouble, telling: Telling) -> None:
    """One error on stderr: cause, reason, next step."""
    if not trouble.message:
        return
    if telling.as_json:
        body = {
            "code": trouble.code,
            "message": trouble.message,
            "why": trouble.why,
            "hint": trouble.hint,
            "details": trouble.details,
        }
        encoding = getattr(sys.stderr, "encoding", None)
        complain(json_text({"error": body}, encoding, indent=-1))
        return
    if trouble.code == "interrupted":
        complain(f"interrupted; {trouble.message}")
        return
    tags = [trouble.details.get("reason", ""), trouble.code if telling.verbose else ""]
    tag = "".join(f"  [{one_line(word)}]" for word in tags if word)
    complain(f"error: {one_line(trouble.message)}{tag}")
    if trouble.why:
        complain(f"  why: {one_line(trouble.why)}")
    if trouble.hint:
        complain(f"  try: {one_line(trouble.hint)}")


def _forsake_stdout() -> None:
    """Nobody reads it any more, or it is full: Python's last flush must not fail as well."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
