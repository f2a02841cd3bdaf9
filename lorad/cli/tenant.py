"""`loractl tenant`: who may use what, and how much of it: ls add rm set rotate-key.

Goes in: names, globs, limits.  Comes out: rows; a key on stdout alone, once.  Knows the wire and
nothing behind it.
"""

import pwd
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from lorad import client_tenants as calls
from lorad import wire
from lorad.cli.complete import tenant_name
from lorad.cli.options import seconds
from lorad.cli.output import (
    UNKNOWN,
    Column,
    age_of,
    complain,
    human_age,
    note,
    one_line,
    print_document,
    print_items,
    print_line,
)
from lorad.cli.session import Failed, Session, Usage, session
from lorad.wire_tenants import Tenant, TenantKey, TenantPatch, TenantStart

app = typer.Typer(help="Tenants: who may use which adapters, and how much.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="NAME", autocompletion=tenant_name, show_default=False)
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="What it may use: acme/*, hf:acme/*; repeatable, '' none."),
]
Uid = Annotated[
    list[str] | None,
    typer.Option(metavar="USER", help="Whose processes it is, name or number; repeatable."),
]
Rpm = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Requests a minute, 0 any number.")
]
Tpm = Annotated[int | None, typer.Option(metavar="N", min=0, help="Tokens a minute, 0 any number.")]
Queue = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="How many may wait, 0 limits.queue_per_tenant."),
]
Most = Annotated[
    int | None,
    typer.Option("--max-priority", metavar="N", min=0, max=100, help="No request has more."),
]
Weight = Annotated[
    float | None,
    typer.Option(
        metavar="W",
        min=0.001,  # and with it no NaN, which JSON cannot tell from nothing
        max=1000.0,
        help="Its share where tenants wait: 2 gets twice what 1 gets.",
    ),
]
Base = Annotated[
    bool | None,
    typer.Option(
        "--base/--no-base", help="May it use base models? No: those alone that --adapters names."
    ),
]


#: What is said of a key that would be carried about in vain.
IGNORED = (
    'but nobody looks at keys: [inference] auth is "peer", tenants are known by their uids alone; '
    '"peer+key" takes both, and needs a restart'
)


def register(root: typer.Typer) -> None:
    """Hang the group on the root."""
    for name, command in (
        *(("ls", ls), ("add", add), ("rm", rm), ("set", set_)),
        ("rotate-key", rotate_key),
    ):
        app.command(name)(command)
    root.add_typer(app, name="tenant")


def _number(count: int) -> str:
    return str(count) if count else UNKNOWN


TENANTS: Sequence[Column[Tenant]] = (
    Column("NAME", lambda t: t.name),
    Column("KEY-ID", lambda t: ",".join(key.id for key in t.keys) or UNKNOWN),
    Column("ADAPTERS", lambda t: ",".join(t.adapters) or UNKNOWN),
    Column("RPM", lambda t: _number(t.rpm), right=True),
    Column("LAST-USED", lambda t: human_age(age_of(t.last_used_at)), right=True),
    Column("UIDS", lambda t: ",".join(map(str, t.uids)) or UNKNOWN, wide=True),
    Column("BASE", lambda t: "yes" if t.base else "no", wide=True),
    Column("TPM", lambda t: _number(t.tokens_per_minute), wide=True, right=True),
    Column("QUEUE", lambda t: _number(t.queue), wide=True, right=True),
    Column("MAX-PRIO", lambda t: str(t.max_priority), wide=True, right=True),
    Column("WEIGHT", lambda t: f"{t.weight:g}", wide=True, right=True),
)


def ls(context: typer.Context) -> None:
    """List tenants."""
    s = session(context)
    page = calls.every(s.client)
    print_items(page.items, TENANTS, s.options, document=page, name=lambda t: t.name)


def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    adapters: Adapters = None,
    uid: Uid = None,
    base: Base = None,
    rpm: Rpm = None,
    tpm: Tpm = None,
    queue: Queue = None,
    max_priority: Most = None,
    weight: Weight = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Make no key: uids only.")] = False,
) -> None:
    """Add a tenant and print its key, which is shown this once.

    Without --adapters it may use those whose names begin with its own.
    """
    s = session(context)
    fields = _fields(adapters, uid, base, rpm, tpm, queue, max_priority, weight)
    made = calls.add(s.client, TenantStart(name=name, key=not no_key, **fields))
    _print_key(s, made)
    if len(calls.every(s.client).items) == 1:
        note("it is the first: who is no tenant is refused from now on", s.options)


def set_(
    context: typer.Context,
    name: Name,
    adapters: Adapters = None,
    uid: Uid = None,
    base: Base = None,
    rpm: Rpm = None,
    tpm: Tpm = None,
    queue: Queue = None,
    max_priority: Most = None,
    weight: Weight = None,
) -> None:
    """Change what a tenant is and may. What is repeatable is replaced as a whole."""
    s = session(context)
    fields = _fields(adapters, uid, base, rpm, tpm, queue, max_priority, weight)
    if not fields:
        raise Usage("nothing to set: give an option", hint="loractl tenant set --help")
    changed = calls.change(s.client, name, TenantPatch(**fields))
    print_items([changed], TENANTS, s.options, document=changed, name=lambda t: t.name)


def rm(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", autocompletion=tenant_name, show_default=False)
    ],
) -> None:
    """Remove tenants and their keys. Requests in flight end as they are."""
    s = session(context)
    chosen = list(dict.fromkeys(names))
    last = {t.name for t in calls.every(s.client).items} <= set(chosen)
    after = ", the last one: then whom the socket lets in may use everything" if last else ""
    s.confirm(f"remove tenants and their keys{after}", chosen)
    results = [_removed(s, name) for name in chosen]
    failed = [r for r in results if not r.ok]
    if len(results) == 1 and failed:
        raise Failed(failed[0])
    page = wire.Results(items=tuple(results))
    print_items(page.items, RESULTS, s.options, document=page, name=lambda r: r.name)
    if failed and s.options.machine:
        text = f"{len(failed)} of {len(results)} failed; stdout says which"
        raise Failed(wire.ItemResult(name="", ok=False, code="partly_failed", message=text))
    for result in failed:
        complain(f"error: {one_line(result.name)}: {one_line(result.message)}")
    if failed:
        raise typer.Exit(1)


def rotate_key(
    context: typer.Context,
    name: Name,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="So long the old key is good as well: 10m, 1d ...")
    ] = "0s",
) -> None:
    """Make a new key and print it, this once; the old one ends."""
    s = session(context)
    try:
        patience = seconds(grace)
    except ValueError as error:
        raise Usage(str(error)) from None
    _print_key(s, calls.rotate_key(s.client, name, patience))


# ----------------------------------------------------------------- shared
RESULTS: Sequence[Column[wire.ItemResult]] = (
    Column("NAME", lambda r: r.name),
    Column("RESULT", lambda r: r.state if r.ok else r.code),
)


def _removed(s: Session, name: str) -> wire.ItemResult:
    from lorad.caller import ApiError

    try:
        calls.remove(s.client, name)
    except ApiError as error:
        return wire.ItemResult(
            name=name, ok=False, code=error.code, message=error.message, hint=error.hint
        )
    return wire.ItemResult(name=name, ok=True, state="removed")


def _print_key(s: Session, made: TenantKey) -> None:
    """stdout is the key and nothing else, so that it can go straight into a file."""
    if s.options.machine:
        print_document(made, s.options)
        return
    if made.key:
        print_line(made.key)
        note(f"the key {made.tenant.keys[0].id} of {made.tenant.name}: it is shown once", s.options)
        if s.client.config().settings.get("inference", {}).get("auth") == "peer":
            note(IGNORED, s.options)


def _fields(
    adapters: list[str] | None,
    uid: list[str] | None,
    base: bool | None,
    rpm: int | None,
    tpm: int | None,
    queue: int | None,
    max_priority: int | None,
    weight: float | None,
) -> dict[str, Any]:
    """What was given."""
    given: dict[str, Any] = {
        "adapters": _all(adapters, str),
        "uids": _all(uid, uid_of),
        "base": base,
        "rpm": rpm,
        "tokens_per_minute": tpm,
        "queue": queue,
        "max_priority": max_priority,
        "weight": weight,
    }
    return {name: value for name, value in given.items() if value is not None}


def _all(words: list[str] | None, read: Callable[[str], object]) -> tuple[object, ...] | None:
    """`''` is nothing at all, so that a list can be emptied."""
    return tuple(read(word) for word in words if word) if words else None


def uid_of(word: str) -> int:
    """Of a user's name or number; Usage if there is no such user here."""
    if word.isascii() and word.isdecimal():
        return int(word)
    try:
        return pwd.getpwnam(word).pw_uid
    except KeyError:
        raise Usage(f"no user {word!r} on this machine", hint="give the number: id -u") from None
