"""The commands about the daemon: status ping version events.

Goes in: the admin socket.  Comes out: a summary, a heartbeat, versions, what happened.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from lorad import __version__, wire
from lorad.cli.output import (
    UNKNOWN,
    Column,
    human_age,
    human_bytes,
    plain,
    print_items,
    print_json,
    print_line,
    print_pairs,
)
from lorad.cli.session import session


def register(app: typer.Typer) -> None:
    """Hang the commands on the root."""
    for command in (status, ping, version, events):
        app.command(command.__name__)(command)


def status(context: typer.Context) -> None:
    """Summarise the daemon: state, model, pool, slots."""
    s = session(context)
    st = s.client.status()
    if s.options.machine:
        print_json(st)
        return
    p = st.pool
    kv = f"{p.kv_active} active, {p.kv_cached} cached"
    weights = f"{p.adapter_active} active, {p.adapter_idle} idle"
    engine = f"engine pid {st.engine_pid or UNKNOWN}"
    counts = ", ".join(f"{n} {state}" for state, n in sorted(st.adapters.items())) or "none"
    print_pairs(
        [
            ("lorad", f"{st.version}  {st.state}" + (f" ({st.reason})" if st.reason else "")),
            ("up", f"{human_age(st.uptime_seconds)}, pid {st.pid}, {engine}"),
            ("model", f"{st.model}  {st.dtype} on {st.device} ({st.device_name})"),
            ("base", st.base),
            ("context", f"{st.max_model_len} tokens"),
            ("adapters", counts),
            ("slots", f"{st.slots_used} of {st.slots_total} used, {st.pinned} pinned"),
            ("pool", f"{p.total} blocks of {human_bytes(p.block_bytes)}, {p.free} free"),
            ("  kv", f"{kv} (blocks of {p.block_size} tokens)"),
            ("  adapters", weights),
            ("ram", f"{human_bytes(st.ram_used_bytes)} of {human_bytes(st.ram_limit_bytes)}"),
            ("requests", f"{st.running} running, {st.waiting} waiting"),
            ("tokens", f"{st.generated_tokens} generated, {st.prompt_tokens} of prompts"),
            ("steps", f"{st.forward_passes} forward passes, {st.preemptions} preemptions"),
            ("restarts", str(st.engine_restarts)),
            ("inference", f"unix://{st.inference_socket}"),
            ("admin", f"unix://{st.admin_socket}"),
            ("inbox", st.inbox or UNKNOWN),
            ("state dir", st.state_dir),
        ]
    )


def ping(context: typer.Context) -> None:
    """Exit 0 if the daemon answers and is ready, 10 if it is not ready, 3 if it is not there."""
    s = session(context)
    reason = s.client.ready()
    ready = not reason
    if s.options.machine:
        print_json({"schema": "lorad/ping.v1", "ready": ready, "reason": reason})
    else:
        print_line("ready" if ready else f"not ready: {plain(reason)}")
    if not ready:
        raise typer.Exit(10)


def version(context: typer.Context) -> None:
    """Versions of this program, the daemon and the API."""
    s = session(context)
    server = s.client.version()
    if s.options.machine:
        print_json({"schema": "lorad/version.v1", "client": __version__, "server": server})
        return
    print_pairs([("client", __version__), ("server", server.version), ("api", server.api)])


EVENTS: Sequence[Column[wire.EventItem]] = (
    Column("TIME", lambda e: e.time[11:19] or e.time),
    Column("LEVEL", lambda e: e.level.upper()),
    Column("TYPE", lambda e: e.type),
    Column("NAME", lambda e: e.name or UNKNOWN),
    Column("REV", lambda e: e.rev[:8] or UNKNOWN),
    Column("CAUSE", lambda e: e.cause or UNKNOWN),
    Column("MESSAGE", lambda e: e.message),
)


def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen.")] = False,
    since: Annotated[int, typer.Option(help="Only events after this id.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 100,
    kind: Annotated[str | None, typer.Option("--type", help="Only types that begin so.")] = None,
    name: Annotated[str | None, typer.Option(help="Only this adapter.")] = None,
) -> None:
    """What happened: loads, evictions, replacements, refusals."""
    s = session(context)

    def wanted(event: wire.EventItem) -> bool:
        return (kind is None or event.type.startswith(kind)) and name in (None, event.name)

    page = s.client.recent_events(since=since, limit=limit)
    items = [e for e in page.items if wanted(e)]
    if follow and s.options.output == "json":
        raise typer.BadParameter("--follow prints one record a line: use -o jsonl")
    document = wire.EventPage(items=tuple(items), instance_id=page.instance_id)
    print_items(items, EVENTS, s.options, document=document, name=lambda e: str(e.id))
    if not follow:
        return
    last = page.items[-1].id if page.items else since
    for _, event in s.client.follow_events(str(last)):
        if not wanted(event):
            continue
        if s.options.machine:
            print_items([event], EVENTS, s.options, name=lambda e: str(e.id))
        else:
            cells = (plain(c.cell(event)) for c in EVENTS)
            print_line("  ".join(cells))
        flush()


def flush() -> None:
    """Followers read line by line, also through a pipe."""
    import sys

    sys.stdout.flush()
