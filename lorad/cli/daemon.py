"""The commands about the daemon: status ping version.

Goes in: the admin socket.  Comes out: a summary, a heartbeat, versions.
"""

from itertools import accumulate, zip_longest

import typer

from lorad import __version__, wire_status
from lorad.cli.output import (
    UNKNOWN,
    human_age,
    human_bytes,
    human_prefix,
    human_ratio,
    plain,
    print_document,
    print_line,
    print_pairs,
)
from lorad.cli.revision import pooling_words
from lorad.cli.session import session


def register(app: typer.Typer) -> None:
    """Hang the commands on the root."""
    for command in (status, ping, version):
        app.command(command.__name__)(command)


def status(context: typer.Context) -> None:
    """Summarise the daemon: state, model, pool, slots."""
    s = session(context)
    st = s.client.status()
    if s.options.machine:
        print_document(st, s.options)
        return
    p, c = st.pool, st.prefix
    kv = f"{p.kv_active} active, {p.kv_cached} cached"
    kv += f" (blocks of {p.block_size} tokens)" if p.block_size else ""
    hits = human_prefix(c.query_tokens, c.hit_tokens, c.lost_tokens, c.saved_seconds)
    pools = st.pooling if len(st.models) < 2 and not p.block_size else None  # keeps no KV
    weights = f"{p.adapter_active} active, {p.adapter_idle} idle"
    engines = [each for one in st.models for each in one.replicas or (one,)]
    pids = [each.engine_pid for each in engines] or [st.engine_pid]
    several = len(engines) > 1
    word = "engines" if several else "engine"
    engine = f"{word} pid {', '.join(str(pid or UNKNOWN) for pid in pids)}"
    counts = ", ".join(f"{n} {state}" for state, n in sorted(st.adapters.items())) or "none"
    print_pairs(
        [
            ("lorad", f"{st.version}  {st.state}" + (f" ({st.reason})" if st.reason else "")),
            ("up", f"{human_age(st.uptime_seconds)}, pid {st.pid}, {engine}"),
            *_models(st),
            ("adapters", counts),
            ("slots", f"{st.slots_used} of {st.slots_total} used, {st.pinned} pinned"),
            ("pool", f"{p.total} blocks of {human_bytes(p.block_bytes)}, {p.free} free"),
            *([] if pools else [("  kv", kv)]),
            ("  adapters", weights),
            *([] if pools else [("prefix", hits)]),
            *([] if pools or several else [("  reuse", _reuse(c))]),
            ("ram", f"{human_bytes(st.ram_used_bytes)} of {human_bytes(st.ram_limit_bytes)}"),
            ("requests", f"{st.running} running, {st.waiting} waiting"),
            ("tokens", f"{st.generated_tokens} generated, {st.prompt_tokens} of prompts"),
            ("steps", f"{st.forward_passes} forward passes, {st.preemptions} preemptions"),
            ("thrash", f"{st.thrashes} loads soon after an eviction"),
            *([("drained", ", ".join(map(plain, st.drained)))] if st.drained else []),
            ("restarts", str(st.engine_restarts)),
            ("inference", _address(st.inference_socket, s.client.host)),
            ("admin", _address(st.admin_socket, s.client.host)),
            ("inbox", st.inbox or UNKNOWN),
            ("state dir", st.state_dir),
            ("store dir", st.store_dir or UNKNOWN),
        ]
    )


def _address(socket: str, reached: str) -> str:
    """A gateway in Ray has no sockets, and both faces where it was `reached`."""
    return f"unix://{socket}" if socket else reached


def _where(one: wire_status.Status | wire_status.ModelStatus) -> str:
    """Of a CPU the device's name says nothing more."""
    named = f" ({one.device_name})" if one.device_name not in ("", one.device) else ""
    return f"{one.dtype} on {one.device}{named}"


def _models(st: wire_status.Status) -> list[tuple[str, str]]:
    """The model that is served; of several each with its own figures, and then all together."""
    if len(st.models) < 2:
        pools = st.pooling
        return [
            ("model", f"{st.model}  {_where(st)}" if st.model else "-"),
            ("base", st.base),
            *([("tasks", ", ".join(map(plain, st.tasks)))] if st.tasks else []),
            ("context", f"{st.max_model_len} tokens"),
            *(("vocabulary", told) for one in st.models if (told := _vocabulary(one))),
            *([("pooling", pooling_words(pools))] if pools else []),
            *([("guesses", _guesses(one.drafts)) for one in st.models if one.drafts]),
            *(_replicas(st.models[0]) if st.models else []),
        ]
    rows: list[tuple[str, str]] = []
    for one in st.models:
        state = one.state + (f" ({one.reason})" if one.reason else "")
        rows += [
            ("model", f"{one.name}  {_where(one)}  {state}"),
            ("  base", one.base),
            ("  tasks", f"{', '.join(one.tasks)}, {one.max_model_len} tokens"),
            *([("  vocabulary", told)] if (told := _vocabulary(one)) else []),
            *([("  pooling", pooling_words(one.pooling))] if one.pooling else []),
            *([("  guesses", _guesses(one.drafts))] if one.drafts else []),
            *([("  share", _share_words(one))] if one.device_share < 1 else []),
            ("  adapters", f"{one.num_adapters}, {one.slots_used} of {one.slots_total} slots used"),
            ("  pool", _pool_words(one.pool)),
            ("  requests", f"{one.running} running, {one.waiting} waiting"),
            ("  tokens", f"{one.generated_tokens} generated, {one.prompt_tokens} of prompts"),
            *(_replicas(one) or [("  engine", _process(one))]),
        ]
    return rows


def _vocabulary(one: wire_status.ModelStatus) -> str:
    """Room for adapters' own tokens; "" where there is none, and nobody has a tokenizer."""
    if not one.extra_vocab and not one.own_tokenizers:
        return ""
    used = f"adapters use {one.most_extra_tokens} of {one.extra_vocab} ids behind the base's"
    return f"{used}; own tokenizers: {one.own_tokenizers}"


def _replicas(model: wire_status.ModelStatus) -> list[tuple[str, str]]:
    """A line for each of its engines, where there are several."""
    return [
        (
            f"  replica {one.name}",
            f"{one.state}"
            + (f" ({one.reason})" if one.reason else "")
            + f", {one.device_name or UNKNOWN}, {one.slots_used} of {one.slots_total} slots used, "
            f"{one.running} running, {one.waiting} waiting, {_process(one)}",
        )
        for one in model.replicas
    ]


def _guesses(drafts: wire_status.DraftPicture) -> str:
    """Tokens ahead, by whose requests they were guessed for."""
    each = (
        ("the base", drafts.base_draft_tokens, drafts.base_accepted_tokens),
        ("adapters", drafts.lora_draft_tokens, drafts.lora_accepted_tokens),
    )
    said = "; ".join(
        f"{right} of {made} right for {whose} ({human_ratio(right, made)})"
        if made
        else f"none for {whose}"
        for whose, made, right in each
    )
    return f"{plain(drafts.kind)}, up to {drafts.longest} tokens a step: {said}"


def _share_words(one: wire_status.ModelStatus) -> str:
    return f"{one.device_share:.0%} of the device's time: a model that generates is at work there"


def _process(one: wire_status.ModelStatus | wire_status.ReplicaStatus) -> str:
    return f"pid {one.engine_pid or UNKNOWN}, {one.engine_restarts} restarts"


def _pool_words(pool: wire_status.PoolPicture | None) -> str:
    if pool is None:
        return "no engine"
    weights = f"adapters {pool.adapter_active} active and {pool.adapter_idle} idle"
    blocks = f"{pool.total} blocks of {human_bytes(pool.block_bytes)}"
    if not pool.block_size:
        return f"{blocks}, {weights}"
    kv = f"kv {pool.kv_active} active and {pool.kv_cached} cached"
    return f"{blocks} or {pool.block_size} tokens, {kv}, {weights}"


def _reuse(c: wire_status.PrefixPicture) -> str:
    """How large a cache has to be: most blocks filed between two uses of one."""
    sums = [sum(pair) for pair in zip_longest(c.found_blocks, c.lost_blocks, fillvalue=0)]
    so_far = list(accumulate(sums))
    if not so_far:
        return "no block was asked for twice"
    half, most = (
        next(2**n - 1 for n, count in enumerate(so_far) if count >= share * so_far[-1])
        for share in (0.5, 0.9)
    )
    if not most:
        return "9 of 10 blocks with no other between"
    first = f"within {half}" if half else "with no other between"
    return f"half of the blocks {first}, 9 of 10 within {most} others"


def ping(context: typer.Context) -> None:
    """Is it ready?  Exit 0 if so, 10 if not yet, 3 if it is away."""
    s = session(context)
    reason = s.client.ready()
    ready = not reason
    if s.options.machine:
        print_document({"schema": "lorad/ping.v1", "ready": ready, "reason": reason}, s.options)
    else:
        print_line("ready" if ready else f"not ready: {plain(reason)}")
    if not ready:
        raise typer.Exit(10)


def version(context: typer.Context) -> None:
    """Versions of this program, the daemon and the API."""
    s = session(context)
    try:
        server = s.client.version()
    finally:  # our own is known, whatever became of the daemon
        if not s.options.machine:
            print_pairs([("client", __version__)])
    if s.options.machine:
        document = {"schema": "lorad/version.v1", "client": __version__, "server": server}
        print_document(document, s.options)
        return
    print_pairs([("server", server.version), ("api   ", server.api)])
