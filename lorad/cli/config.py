"""config show, check, path, default: the configuration as a daemon started here would read it.

Goes in: files, the environment.  Comes out: settings with their origins, or what is wrong with
them.  Asks no daemon: one that runs may have been started with other variables.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from lorad import wire
from lorad.cli.output import Column, Table, note, print_document, print_items, print_line
from lorad.cli.session import Failed, session
from lorad.errors import BadConfig

if TYPE_CHECKING:
    from lorad.config import Settings

SHOW_SCHEMA = "lorad/config.v1"
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
    file: File = None,
) -> None:
    """Print every setting that a daemon started here would have."""
    s = session(context)
    settings = _load(file)
    if s.options.machine:
        print_document(_document(settings), s.options)
        return
    rows = _rows(settings)
    if s.options.output == "name":
        for row in rows:
            print_line(row.key)
        return
    wanted = ORIGINS if origin or s.options.output == "wide" else VALUES
    Table(wanted, s.options).print(rows)


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
        from lorad.base import check_base  # reads a tokenizer

        check_base(settings)
    except BadConfig as error:
        raise _failed(error) from None
    if s.options.machine:
        print_document({"schema": "lorad/config-check.v1", "ok": True}, s.options)
    else:
        print_line("the configuration is valid")


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
        print_document(_document(load_defaults()), s.options)
    else:
        print_line(defaults(), end="")


def _load(file: Path | None) -> "Settings":
    from lorad.config_sources import load

    try:
        return load(file, os.environ)[0]
    except BadConfig as error:
        raise _failed(error) from None


def _failed(error: BadConfig) -> Failed:
    return Failed(
        wire.ItemResult(
            name="", ok=False, code="invalid_config", message=error.message, hint=error.hint
        )
    )


def _document(settings: "Settings") -> dict[str, Any]:
    values = msgspec.to_builtins(settings)
    origins = values.pop("origins")
    return {"schema": SHOW_SCHEMA, "settings": values, "origins": origins}


def _rows(settings: "Settings") -> list[Row]:
    from lorad.config_sources import each

    return [
        Row(f"{section}.{key}", spelled, settings.origins.get(f"{section}.{key}", "default"))
        for section, key, spelled in each(settings)
    ]
