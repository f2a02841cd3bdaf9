"""`loractl top --once`: one board as plain text, in the order of the overview.

Goes in: a board, glyphs, perhaps how wide a line may be.  Comes out: lines without a colour or a
command for the terminal.  Sections that have nothing to say are left out, but for the slots.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lorad.tui.draw import (
    UNKNOWN,
    Glyphs,
    age,
    bar,
    clock,
    count,
    cut,
    duration,
    fit,
    inert,
    pace,
    percent,
    rate,
    ratio,
    size,
    size_of,
    sparkline,
    stacked,
    width_of,
)
from lorad.tui.served import pools
from lorad.wire import EventItem
from lorad.wire_status import ModelStatus, PoolPicture
from lorad.wire_stream import CHURN_BUCKET_SECONDS, Board, Drain, Slot, Spread

#: Rows of a list that may be long.
MAX_ROWS = 10
SPARK_WIDTH, BAR_WIDTH, POOL_WIDTH = 30, 12, 40
_PER_MINUTE = 60 // CHURN_BUCKET_SECONDS
_POOL = (
    ("kv_active", "KV in use"),
    ("kv_cached", "KV cached"),
    ("adapter_active", "adapters in use"),
    ("adapter_idle", "adapters idle"),
    ("free", "free"),
)


def lines(board: Board, glyphs: Glyphs, width: int | None = None, *, host: str = "") -> list[str]:
    """The whole board; nothing is cut where `width` is None.  `host`: where it was asked for, said
    of a gateway without sockets."""
    out: list[str] = []
    summary = partial(_summary, host=host)
    for section in (summary, _slots, _churn, _drains, _cache, _requests, _health, _events):
        part = list(section(board, glyphs))
        if part and out:
            out.append("")
        out += part
    return [line.rstrip() if width is None else cut(line.rstrip(), width, glyphs) for line in out]


# ----------------------------------------------------------------- sections
def _summary(board: Board, glyphs: Glyphs, *, host: str) -> Iterator[str]:
    s, load, machine = board.status, board.load, board.machine
    state = s.state.upper() + (f" ({inert(s.reason)})" if s.reason else "")
    gpu = f"{inert(s.device)} {inert(s.device_name)}".rstrip()
    busy = "" if machine.gpu_busy is None else f" {percent(machine.gpu_busy)}"
    yield _spaced(
        f"lorad {s.version}",
        state,
        f"pid {s.pid}",
        f"up {age(s.uptime_seconds)}",
        *([f"base {inert(s.model)} {s.dtype}"] if len(s.models) < 2 else []),
        f"{gpu}{busy}",
        f"unix:{inert(s.admin_socket)}" if s.admin_socket else inert(host),
        clock(board.time),
    )
    yield from _models(s.models)
    yield _spaced(
        f"req/s {load.requests_per_second:.1f}",
        f"tok/s {rate(load.tokens_per_second)}",
        f"prompt tok/s {rate(load.prompt_tokens_per_second)}",
        f"{word} tok/s {rate(load.pooled_tokens_per_second)}" if (word := pools(s)) else "",
        f"run {s.running}",
        f"wait {s.waiting}",
        _spread("TTFT", load.first_token),
        _spread("between tokens", load.inter_token),
        _spread("queued", load.queue),
    )
    if load.tokens_history:
        yield f"tok/s   {sparkline(load.tokens_history, SPARK_WIDTH * 2, glyphs)}".rstrip()
    yield from _pool(s.pool, glyphs)
    yield _spaced(
        f"VRAM {size_of(machine.gpu_used_bytes, machine.gpu_total_bytes)}",
        f"adapters in RAM {size_of(s.ram_used_bytes, s.ram_limit_bytes)}",
        f"host {size_of(machine.host_used_bytes, machine.host_total_bytes)}",
        f"daemon {percent(machine.daemon_cpu)} {size(machine.daemon_rss_bytes)}",
        f"engine {percent(machine.engine_cpu)} {size(machine.engine_rss_bytes)}",
    )


def _models(models: Sequence[ModelStatus]) -> Iterator[str]:
    """Of several, a line each; of one with several engines, a line for each of those."""
    for one in models:
        if len(models) > 1:
            yield _model(one)
        for each in one.replicas:
            yield _spaced(
                f"replica {each.name}",
                each.state.upper() + (f" ({inert(each.reason)})" if each.reason else ""),
                inert(each.device_name),
                f"run {each.running}",
                f"wait {each.waiting}",
                f"slots {each.slots_used}/{each.slots_total}",
                f"restarts {each.engine_restarts}" if each.engine_restarts else "",
            )


def _model(one: ModelStatus) -> str:
    state = one.state.upper() + (f" ({inert(one.reason)})" if one.reason else "")
    return _spaced(
        f"model   {inert(one.name)}",
        state,
        f"{one.dtype} on {inert(one.device)}",
        "/".join(map(inert, one.tasks)),
        f"run {one.running}",
        f"wait {one.waiting}",
        f"slots {one.slots_used}/{one.slots_total}",
        f"restarts {one.engine_restarts}" if one.engine_restarts else "",
    )


def _pool(pool: PoolPicture, glyphs: Glyphs) -> Iterator[str]:
    if not pool.total:
        return
    amounts = [getattr(pool, name) for name, _ in _POOL]
    drawn = "".join(stacked(amounts, POOL_WIDTH, glyphs))
    yield f"pool    {drawn} of {size(pool.total * pool.block_bytes)}"
    parts = zip(glyphs.pool, _POOL, amounts, strict=True)
    yield "        " + _spaced(
        *(f"{mark} {word} {percent(ratio(n, pool.total))}" for mark, (_, word), n in parts)
    )


def _slots(board: Board, glyphs: Glyphs) -> Iterator[str]:
    s = board.status
    draining = sum(row.state == "draining" for row in board.slots.values())
    counts = f"{s.slots_used}/{s.slots_total} used  {s.pinned} pinned  {draining} draining"
    yield _title(f"SLOTS  {counts}")
    rows = sorted(board.slots.values(), key=lambda r: (r.slot is None, r.slot or 0, r.name))
    if rows:
        more = [_MODEL] if any(row.model for row in rows) else []
        more += [_REPLICA] if any(row.replicas for row in rows) else []
        guessed = DRAFTS if any(row.life_draft_tokens for row in rows) else ()
        yield from _table([*SLOTS[:2], *more, *SLOTS[2:-2], *guessed, *SLOTS[-2:]], rows, glyphs)
    else:
        yield "no adapter is resident"


def _churn(board: Board, glyphs: Glyphs) -> Iterator[str]:
    churn = board.churn
    if not (any(churn.loads) or any(churn.evictions) or churn.recent):
        return
    yield _title("CHURN  10 min")
    for word, counts in (("load", churn.loads), ("evict", churn.evictions)):
        last = sum(counts[-_PER_MINUTE:])
        yield f"{word:<8}{sparkline(counts, SPARK_WIDTH, glyphs)}  {sum(counts)}, {last}/min"
    yield f"thrash  {churn.thrashes} loaded again soon after an eviction"
    most = sorted(churn.reasons.items(), key=lambda item: (-item[1], item[0]))
    if most:
        yield f"why     {_spaced(*(f'{inert(why)} {n}' for why, n in most))}"
    if churn.top:
        yield f"top     {_spaced(*(f'{inert(name)} {n}' for name, n in churn.top))}"
    if churn.recent:
        last_load = churn.recent[0]
        speed = ratio(last_load.num_bytes, last_load.seconds)
        yield (
            f"last    {inert(last_load.name)} from {last_load.source}: {size(last_load.num_bytes)}"
            f" in {duration(last_load.seconds)}{_after(pace(speed))}"
            f", {age(last_load.ago_seconds)} ago"
        )


def _drains(board: Board, glyphs: Glyphs) -> Iterator[str]:
    if not board.drains:
        return
    yield _title("DRAIN")
    yield from _table(DRAINS, list(board.drains.values()), glyphs)


def _cache(board: Board, glyphs: Glyphs) -> Iterator[str]:
    load, life = board.load, board.status.prefix
    if not (load.query_tokens or life.query_tokens):
        return
    share = ratio(load.hit_tokens, load.query_tokens)
    whole = ratio(life.hit_tokens, life.query_tokens)
    yield _title("PREFIX CACHE  60 s")
    saved = f", {duration(life.saved_seconds)} of prefill saved" if life.saved_seconds else ""
    yield (
        f"all     {bar(share, BAR_WIDTH, glyphs)} {percent(share)} of"
        f" {count(load.query_tokens)} tokens; since the start {percent(whole)} of"
        f" {count(life.query_tokens)}{saved}"
    )
    asked = [row for row in board.slots.values() if row.query_tokens]
    asked.sort(key=lambda row: (-row.hit_tokens, -row.query_tokens, row.name))
    yield from _table(CACHES, asked[:MAX_ROWS], glyphs)


def _requests(board: Board, glyphs: Glyphs) -> Iterator[str]:
    if not board.requests:
        return
    rows = sorted(board.requests.values(), key=lambda row: (-row.age_seconds, row.id))
    more = f"  the longest {MAX_ROWS} of {board.num_requests}" if len(rows) > MAX_ROWS else ""
    yield _title(f"REQUESTS  {board.status.running} run  {board.status.waiting} wait{more}")
    yield from _table(REQUESTS, rows[:MAX_ROWS], glyphs)


def _health(board: Board, glyphs: Glyphs) -> Iterator[str]:
    wrong = [check for check in board.health.checks if check.level != "ok"]
    if not (wrong or board.health.reload_error):
        return
    yield _title("HEALTH")
    for check in wrong:
        hint = f"; try {inert(check.hint)}" if check.hint else ""
        yield f"{check.level:<6}{inert(check.name)}: {inert(check.message)}{hint}"
    if board.health.reload_error:
        yield f"error reload: {inert(board.health.reload_error)}"


def _events(board: Board, glyphs: Glyphs) -> Iterator[str]:
    if not board.events:
        return
    yield _title("EVENTS  the newest first")
    yield from _table(EVENTS, board.events[: -MAX_ROWS - 1 : -1], glyphs, headings=False)


# ----------------------------------------------------------------- tables
@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[..., str]  # of a row and glyphs
    right: bool = False


def _hit(row: Slot, glyphs: Glyphs) -> str:
    """The last minute's hit rate; of a load how far it is."""
    if row.state == "loading":
        tier = {"disk": "from disk", "ram": "from RAM"}.get(row.load_source, "waits")
        far = "" if row.load_fraction is None else f"{bar(row.load_fraction, 6, glyphs)} "
        return f"{far}{tier}{_after(pace(row.load_bytes_per_second))}"
    share = ratio(row.hit_tokens, row.query_tokens)
    return percent(share) if share is None else f"{bar(share, 6, glyphs)} {percent(share):>4}"


def _life(row: Slot, glyphs: Glyphs) -> str:
    return percent(ratio(row.life_hit_tokens, row.life_query_tokens))


def _progress(row: Drain, glyphs: Glyphs) -> str:
    if row.held:
        return "until loractl resume"
    left = ratio(row.running, row.begun_with)
    if left is None:
        return UNKNOWN
    share = 1 - left
    return f"{bar(share, BAR_WIDTH, glyphs)} {percent(share)}"


SLOTS: Sequence[_Column] = (
    _Column("SLOT", lambda r, g: UNKNOWN if r.slot is None else str(r.slot)),
    _Column("NAME", lambda r, g: r.name),
    _Column("REV", lambda r, g: r.rev[:6]),
    _Column("STATE", lambda r, g: r.state),
    _Column("PIN", lambda r, g: "P" if r.pinned else "-"),
    _Column("PRIO", lambda r, g: str(r.priority), right=True),
    _Column("RANK", lambda r, g: UNKNOWN if r.rank is None else str(r.rank), right=True),
    _Column("VRAM", lambda r, g: size(r.gpu_bytes), right=True),
    _Column("RUN", lambda r, g: str(r.running), right=True),
    _Column("WAIT", lambda r, g: str(r.waiting), right=True),
    _Column("HIT 60s", _hit),
    _Column("LIFE", _life, right=True),
    _Column("TOK/S", lambda r, g: rate(r.tokens_per_second), right=True),
    _Column("IDLE", lambda r, g: age(0.0 if r.running else r.idle_seconds), right=True),
)
#: Of tokens that were guessed ahead, before those of speed.
DRAFTS: Sequence[_Column] = (
    _Column("RIGHT", lambda r, g: percent(ratio(r.accepted_tokens, r.draft_tokens)), right=True),
    _Column("TOK/DRAW", lambda r, g: rate(r.tokens_per_draw), right=True),
)
_MODEL = _Column("MODEL", lambda r, g: r.model or UNKNOWN)
_REPLICA = _Column("REPLICA", lambda r, g: ",".join(r.replicas) or UNKNOWN)
DRAINS: Sequence[_Column] = (
    _Column("NAME", lambda r, g: r.name or "the daemon"),
    _Column("REV", lambda r, g: r.rev[:6] + (f" {g.to} {r.next_rev[:6]}" if r.next_rev else "")),
    _Column("CAUSE", lambda r, g: r.cause),
    _Column("RUN", lambda r, g: f"{r.running} of {r.begun_with}", right=True),
    _Column("FOR", lambda r, g: age(r.seconds), right=True),
    _Column("LIMIT", lambda r, g: age(r.limit_seconds), right=True),
    _Column("PROGRESS", _progress),
)
CACHES: Sequence[_Column] = (
    _Column("NAME", lambda r, g: r.name),
    _Column("HIT 60s", _hit),
    _Column("ASKED", lambda r, g: count(r.query_tokens), right=True),
    _Column("LIFE", _life, right=True),
    _Column("ASKED", lambda r, g: count(r.life_query_tokens), right=True),
)
REQUESTS: Sequence[_Column] = (
    _Column("ID", lambda r, g: r.id),
    _Column("ADAPTER", lambda r, g: r.adapter or f"({r.model or 'base'})"),
    _Column("STATE", lambda r, g: r.state),
    _Column("AGE", lambda r, g: age(r.age_seconds), right=True),
    _Column("PROMPT", lambda r, g: count(r.prompt_tokens), right=True),
    _Column("CACHED", lambda r, g: count(r.cached_tokens), right=True),
    _Column("MADE", lambda r, g: count(r.generated_tokens), right=True),
    _Column("OF", lambda r, g: count(r.max_tokens), right=True),
    _Column("TOK/S", lambda r, g: rate(r.tokens_per_second), right=True),
    _Column("TENANT", lambda r, g: r.tenant or "-"),
    _Column("CLIENT", lambda r, g: r.client),
)
EVENTS: Sequence[_Column] = (
    _Column("TIME", lambda r, g: clock(r.time)),
    _Column("LEVEL", lambda r, g: r.level),
    _Column("TYPE", lambda r, g: r.type),
    _Column("NAME", lambda r, g: r.name),
    _Column("MESSAGE", lambda r, g: _happened(r)),
)


def _table(
    columns: Sequence[_Column], rows: Sequence[object], glyphs: Glyphs, *, headings: bool = True
) -> Iterator[str]:
    """Lines, each column as wide as its widest cell."""
    grid = [[inert(c.cell(row, glyphs)) for c in columns] for row in rows]
    if headings:
        grid.insert(0, [c.heading for c in columns])
    widths = [max((width_of(row[i]) for row in grid), default=0) for i in range(len(columns))]
    for row in grid:
        cells = zip(row, widths, columns, strict=True)
        yield "  ".join(fit(text, width, right=c.right) for text, width, c in cells).rstrip()


def _happened(event: EventItem) -> str:
    where = f"replica {event.replica}" if event.replica else ""
    return _spaced(where, event.message, f"({event.cause})" if event.cause else "")


def _title(text: str) -> str:
    return f"-- {text} --"


def _spaced(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _spread(word: str, spread: Spread) -> str:
    """Nothing where nothing was measured."""
    if not spread.count:
        return ""
    return f"{word} p50 {duration(spread.p50)} p99 {duration(spread.p99)}"


def _after(word: str) -> str:
    return word and f" {word}"
