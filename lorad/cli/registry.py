"""registry check, backup, restore, export, import, rebuild: who exists, as a whole.

Goes in: a file, or nothing.  Comes out: a verdict, a copy, lines of JSON, what an import or a
restore came to.  Through the daemon where one runs; else on the files of the configuration, which
`restore` and `rebuild` always need to themselves.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lorad.cli.output import (
    UNKNOWN,
    Column,
    complain,
    human_bytes,
    note,
    one_line,
    print_document,
    print_items,
    print_line,
    print_pairs,
)
from lorad.cli.registry_files import Files, lines_of, read_lines, save
from lorad.cli.session import Failed, Session, Usage, session
from lorad.wire import ItemResult
from lorad.wire_registry import (
    Imported,
    RegistryCheck,
    RegistryEntry,
    RegistryExport,
    RegistryImport,
    RegistryImported,
    RegistryRestored,
)

registry = typer.Typer(
    help="The registry of adapters: check, back up, restore, take along.",
    no_args_is_help=True,
)
#: Lines of one call: far below the bytes that a body may have.
BATCH = 500

State = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="Of a daemon that is not running.")
]
StoreDir = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Its adapters; DIR/store if not given."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would come of it.")]

ENTRIES: Sequence[Column[RegistryEntry]] = (
    Column("NAME", lambda e: e.name),
    Column("STATE", lambda e: e.state),
    Column("PIN", lambda e: "P" if e.pinned else UNKNOWN),
    Column("PRIO", lambda e: str(e.priority), right=True),
    Column("REV", lambda e: (e.rev or UNKNOWN)[:8]),
    Column("LABELS", lambda e: ",".join(f"{k}={v}" for k, v in e.labels.items()) or UNKNOWN),
)
IMPORTED: Sequence[Column[Imported]] = (
    Column("NAME", lambda i: i.name),
    Column("RESULT", lambda i: i.action),
    Column("CODE", lambda i: i.code or UNKNOWN),
)


def register(app: typer.Typer) -> None:
    """Hang the group on the root."""
    app.add_typer(registry, name="registry")


@registry.command("check")
def check(context: typer.Context, state_dir: State = None, store: StoreDir = None) -> None:
    """Hold every page and reference against the store. Exit 1 if something is wrong."""
    s = session(context)
    files = Files(s, state_dir, store)
    found = files.check() if files.alone() else s.client.check_registry()
    if s.options.machine:
        print_document(found, s.options)
    elif s.options.output == "name":
        print_line(one_line(found.path))
    else:
        _show_check(found, s)
    if not found.ok:
        raise typer.Exit(1)


def _show_check(found: RegistryCheck, s: Session) -> None:
    bad = [b for b in found.backups if not b.good]
    print_pairs(
        [
            ("registry", f"{found.path}, {human_bytes(found.num_bytes)}"),
            ("schema", f"{found.version}, last change {found.generation}"),
            ("adapters", f"{found.adapters} names, {found.revisions} revisions"),
            ("backups", f"{len(found.backups)}, {len(bad)} damaged"),
            ("result", "ok" if found.ok else f"{len(found.problems)} problems"),
        ]
    )
    for problem in found.problems:
        complain(f"problem: {one_line(problem)}")
    if found.problems:
        note("a start mends what it can: loractl registry rebuild does so now", s.options)


@registry.command("backup")
def backup(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    state_dir: State = None,
    store: StoreDir = None,
) -> None:
    """Write one consistent copy of the registry to FILE. Adapters may come and go meanwhile."""
    s = session(context)
    if file.is_dir():
        raise Usage(f"{file} is a folder: name a file in it")
    if not file.parent.is_dir():
        raise Usage(f"{file.parent} is no folder: make it first")
    if file.exists() and not file.is_file():
        raise Usage(f"{file} is no file: its place would be taken")
    if file.exists():
        s.confirm(f"replace {file}")
    files = Files(s, state_dir, store)
    if files.alone():
        files.backup(file)
    else:
        save(s.client.backup_registry(timeout=s.timeout(600.0)), file)
    size = file.stat().st_size
    if s.options.machine:
        told = {"schema": "lorad/registry-backup.v1", "file": str(file), "num_bytes": size}
        print_document(told, s.options)
    else:
        print_line(f"{one_line(file)}  {human_bytes(size)}")


@registry.command("restore")
def restore(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    live: Annotated[
        bool,
        typer.Option("--live", help="Through the daemon: names and settings of FILE are taken in."),
    ] = False,
    dry_run: DryRun = False,
    state_dir: State = None,
    store: StoreDir = None,
) -> None:
    """Put a backup in the registry's place. What was there is kept beside it."""
    s = session(context)
    files = Files(s, state_dir, store)
    entries = files.read_backup(file)
    if live:
        _take_in(s, None, entries, dry_run, f"take {len(entries)} names of {file} in")
        return
    if dry_run:
        page = RegistryExport(items=entries)
        print_items(entries, ENTRIES, s.options, document=page, name=lambda e: e.name)
        return
    files.need_alone()
    s.confirm(f"replace the registry in {files.place.state} by {file}, of {len(entries)} names")
    _tell(files.restore(file), s)


@registry.command("rebuild")
def rebuild(
    context: typer.Context,
    cards_only: Annotated[
        bool, typer.Option("--cards-only", help="Of the store alone, and of no backup.")
    ] = False,
    state_dir: State = None,
    store: StoreDir = None,
) -> None:
    """Make the registry anew of its newest good backup and the store. Says what is lost."""
    s = session(context)
    files = Files(s, state_dir, store)
    files.need_alone()
    source = "the store alone" if cards_only else "the newest good backup and the store"
    s.confirm(f"make the registry in {files.place.state} anew from {source}")
    _tell(files.rebuild(cards_only=cards_only), s)


def _tell(done: RegistryRestored, s: Session) -> None:
    if s.options.machine:
        print_document(done, s.options)
        return
    pairs = [
        ("names", str(done.names)),
        ("from", done.restored_from or "the cards in the store"),
        ("kept", done.kept_aside or "nothing was there"),
    ]
    print_pairs(pairs)
    for lost in done.lost:
        complain(f"lost: {one_line(lost)}")
    for text in done.notes:
        note(text, s.options)


@registry.command("export")
def export(context: typer.Context, state_dir: State = None, store: StoreDir = None) -> None:
    """Print names, pins, priorities and labels, a JSON object a line."""
    s = session(context)
    files = Files(s, state_dir, store)
    page = files.export() if files.alone() else s.client.export_registry()
    if s.options.output in ("wide", "json", "name"):
        print_items(page.items, ENTRIES, s.options, document=page, name=lambda e: e.name)
        return
    for line in lines_of(page.items):
        print_line(line)


@registry.command("import")
def take_in(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Of an export; - is stdin.")],
    dry_run: DryRun = False,
    state_dir: State = None,
    store: StoreDir = None,
) -> None:
    """Take names, pins, priorities and labels of an export in. Contents come from the store."""
    s = session(context)
    entries = read_lines(file)
    files = Files(s, state_dir, store)
    alone = files if files.alone() else None
    _take_in(s, alone, entries, dry_run, f"take {len(entries)} names of {file} in")


def _take_in(
    s: Session,
    files: Files | None,
    entries: Sequence[RegistryEntry],
    dry_run: bool,
    question: str,
) -> None:
    """Through the daemon, or on `files`.  A lone failure is the command's; of several, exit 1."""
    if not dry_run:
        s.confirm(question)
    items: list[Imported] = []
    if files is not None:
        items += files.take_in(entries, dry_run=dry_run)
    else:
        for start in range(0, len(entries), BATCH):
            ask = RegistryImport(items=tuple(entries[start : start + BATCH]), dry_run=dry_run)
            items += s.client.import_registry(ask, timeout=s.timeout(600.0)).items
    done = RegistryImported(items=tuple(items), dry_run=dry_run)
    print_items(items, IMPORTED, s.options, document=done, name=lambda i: i.name)
    if not s.options.machine:
        for item in items:
            if item.message and (len(items) > 1 or item.ok):
                complain(one_line(item.message))
    failed = [item for item in items if not item.ok]
    if failed and len(items) == 1:
        one = failed[0]
        told = ItemResult(
            name=one.name, ok=False, code=one.code, message=one.message, hint=one.hint
        )
        raise Failed(told)
    if failed:
        text = f"{len(failed)} of {len(items)} were not taken in; stdout says which"
        raise Failed(ItemResult(name="", ok=False, code="partly_failed", message=text))
