"""The commands that change adapters: add load evict pin unpin set rm rollback.

Goes in: names and options.  Comes out: one result a name.  Knows the wire and nothing behind it.
"""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lorad import wire
from lorad.cli.complete import any_name, cold_name, resident_name
from lorad.cli.listing import checked_name, labels_of, short
from lorad.cli.options import seconds
from lorad.cli.output import (
    Column,
    complain,
    human_bytes,
    note,
    one_line,
    plain,
    print_document,
    print_items,
    print_line,
)
from lorad.cli.session import Failed, Session, Usage, session
from lorad.wire_operate import RollbackAsk

#: Reasons that are clearer beside what the folder holds; not all of it was sent.
_NOT_FOUND = ("E_NO_CONFIG", "E_NO_WEIGHTS")
#: What older PEFT saved, under any of these names.  It is never sent, so only here is it seen.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = (
    "where you trust it, PeftModel.from_pretrained(base, DIR).save_pretrained(DIR) converts it"
)
#: An adapter has the first and one of the others; a folder of adapters has none of them.
_OWN_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors")

Many = Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=any_name)]
Resident = Annotated[
    list[str] | None, typer.Argument(metavar="NAME...", autocompletion=resident_name)
]
Cold = Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=cold_name)]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]
Priority = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, max=100, help="Who is scheduled first and evicted last."),
]


def register(app: typer.Typer) -> None:
    """Hang the commands on the root."""
    for command in (add, load, evict, pin, unpin, set_, rm, rollback):
        app.command(command.__name__.rstrip("_"))(command)


def add(
    context: typer.Context,
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="A PEFT folder; it is streamed to the daemon."),
    ],
    name: Annotated[
        str | None, typer.Option(metavar="[TENANT/]NAME", help="Default: the folder's name.")
    ] = None,
    priority: Priority = None,
    pin: Annotated[bool, typer.Option("--pin", help="Load, and never evict by itself.")] = False,
    load: Annotated[bool, typer.Option("--load", help="Load once registered.")] = False,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The base it is for; default: the one that it fits."),
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Give a known name a new revision.")
    ] = False,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate only.")] = False,
) -> None:
    """Register the adapter in a folder; prints its revision."""
    s = session(context)
    if len(folders) > 1:  # taken by the parser so that this can be said of it
        hint = 'for dir in DIR ...; do loractl add "$dir"; done, or copy them into the inbox'
        raise Usage(f"add takes one folder at a time, not {len(folders)}", hint=hint)
    folder = folders[0]
    if not folder.is_dir():
        raise Usage(f"{folder} is not a folder; give the one with adapter_config.json")
    start = wire.UploadStart(
        name=name if name is not None else folder.resolve().name.lower(),
        model=model,
        replace=replace,
        pin=pin,
        load=load,
        priority=priority,
        labels=labels_of(label),
        dry_run=dry_run,
    )
    added = _upload(s, folder, start)
    for warning in added.warnings:
        note(f"warning: {warning}", s.options)
    if s.options.machine:
        print_document(added, s.options)
    elif s.options.output == "name":
        print_line(plain(added.name))
    else:
        print_line(f"{plain(added.name)}@{short(added.rev)}  {_became(added)}")


def _became(added: wire.Added) -> str:
    """What adding it came to."""
    if added.dry_run:
        return "valid"
    if not added.num_bytes:
        return "unchanged" if added.unchanged else plain(added.state)
    size, took = human_bytes(added.num_bytes), added.load_seconds
    what = "unchanged" if added.unchanged else "registered"
    if took is None:
        return f"{what}; it was resident already ({size})"
    return f"{what} and resident: {size}, loaded in {took:.2f} s"


def _upload(s: Session, folder: Path, start: wire.UploadStart) -> wire.Added:
    from lorad.caller import ApiError

    try:
        return s.client.upload(folder, start, timeout=s.timeout(120.0))
    except ApiError as error:
        if error.code == "adapter_invalid" and error.details.get("reason") in _NOT_FOUND:
            there = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
            note(f"in {folder}: {there}", s.options)
            if pickle := _pickle_in(folder):
                error.hint = f"{pickle} is a pickle, and not opened: {_CONVERT}"
        child = _first_adapter_in(folder)
        if child is not None and error.details.get("reason") in (*_NOT_FOUND, "E_NESTED"):
            error.hint = f"loractl add {shlex.quote(str(child))}"
        raise


def _pickle_in(folder: Path) -> str:
    """Its name, of a folder that has its weights in that form alone; "" of any other.  The daemon,
    which sees no weights at all, would advise to rename it."""
    names = sorted(p.name for p in folder.iterdir())
    found = [name for name in names if name.endswith(_PICKLES)]
    return "" if any(n.endswith(".safetensors") for n in names) or not found else found[0]


def _first_adapter_in(folder: Path) -> Path | None:
    """Of a folder that holds adapters and is none itself, the first by name.  Beside an adapter's
    own files a subfolder is a checkpoint of it, and not what was meant."""
    if any(os.path.lexists(folder / name) for name in _OWN_FILES):
        return None
    children = sorted(p for p in folder.iterdir() if os.path.isfile(p / _OWN_FILES[0]))
    return children[0] if children else None


def load(
    context: typer.Context,
    names: Cold,
    pin: Annotated[bool, typer.Option("--pin", help="And pin.")] = False,
    tier: Annotated[str, typer.Option(metavar="gpu|ram", help="How near.")] = "gpu",
    wait: Wait = True,
) -> None:
    """Bring adapters to the GPU (or to host memory)."""
    _one_of(tier, "gpu", "ram")
    _act(session(context), "load", names, pin=pin, tier=tier, wait=wait)


def evict(
    context: typer.Context,
    names: Resident = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every resident adapter; pinned ones with --force.")
    ] = False,
    to: Annotated[str, typer.Option(metavar="ram|disk", help="How far.")] = "ram",
    drain_timeout: Annotated[
        str, typer.Option(metavar="TIME", help="How long running requests may take.")
    ] = "30s",
    now: Annotated[bool, typer.Option("--now", help="Abort running requests.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if pinned.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be evicted.")] = False,
    wait: Wait = True,
) -> None:
    """Take adapters off the GPU, after their running requests."""
    _one_of(to, "ram", "disk")
    if bool(names) == every:
        raise Usage("give a NAME, or --all" if not names else "give names or --all, not both")
    try:
        patience = seconds(drain_timeout)
    except ValueError as error:
        raise Usage(str(error)) from None
    s = session(context)
    if not dry_run and (every or force):
        s.confirm("evict every adapter" if every else "evict pinned adapters", names or ())
    _act(
        s,
        "evict",
        names or [],
        all=every,
        to=to,
        drain_timeout_s=patience,
        now=now,
        force=force,
        dry_run=dry_run,
        wait=wait,
    )


def pin(
    context: typer.Context,
    names: Many,
    no_load: Annotated[bool, typer.Option("--no-load", help="Mark only.")] = False,
    wait: Wait = True,
) -> None:
    """Keep adapters on the GPU: loaded now and at every start."""
    _act(session(context), "pin", names, no_load=no_load, wait=wait)


def unpin(context: typer.Context, names: Many) -> None:
    """Let adapters be evicted again."""
    _act(session(context), "unpin", names)


def set_(
    context: typer.Context,
    names: Many,
    priority: Priority = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Repeatable; KEY= removes it.")
    ] = None,
) -> None:
    """Change priority and labels."""
    s = session(context)
    labels: dict[str, str | None] = {k: v or None for k, v in labels_of(label).items()}
    if priority is None and not labels:
        raise Usage("nothing to set: give --priority or --label")
    patch = wire.AdapterPatch(priority=priority, labels=labels)

    def change(name: str) -> tuple[str, str]:
        a = s.client.patch(name, patch).adapter
        return a.state, a.rev or ""

    _report(s, _one_by_one(names, change))


def rm(
    context: typer.Context,
    names: Many,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Keep the stored files, too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
) -> None:
    """Unregister adapters; requests in flight end first.  The source folder is never touched."""
    s = session(context)

    def remove(name: str) -> tuple[str, str]:
        return "removed", s.client.remove(name, keep_files=keep_files).rev or ""

    def look(name: str) -> tuple[str, str]:
        return "would be removed", s.client.adapter(name).adapter.rev or ""

    if not dry_run:
        s.confirm("unregister", names)
    _report(s, _one_by_one(names, look if dry_run else remove))


def rollback(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=any_name)],
    rev: Annotated[
        str, typer.Argument(metavar="[REV]", help="As show lists them; default: the one before.")
    ] = "",
) -> None:
    """Behind a gateway: have a name mean an earlier revision again."""
    from lorad.caller import ApiError

    s = session(context)
    ask = RollbackAsk(name=checked_name(name), rev=rev)
    try:
        added = s.client.rollback(ask, timeout=s.timeout(600.0))
    except ApiError as error:
        if error.code == "not_found":
            error.message = "rollback is for a gateway, and this is a daemon"
            error.hint = "a daemon keeps no earlier files: loractl add DIR --replace"
        raise
    if s.options.machine:
        print_document(added, s.options)
    else:
        print_line(f"{plain(added.name)}@{short(added.rev)}  {plain(added.state)}")


# ----------------------------------------------------------------- shared
def _one_of(word: str, *known: str) -> None:
    if word not in known:
        raise Usage(f"{word!r}: choose {' or '.join(known)}")


RESULTS: Sequence[Column[wire.ItemResult]] = (
    Column("NAME", lambda r: r.name, shrinks=True),
    Column("RESULT", lambda r: (r.state or "done") if r.ok else r.code),
    Column("REV", lambda r: short(r.rev)),
)
OPERATION = Column[wire.ItemResult]("OPERATION", lambda r: r.operation)


def _act(s: Session, verb: str, names: list[str], **fields: Any) -> None:
    """Send one verb for many names."""
    _report(s, getattr(s.client, verb)(*names, timeout_s=s.timeout(60.0), **fields))


def _one_by_one(names: list[str], do: Callable[[str], tuple[str, str]]) -> wire.Results:
    """(state, rev) of each name, or why not; one refusal does not stop the others."""
    from lorad.caller import ApiError

    items = []
    for name in dict.fromkeys(names):
        try:
            state, rev = do(checked_name(name))
            items.append(wire.ItemResult(name=name, ok=True, state=state, rev=rev))
        except (ApiError, Failed) as error:
            items.append(
                wire.ItemResult(
                    name=name,
                    ok=False,
                    code=error.code,
                    message=error.message,
                    hint=error.hint,
                    details=error.details,
                )
            )
    return wire.Results(items=tuple(items))


def _report(s: Session, results: wire.Results) -> None:
    """Print each result.  A lone failure is the command's; among several, exit 1."""
    items = results.items
    failed = [r for r in items if not r.ok]
    if len(items) > 1 or not failed or s.options.machine:
        columns = [*RESULTS, OPERATION] if any(r.operation for r in items) else RESULTS
        print_items(items, columns, s.options, document=results, name=lambda r: r.name)
    if results.skipped:
        note(f"{len(results.skipped)} pinned skipped: --force evicts them too", s.options)
    if len(items) == 1 and failed:
        raise Failed(failed[0])
    if not failed:
        return
    if not s.options.machine:
        for result in failed:
            complain(f"error: {one_line(result.name)}: {one_line(result.message)}")
            if result.hint:
                complain(f"  try: {one_line(result.hint)}")
        raise typer.Exit(1)
    message = f"{len(failed)} of {len(items)} failed; stdout says which"
    raise Failed(wire.ItemResult(name="", ok=False, code="partly_failed", message=message))
