"""config show, check, path, default: what the daemon goes by, and what one started here would.

Goes in: the admin socket, or files and the environment.  Comes out: settings with their origins, or
what is wrong with them.  A daemon that runs is asked: it may have been started with other
variables, and its files may have changed since.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from lorad import wire
from lorad.cli.output import Column, Table, complain, note, print_document, print_items, print_line
from lorad.cli.session import Failed, session
from lorad.errors import BadConfig, StartError
from lorad.wire_operate import RunningConfig

if TYPE_CHECKING:
    from lorad.config import Settings

PATH_SCHEMA = "lorad/config-path.v1"

config = typer.Typer(help="The configuration: show, check, path, default.", no_args_is_help=True)

File = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="Read it last.")]


@dataclass(frozen=True, slots=True)
class Row:
    """A setting as a line shows it."""

    key: str
    value: str
    origin: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A place where settings may come from; later ones win."""

    path: str
    read: bool


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """`loractl config path --json`."""

    schema: str = PATH_SCHEMA
    items: tuple[Source, ...]


VALUES: Sequence[Column[Row]] = (
    Column("KEY", lambda r: r.key),
    Column("VALUE", lambda r: r.value),
)
ORIGINS: Sequence[Column[Row]] = (*VALUES, Column("ORIGIN", lambda r: r.origin))
PATHS: Sequence[Column[Source]] = (
    Column("READ", lambda s: "yes" if s.read else "no"),
    Column("PATH", lambda s: s.path),
)


def register(app: typer.Typer) -> None:
    """Hang the group on the root."""
    app.add_typer(config, name="config")


@config.command("show")
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="And where each is from.")] = False,
    here: Annotated[
        bool, typer.Option("--here", help="Of a daemon that would be started here and now.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="The same, with this file read last."),
    ] = None,
) -> None:
    """Print every setting of the daemon. What waits for a restart is noted."""
    s = session(context)
    running = s.client.config() if not here and file is None else _of_a_start(file)
    if s.options.machine:
        print_document(running, s.options)
        return
    rows = _rows(running.settings, running.origins)
    if s.options.output == "name":
        for row in rows:
            print_line(row.key)
    else:
        wanted = ORIGINS if origin or s.options.output == "wide" else VALUES
        Table(wanted, s.options).print(rows)
    for key, value in running.needs_restart.items():
        note(f"needs a restart: {key} = {_spelled(key, value)}", s.options)


@config.command("check")
def check(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Read last, as with lorad --config.")
    ] = None,
) -> None:
    """Check the configuration and the base's files. Exit 2 if a start would refuse them."""
    s = session(context)
    settings = _load(file)
    try:
        from lorad.checks import check_all, described, doubts  # reads a tokenizer

        check_all(settings)
    except StartError as error:
        raise _failed(error) from None
    for doubt in doubts(settings):
        complain(f"warning: {doubt}")
    if s.options.machine:
        print_document({"schema": "lorad/config-check.v1", "ok": True}, s.options)
    else:
        for line in (*described(settings), "the configuration is valid"):
            print_line(line)


@config.command("path")
def path(context: typer.Context, file: File = None) -> None:
    """List the files that settings are read from. Later ones win, the environment over all."""
    from lorad.config_sources import places

    s = session(context)
    items = tuple(Source(path=str(p), read=p.is_file()) for p in places(file, os.environ))
    named = Sources(items=items)
    print_items(items, PATHS, s.options, document=named, name=lambda p: p.path)
    set_here = sorted(n for n in os.environ if n.startswith("LORAD_") and "__" in n)
    if set_here:
        note(f"over them: {', '.join(set_here)}", s.options)


@config.command("default")
def default(context: typer.Context) -> None:
    """Print a lorad.toml of all defaults, each key behind a #."""
    from lorad.config_sources import defaults, load_defaults

    s = session(context)
    if s.options.machine:
        print_document(_described(load_defaults()), s.options)
    else:
        print_line(defaults(), end="")


def _load(file: Path | None) -> "Settings":
    from lorad.config_sources import load

    try:
        return load(file, os.environ)[0]
    except BadConfig as error:
        raise _failed(error) from None


def _failed(error: StartError) -> Failed:
    return Failed(
        wire.ItemResult(
            name="", ok=False, code="invalid_config", message=error.message, hint=error.hint
        )
    )


def _of_a_start(file: Path | None) -> RunningConfig:
    return _described(_load(file))


def _described(settings: "Settings") -> RunningConfig:
    values = msgspec.to_builtins(settings)
    return RunningConfig(origins=values.pop("origins"), settings=values)


def _rows(settings: Mapping[str, Any], origins: Mapping[str, str]) -> list[Row]:
    """A daemon of another version may have sections and keys that are not known here."""
    tables = [
        (f"{section}.{number}" if number else section, table)
        for section, tables in settings.items()
        for number, table in enumerate([tables] if isinstance(tables, dict) else tables)
    ]
    dotted = [
        (f"{section}.{key}", value) for section, table in tables for key, value in table.items()
    ]
    return [Row(key, _spelled(key, value), origins.get(key, "default")) for key, value in dotted]


def _spelled(dotted: str, value: object) -> str:
    """As lorad.toml would have it."""
    from lorad.config_sections import SECTIONS, Model
    from lorad.config_sources import spelled
    from lorad.config_values import hints

    section, _, key = dotted.partition(".")
    key = key.rpartition(".")[2]  # models.1.name is the second one's
    kind = Model if section == "models" else SECTIONS.get(section)
    return spelled(hints(kind).get(key, object) if kind else object, value)
