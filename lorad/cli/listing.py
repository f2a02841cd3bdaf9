"""The pictures of adapters: ls ps show.

Goes in: filters and names.  Comes out: rows and details from the admin socket.  Changes nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
import typer

from lorad import wire
from lorad.cli.complete import adapter_tenant, any_name, state_name
from lorad.cli.output import (
    UNKNOWN,
    Column,
    age_of,
    human_age,
    human_bytes,
    human_prefix,
    human_ratio,
    note,
    one_line,
    plain,
    print_document,
    print_items,
    print_line,
    print_pairs,
)
from lorad.cli.revision import pooling_words, revision_rows
from lorad.cli.session import Failed, Session, Usage, session
from lorad.spelling import is_reference, split_digest

SHORT_REV = 8
_PAGE = 500
#: Headings of `ls` whose words differ from the server's.
_SORTS = {"prio": "priority", "pin": "pinned", "last-used": "last_used"}
#: What `ls --sort` completes; what else can be sorted by has no heading.
_SORTED_BY = ("name", "tenant", "state", *_SORTS, "rank", "size", "created")


def register(app: typer.Typer) -> None:
    """Hang the commands on the root."""
    for command in (ls, ps, show):
        app.command(command.__name__)(command)


# ----------------------------------------------------------------- columns
def short(rev: str | None) -> str:
    """A revision as tables show it."""
    return rev[:SHORT_REV] if rev else UNKNOWN


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _pin(adapter: wire.Adapter) -> str:
    return "P" if adapter.pinned else UNKNOWN


def _vocabulary(a: wire.Adapter) -> str:
    """Whose tokenizer it has, and how many ids behind the base's."""
    more = f"+{a.extra_tokens}" if a.extra_tokens else ""
    return " ".join(filter(None, ("own" if a.own_tokenizer else "", more))) or UNKNOWN


_TARGETS = Column[wire.Adapter]("TARGETS", lambda a: ",".join(a.targets) or UNKNOWN, wide=True)
_SOURCE = Column[wire.Adapter]("SOURCE", lambda a: a.source, wide=True)
_LOADS = Column[wire.Adapter]("LOADS", lambda a: str(a.loads), wide=True, right=True)
_EVICTIONS = Column[wire.Adapter]("EVICTIONS", lambda a: str(a.evictions), wide=True, right=True)

LS: Sequence[Column[wire.Adapter]] = (
    Column("NAME", lambda a: a.name, shrinks=True),
    Column("TENANT", lambda a: a.tenant or UNKNOWN, drop=2),
    Column("STATE", lambda a: a.state),
    Column("REASON", lambda a: a.reason or UNKNOWN, wide=True),
    Column("PIN", _pin, drop=3),
    Column("PRIO", lambda a: str(a.priority), right=True, drop=7),
    Column("RANK", lambda a: _number(a.rank), right=True, drop=6),
    Column("SIZE", lambda a: human_bytes(a.num_bytes), right=True, drop=5),
    Column("REV", lambda a: short(a.rev), drop=1),
    Column("CANDIDATE", lambda a: short(a.candidate_rev), wide=True),
    Column("LAST-USED", lambda a: human_age(age_of(a.last_used_at)), right=True, drop=4),
    Column("VOCABULARY", lambda a: _vocabulary(a), wide=True),
    _TARGETS,
    _SOURCE,
    _LOADS,
    _EVICTIONS,
)
PS: Sequence[Column[wire.Adapter]] = (
    Column("SLOT", lambda a: _number(a.slot), right=True),
    Column("NAME", lambda a: a.name, shrinks=True),
    Column("REV", lambda a: short(a.rev), drop=4),
    Column("STATE", lambda a: a.state),
    Column("PIN", _pin, drop=1),
    Column("PRIO", lambda a: str(a.priority), right=True, drop=7),
    Column("RANK", lambda a: _number(a.rank), right=True, drop=6),
    Column("VRAM", lambda a: human_bytes(a.num_bytes), right=True, drop=5),
    Column("RUN", lambda a: str(a.running), right=True),
    Column("WAIT", lambda a: str(a.waiting), right=True),
    Column(
        "HIT%",
        lambda a: human_ratio(a.prefix_hit_tokens, a.prefix_query_tokens),
        right=True,
        drop=3,
    ),
    Column("IDLE", lambda a: human_age(a.idle_seconds), right=True, drop=2),
    _TARGETS,
    _SOURCE,
    Column("LOADED", lambda a: human_age(a.loaded_seconds), wide=True, right=True),
    _LOADS,
    _EVICTIONS,
    Column(
        "ACCEPT%", lambda a: human_ratio(a.accepted_tokens, a.draft_tokens), wide=True, right=True
    ),
    Column("TOK/DRAW", lambda a: _per_draw(a), wide=True, right=True),
)


# ----------------------------------------------------------------- lists
def _sort_words(incomplete: str) -> list[str]:
    minus = "-" if incomplete.startswith("-") else ""
    return [word for each in _SORTED_BY if (word := minus + each).startswith(incomplete)]


def ls(
    context: typer.Context,
    state: Annotated[
        str | None,
        typer.Option(metavar="STATE", help="Only this state.", autocompletion=state_name),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="TENANT", help="Only this tenant.", autocompletion=adapter_tenant),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Only adapters of this base.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only with it; repeatable.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="A heading; with - before it, the other way round.",
            autocompletion=_sort_words,
        ),
    ] = "name",
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="At most this many; 0 is all.")
    ] = 0,
) -> None:
    """List registered adapters."""
    s = session(context)
    wanted = labels_of(label)
    items: list[wire.Adapter] = []
    cursor: str | None = None
    total = 0
    waits: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    while True:
        missing = limit - len(items) if limit else _PAGE
        page = s.client.adapters(
            state=state,
            tenant=tenant,
            model=model,
            sort=_sort(sort),
            limit=_PAGE if wanted else min(_PAGE, missing),
            cursor=cursor,
        )
        total, cursor, waits = page.total, page.cursor, waits + page.inbox_waits
        nested += page.inbox_nested
        items += [a for a in page.items if wanted.items() <= a.labels.items()]
        if cursor is None or (limit and len(items) >= limit):
            break
    items = items[: limit or None]
    if wanted:
        cursor = None  # of the unfiltered list: of no use to the caller
        total = len(items)
    document = wire.AdapterPage(
        items=tuple(items), total=total, cursor=cursor, inbox_waits=waits, inbox_nested=nested
    )
    columns = _with_model(LS, items)
    print_items(items, columns, s.options, document=document, name=lambda a: a.name)
    if cursor is not None:
        note(f"{len(items)} of {total} shown", s.options)
    refused = sum(a.state == "quarantined" for a in items)
    if refused:
        note(f"{refused} quarantined: loractl show NAME says why", s.options)
    if waits:
        told = f"{len(waits)} more in the inbox could not be taken yet"
        note(f"{told}: loractl show {plain(waits[0])} says why", s.options)
    if nested:
        told = f"{len(nested)} with another adapter's folder in theirs, which is not served"
        note(f"{told}: loractl show {plain(nested[0])}", s.options)
    behind = [a.name for a in items if a.reason and a.state not in ("quarantined", "missing")]
    if behind:
        words = "serves" if len(behind) == 1 else "serve"
        told = f"{len(behind)} {words} earlier content, as the newest was refused"
        note(f"{told}: loractl show {plain(behind[0])}", s.options)


def _with_model(
    columns: Sequence[Column[wire.Adapter]], items: Sequence[wire.Adapter]
) -> Sequence[Column[wire.Adapter]]:
    """Behind the names: whose each is, where it is not the same for all; and on which replicas,
    where any is on one."""
    more: list[Column[wire.Adapter]] = []
    if len({a.model for a in items}) > 1:
        more.append(Column("MODEL", lambda a: a.model or UNKNOWN))
    if any(a.replicas for a in items):
        more.append(Column("REPLICA", lambda a: ",".join(a.replicas) or UNKNOWN))
    at = next(n for n, column in enumerate(columns) if column.heading == "NAME") + 1
    return (*columns[:at], *more, *columns[at:])


def _sort(heading: str) -> str:
    """A heading of the table as the server's word."""
    word = heading.lower()
    minus = "-" if word.startswith("-") else ""
    word = word.removeprefix("-")
    return minus + _SORTS.get(word, word)


def ps(
    context: typer.Context,
    wide: Annotated[bool, typer.Option("--wide", "-w", help="Same as -o wide.")] = False,
) -> None:
    """List adapters that are on the GPU, or on their way."""
    s = session(context)
    page = s.client.slots()
    items = sorted(page.items, key=lambda a: a.name)
    page = msgspec.structs.replace(page, items=tuple(items))
    options = s.options
    if wide and options.output == "table":
        options = replace(options, output="wide")
    columns = _with_model(PS, items)
    print_items(items, columns, options, document=page, name=lambda a: a.name)
    note(f"{page.slots_used} of {page.slots_total} slots used", options)


# ----------------------------------------------------------------- one
def show(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME[@REV]", autocompletion=any_name, show_default=False)
    ],
) -> None:
    """Show one adapter: revisions, ranks, reasons, recent events."""
    s = session(context)
    detail = _detail(s, name)
    if s.options.machine:
        print_document(detail, s.options)
        return
    if s.options.output == "name":
        print_line(plain(detail.adapter.name))
        return
    a = detail.adapter
    print_pairs(
        [
            ("name", a.name if a.display_name is None else f"{a.name}  (folder {a.display_name})"),
            ("state", a.state),
            *([("reason", one_line(f"{a.reason}: {a.reason_message or ''}"))] if a.reason else []),
            *([("inbox", one_line(detail.inbox_nested))] if detail.inbox_nested else []),
            ("model", a.model),
            *([("pooling", pooling_words(detail.pooling))] if detail.pooling else []),
            ("tenant", a.tenant or UNKNOWN),
            ("source", a.source),
            ("pinned", "yes" if a.pinned else "no"),
            ("priority", str(a.priority)),
            ("labels", " ".join(f"{k}={v}" for k, v in sorted(a.labels.items())) or UNKNOWN),
            *(_live(a) if a.rev else ()),
        ]
    )
    for title, revision in (("serving", detail.serving), ("candidate", detail.candidate)):
        if revision is not None:
            print_line(title)
            print_pairs(revision_rows(revision))
    earlier = [rev for rev in detail.history if rev not in (a.rev, a.candidate_rev)]
    if earlier:
        print_pairs([("earlier", " ".join(short(rev) for rev in earlier))])
    if detail.events:
        print_line("events")
    for event in detail.events:
        print_line("  " + "  ".join(filter(None, _told(event))))


def _per_draw(a: wire.Adapter) -> str:
    """Tokens that a step tells of one sequence: the one that it draws, and the guesses that were
    right; `--` where none were made."""
    draws = a.generated_tokens - a.accepted_tokens
    return f"{a.generated_tokens / draws:.2f}" if a.draft_tokens and draws > 0 else "--"


def _live(a: wire.Adapter) -> tuple[tuple[str, str], ...]:
    """What its serving revision does; one that was refused at once has none, and nothing to say."""
    prefix = human_prefix(
        a.prefix_query_tokens, a.prefix_hit_tokens, a.prefix_lost_tokens, a.prefix_saved_seconds
    )
    share = human_ratio(a.accepted_tokens, a.draft_tokens)
    drafts = f"{share} of {a.draft_tokens} tokens right"
    if (each := _per_draw(a)) != "--":
        drafts += f", {each} tokens a draw"
    return (
        ("slot", _number(a.slot)),
        *([("replica", ", ".join(a.replicas))] if a.replicas else []),
        ("requests", f"{a.running} running, {a.waiting} waiting"),
        ("used", f"{human_age(age_of(a.last_used_at))} ago" if a.last_used_at else "never"),
        ("loads", f"{a.loads}, evictions {a.evictions}, thrashes {a.thrashes}"),
        ("prefix", prefix),
        *([("drafts", drafts)] if a.draft_tokens else []),
    )


def _told(event: wire.EventItem) -> tuple[str, ...]:
    where = f"replica {event.replica}" if event.replica else ""
    return tuple(map(one_line, (event.time, event.type, where, event.cause, event.message)))


def _detail(s: Session, asked: str) -> wire.AdapterDetail:
    """What NAME[@REV] means; with a REV, of that revision alone."""
    name, digest = split_digest(asked)
    detail = s.client.adapter(checked_name(name))
    if name == asked:
        return detail
    if len(digest) < SHORT_REV or set(digest) - set("0123456789abcdef"):
        raise Usage(f"{asked!r}: a revision is {SHORT_REV} or more hex digits after @")
    serving, candidate = (
        revision if revision is not None and revision.rev.startswith(digest) else None
        for revision in (detail.serving, detail.candidate)
    )
    if serving is None and candidate is None:
        raise Failed(_no_revision(detail, digest))
    return msgspec.structs.replace(detail, serving=serving, candidate=candidate)


def _no_revision(detail: wire.AdapterDetail, digest: str) -> wire.ItemResult:
    name, rev = detail.adapter.name, detail.adapter.rev
    past = any(earlier.startswith(digest) for earlier in detail.history)
    what = f"{digest} is an earlier revision of" if past else f"there is no revision {digest} of"
    now = f"it serves {short(rev)}" if rev else "it serves none"
    return wire.ItemResult(
        name=name,
        ok=False,
        code="model_not_found",
        message=f"{what} {name!r}; {now}",
        hint=f"loractl show {name}",
    )


# ----------------------------------------------------------------- arguments
def checked_name(name: str) -> str:
    """A name that can stand in a URL; what the daemon could never have is refused here."""
    if not is_reference(name) and any(part in ("", ".", "..") for part in name.split("/")):
        message = f"no adapter named {name!r}"
        missing = wire.ItemResult(
            name=name, ok=False, code="model_not_found", message=message, hint="loractl ls"
        )
        raise Failed(missing)
    return name


def labels_of(words: list[str] | None) -> dict[str, str]:
    """`k=v` words as a dict; `k=` is an empty value."""
    labels = {}
    for word in words or ():
        key, found, value = word.partition("=")
        if not found or not key:
            raise Usage(f"label {word!r}: write key=value")
        labels[key] = value
    return labels
