"""The commands about adapters: ls ps show add load evict pin unpin set rm.

Goes in: names and options.  Comes out: rows from the admin socket, and results one a name.  Knows
the wire and nothing behind it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lorad import wire
from lorad.cli.complete import any_name, cold_name, resident_name
from lorad.cli.options import seconds
from lorad.cli.output import (
    UNKNOWN,
    Column,
    age_of,
    human_age,
    human_bytes,
    human_ratio,
    note,
    plain,
    print_items,
    print_json,
    print_line,
    print_pairs,
)
from lorad.cli.session import Failed, Session, session
from lorad.errors import meaning

SHORT_REV = 8

Many = Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=any_name)]
Resident = Annotated[
    list[str] | None, typer.Argument(metavar="NAME...", autocompletion=resident_name)
]
Cold = Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=cold_name)]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]


def register(app: typer.Typer) -> None:
    """Hang the commands on the root."""
    for command in (ls, ps, show, add, load, evict, pin, unpin, set_, rm):
        app.command(command.__name__.rstrip("_"))(command)


# ----------------------------------------------------------------- columns
def _short(rev: str | None) -> str:
    return rev[:SHORT_REV] if rev else UNKNOWN


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _pin(adapter: wire.Adapter) -> str:
    return "P" if adapter.pinned else UNKNOWN


_TARGETS = Column[wire.Adapter]("TARGETS", lambda a: ",".join(a.targets) or UNKNOWN, wide=True)
_SOURCE = Column[wire.Adapter]("SOURCE", lambda a: a.source, wide=True)
_LOADS = Column[wire.Adapter]("LOADS", lambda a: str(a.loads), wide=True, right=True)
_EVICTIONS = Column[wire.Adapter]("EVICTIONS", lambda a: str(a.evictions), wide=True, right=True)

LS: Sequence[Column[wire.Adapter]] = (
    Column("NAME", lambda a: a.name),
    Column("TENANT", lambda a: a.tenant or UNKNOWN),
    Column("STATE", lambda a: a.state),
    Column("PIN", _pin),
    Column("PRIO", lambda a: str(a.priority), right=True),
    Column("RANK", lambda a: _number(a.rank), right=True),
    Column("SIZE", lambda a: human_bytes(a.num_bytes), right=True),
    Column("REV", lambda a: _short(a.rev)),
    Column("CANDIDATE", lambda a: _short(a.candidate_rev), wide=True),
    Column("LAST-USED", lambda a: human_age(age_of(a.last_used_at)), right=True),
    Column("REASON", lambda a: a.reason or UNKNOWN, wide=True),
    _TARGETS,
    _SOURCE,
    _LOADS,
    _EVICTIONS,
)
PS: Sequence[Column[wire.Adapter]] = (
    Column("SLOT", lambda a: _number(a.slot), right=True),
    Column("NAME", lambda a: a.name),
    Column("REV", lambda a: _short(a.rev)),
    Column("STATE", lambda a: a.state),
    Column("PIN", _pin),
    Column("PRIO", lambda a: str(a.priority), right=True),
    Column("RANK", lambda a: _number(a.rank), right=True),
    Column("VRAM", lambda a: human_bytes(a.num_bytes), right=True),
    Column("RUN", lambda a: str(a.running), right=True),
    Column("WAIT", lambda a: str(a.waiting), right=True),
    Column("HIT%", lambda a: human_ratio(a.prefix_hit_tokens, a.prefix_query_tokens), right=True),
    Column("IDLE", lambda a: human_age(a.idle_seconds), right=True),
    _TARGETS,
    _SOURCE,
    Column("LOADED", lambda a: human_age(a.loaded_seconds), wide=True, right=True),
    _LOADS,
    _EVICTIONS,
)


# ----------------------------------------------------------------- what is there
def ls(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="Only this state.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="k=v, repeatable.")] = None,
    sort: Annotated[str, typer.Option(help="Column to sort by.")] = "name",
    limit: Annotated[int, typer.Option(min=1, help="At most this many; 0 is all.")] = 1000,
) -> None:
    """List registered adapters."""
    s = session(context)
    labels = _labels(label)
    items: list[wire.Adapter] = []
    cursor: str | None = None
    total = 0
    while len(items) < limit:
        page = s.client.adapters(
            state=state, tenant=tenant, sort=sort.lower(), limit=min(500, limit), cursor=cursor
        )
        total = page.total
        items += [a for a in page.items if labels.items() <= a.labels.items()]
        cursor = page.cursor
        if cursor is None:
            break
    items = items[:limit]
    document = wire.AdapterPage(items=tuple(items), total=total, cursor=cursor)
    print_items(items, LS, s.options, document=document, name=lambda a: a.name)
    if cursor is not None:
        note(f"{len(items)} of {total} shown; --limit shows more", s.options)


def ps(
    context: typer.Context,
    wide: Annotated[bool, typer.Option("--wide", "-w", help="More columns.")] = False,
) -> None:
    """List adapters that are on the GPU, or on their way."""
    s = session(context)
    page = s.client.slots()
    columns = [Column(c.heading, c.cell, right=c.right) for c in PS] if wide else PS
    print_items(page.items, columns, s.options, document=page, name=lambda a: a.name)
    note(f"{page.slots_used} of {page.slots_total} slots used", s.options)


def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(autocompletion=any_name)],
) -> None:
    """Show one adapter: revisions, ranks, reasons, recent events."""
    s = session(context)
    detail = s.client.adapter(name)
    if s.options.machine:
        print_json(detail)
        return
    a = detail.adapter
    print_pairs(
        [
            ("name", a.name if a.display_name is None else f"{a.name}  (folder {a.display_name})"),
            ("state", a.state),
            ("model", a.model),
            ("tenant", a.tenant or UNKNOWN),
            ("source", a.source),
            ("pinned", "yes" if a.pinned else "no"),
            ("priority", str(a.priority)),
            ("labels", " ".join(f"{k}={v}" for k, v in sorted(a.labels.items())) or UNKNOWN),
            ("slot", _number(a.slot)),
            ("running", f"{a.running} running, {a.waiting} waiting"),
            ("used", f"{human_age(age_of(a.last_used_at))} ago" if a.last_used_at else "never"),
            ("loads", f"{a.loads} loads, {a.evictions} evictions"),
            ("prefix", f"{human_ratio(a.prefix_hit_tokens, a.prefix_query_tokens)} hit"),
        ]
    )
    if a.reason:
        print_pairs([("reason", f"{a.reason}: {a.reason_message or ''}")])
    for title, revision in (("serving", detail.serving), ("candidate", detail.candidate)):
        if revision is not None:
            print_line(f"{title}")
            print_pairs(_revision(revision))
    if detail.history:
        print_pairs([("earlier", " ".join(_short(rev) for rev in detail.history))])
    for event in detail.events:
        print_line(f"  {event.time}  {event.type}  {plain(event.message)}")


def _revision(r: wire.Revision) -> list[tuple[str, str]]:
    ranks = " ".join(f"{module}:{rank}" for module, rank in sorted(r.ranks.items()))
    scale = "alpha/sqrt(r)" if r.rslora else "alpha/r"
    rows = [
        ("  rev", r.rev),
        ("  rank", f"{r.rank}  ({ranks})"),
        ("  scaling", f"{scale}, alpha {r.alpha:g}"),
        ("  layers", str(r.num_layers)),
        ("  dtype", r.dtype),
        ("  size", f"{human_bytes(r.file_bytes)} file, {human_bytes(r.packed_bytes)} packed"),
        ("  cache", "its own prefixes" if r.changes_kv else "shares the base model's prefixes"),
    ]
    return rows + [("  warning", text) for text in r.warnings]


# ----------------------------------------------------------------- what is done
def add(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A PEFT folder; it is streamed to the daemon.")],
    name: Annotated[str | None, typer.Option(help="[TENANT/]NAME; default: the folder's.")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=100)] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Load, and never evict by itself.")] = False,
    load: Annotated[bool, typer.Option("--load", help="Load once registered.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Give a known name a new revision.")
    ] = False,
    label: Annotated[list[str] | None, typer.Option(help="k=v, repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate only.")] = False,
) -> None:
    """Register the adapter in a folder; prints its revision."""
    s = session(context)
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder; give the one with adapter_config.json")
    start = wire.UploadStart(
        name=name or folder.resolve().name.lower(),
        replace=replace,
        pin=pin,
        load=load,
        priority=priority,
        labels=_labels(label),
        dry_run=dry_run,
    )
    added = s.client.upload(folder, start, timeout=s.timeout(120.0))
    for warning in added.warnings:
        note(f"warning: {warning}", s.options)
    if s.options.machine:
        print_json(added)
    elif s.options.output == "name":
        print_line(plain(added.name))
    else:
        what = "valid" if dry_run else "unchanged" if added.unchanged else added.state
        print_line(f"{plain(added.name)}@{added.rev[:SHORT_REV]}  {what}")


def load(
    context: typer.Context,
    names: Cold,
    pin: Annotated[bool, typer.Option("--pin", help="And pin.")] = False,
    tier: Annotated[str, typer.Option(help="gpu or ram.")] = "gpu",
    wait: Wait = True,
) -> None:
    """Bring adapters to the GPU (or to host memory)."""
    if tier not in ("gpu", "ram"):
        raise typer.BadParameter(f"tier {tier!r}: choose gpu or ram")
    s = session(context)
    _act(s, "load", names, pin=pin, tier=tier, wait=wait)


def evict(
    context: typer.Context,
    names: Resident = None,
    every: Annotated[bool, typer.Option("--all", help="Every resident adapter.")] = False,
    to: Annotated[str, typer.Option(help="ram or disk.")] = "ram",
    drain_timeout: Annotated[str, typer.Option(help="How long running requests may take.")] = "30s",
    now: Annotated[bool, typer.Option("--now", help="Abort running requests.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if pinned.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be evicted.")] = False,
    wait: Wait = True,
) -> None:
    """Take adapters off the GPU, after their running requests."""
    if to not in ("ram", "disk"):
        raise typer.BadParameter(f"tier {to!r}: choose ram or disk")
    if not names and not every:
        raise typer.BadParameter("give a NAME, or --all")
    try:
        patience = seconds(drain_timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
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
    """Pin adapters: loaded now and at every start, never evicted by itself."""
    _act(session(context), "pin", names, no_load=no_load, wait=wait)


def unpin(context: typer.Context, names: Many) -> None:
    """Let adapters be evicted again."""
    _act(session(context), "unpin", names)


def set_(
    context: typer.Context,
    names: Many,
    priority: Annotated[int | None, typer.Option(min=0, max=100)] = None,
    label: Annotated[list[str] | None, typer.Option(help="k=v; k= removes it.")] = None,
) -> None:
    """Change priority and labels."""
    s = session(context)
    labels: dict[str, str | None] = {k: v or None for k, v in _labels(label).items()}
    if priority is None and not labels:
        raise typer.BadParameter("nothing to set: give --priority or --label")
    patch = wire.AdapterPatch(priority=priority, labels=labels)
    changed = [s.client.patch(name, patch).adapter for name in names]
    print_items(changed, LS, s.options, name=lambda a: a.name)


def rm(
    context: typer.Context,
    names: Many,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Keep its stored files.")
    ] = False,
) -> None:
    """Unregister adapters; requests in flight end first.  The source folder is never touched."""
    s = session(context)
    s.confirm("unregister", names)
    removed = [s.client.remove(name, keep_files=keep_files) for name in names]
    if s.options.machine:
        print_json(removed)
        return
    for item in removed:
        print_line(f"{plain(item.name)}  removed")


# ----------------------------------------------------------------- shared
def _labels(words: list[str] | None) -> dict[str, str]:
    labels = {}
    for word in words or ():
        key, found, value = word.partition("=")
        if not found or not key:
            raise typer.BadParameter(f"label {word!r}: write key=value")
        labels[key] = value
    return labels


RESULTS: Sequence[Column[wire.ItemResult]] = (
    Column("NAME", lambda r: r.name),
    Column("RESULT", lambda r: (r.state or "done") if r.ok else r.code),
    Column("REV", lambda r: _short(r.rev or None)),
)


def _act(s: Session, verb: str, names: list[str], **fields: Any) -> None:
    """Send one verb for many names; one failure of several is exit 1, a lone one its own code."""
    results = getattr(s.client, verb)(*names, timeout_s=s.timeout(60.0), **fields)
    failed = [r for r in results.items if not r.ok]
    if len(failed) == 1 and len(results.items) == 1 and not s.options.machine:
        raise Failed(failed[0])
    print_items(results.items, RESULTS, s.options, document=results, name=lambda r: r.name)
    for result in failed:
        hint = f"; try: {result.hint}" if result.hint else ""
        note(f"{result.name}: {result.message}{hint}", s.options)
    if failed:
        raise typer.Exit(meaning(failed[0].code).exit if len(results.items) == 1 else 1)
