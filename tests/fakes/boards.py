"""Boards that are always the same, and what happens to them: for tests of the dashboard.

Goes in: which kind, and how many.  Comes out: a `Board`, `Delta`s to it, and `Script`, a source
that tells what a test has it tell.  Nothing here is random, and no clock is read.
"""

import queue
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from lorad.tui.messages import Changed, Message, Whole
from lorad.wire import EventItem
from lorad.wire_status import ModelStatus, PoolPicture, PrefixPicture, ReplicaStatus, Status
from lorad.wire_stream import (
    Board,
    Check,
    Churn,
    Delta,
    Drain,
    Health,
    Load,
    Loaded,
    Machine,
    RequestRow,
    Slot,
    Spread,
    TenantRow,
)

START = datetime(2026, 3, 1, 16, 32, 7, tzinfo=UTC)
INSTANCE = "inst-one"
MIB, GIB = 1 << 20, 1 << 30


def moment(seconds: float = 0.0) -> str:
    """As the wire has times, `seconds` after START."""
    return (START + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def slot(name: str, place: int | None, **fields: object) -> Slot:
    """A row; what is not said is that of a quiet adapter of rank 16."""
    rest: dict[str, object] = {
        "rev": f"{abs(hash_of(name)):06x}"[:6],
        "state": "idle",
        "pinned": False,
        "priority": 50,
        "rank": 16,
        "gpu_bytes": 84 * MIB,
        "idle_seconds": 41.0,
        "tenant": name.partition("/")[0] if "/" in name else None,
    }
    return Slot(name=name, slot=place, **(rest | fields))  # type: ignore[arg-type]


def hash_of(name: str) -> int:
    """The same in every process."""
    number = 5381
    for character in name:
        number = (number * 33 + ord(character)) % (1 << 24)
    return number


def busy(name: str, place: int, running: int, hit: int, asked: int, **fields: object) -> Slot:
    rest: dict[str, object] = {
        "state": "active",
        "running": running,
        "hit_tokens": hit,
        "query_tokens": asked,
        "life_hit_tokens": hit * 9,
        "life_query_tokens": asked * 10,
        "tokens_per_second": running * 216.0,
        "hits_history": (None, None, *(min(100, hit * 90 // asked + i) for i in range(10))),
        "saved_seconds": hit / 900.0,
        "loads": 1 + running % 3,
        "evictions": running % 3,
        "idle_seconds": 0.0,
    }
    return slot(name, place, **(rest | fields))


def status(**fields: object) -> Status:
    rest: dict[str, object] = {
        "version": "0.1.0",
        "instance_id": INSTANCE,
        "pid": 4121,
        "state": "ready",
        "reason": "",
        "uptime_seconds": 273840.0,
        "base": "Qwen3-8B",
        "model": "qwen3-8b",
        "device": "cuda:0",
        "device_name": "H100",
        "dtype": "bf16",
        "max_model_len": 32768,
        "inference_socket": "/run/lorad/lorad.sock",
        "admin_socket": "/run/lorad/admin.sock",
        "inbox": "/var/lib/lorad/inbox",
        "state_dir": "/var/lib/lorad",
        "adapters": {"registered": 40, "idle": 6, "active": 8},
        "slots_total": 16,
        "slots_used": 16,
        "pinned": 3,
        "running": 37,
        "waiting": 4,
        "ram_used_bytes": int(12.4 * GIB),
        "ram_limit_bytes": 32 * GIB,
        "pool": PoolPicture(
            total=4096,
            free=410,
            kv_active=1720,
            kv_cached=900,
            adapter_active=820,
            adapter_idle=246,
            block_bytes=2 * MIB,
            block_size=16,
        ),
        "prefix": PrefixPicture(query_tokens=900_000, hit_tokens=520_000),
        "generated_tokens": 12_000_000,
        "prompt_tokens": 80_000_000,
        "forward_passes": 900_000,
        "preemptions": 3,
    }
    return Status(**(rest | fields))  # type: ignore[arg-type]


def load(**fields: object) -> Load:
    rest: dict[str, object] = {
        "requests_per_second": 41.2,
        "tokens_per_second": 8900.0,
        "prompt_tokens_per_second": 51_000.0,
        "first_token": Spread(count=2400, p50=0.082, p90=0.21, p99=0.41),
        "inter_token": Spread(count=90_000, p50=0.0141, p90=0.019, p99=0.038),
        "queue": Spread(count=2400, p50=0.004, p90=0.02, p99=0.09),
        "query_tokens": 70_700,
        "hit_tokens": 41_000,
        "tokens_history": tuple(float(7000 + 400 * (i % 7)) for i in range(60)),
    }
    return Load(**(rest | fields))  # type: ignore[arg-type]


MACHINE = Machine(
    gpu_busy=0.71,
    gpu_used_bytes=int(52.1 * GIB),
    gpu_total_bytes=int(79.6 * GIB),
    daemon_cpu=0.34,
    daemon_rss_bytes=610 * MIB,
    engine_cpu=0.92,
    engine_rss_bytes=4 * GIB,
    host_used_bytes=71 * GIB,
    host_total_bytes=512 * GIB,
)

CHURN = Churn(
    loads=(0, 0, 1, 0, 2, 1, 0, 3, 5, 2, 1, 0) * 5,
    evictions=(0, 1, 0, 0, 1, 1, 0, 2, 4, 2, 0, 0) * 5,
    thrashes=2,
    reasons={"lru": 4, "priority": 1, "replace": 1},
    top=(("stark/jarvis", 3), ("hooli/box", 2)),
    load_bytes=9 * GIB,
    recent=(
        Loaded(name="acme/router", source="ram", num_bytes=42 * MIB, seconds=0.004, ago_seconds=3),
    ),
)


def event(number: int, type: str, name: str = "", message: str = "", **fields: object) -> EventItem:
    return EventItem(
        id=number,
        time=moment(number - 100),
        type=type,
        name=name,
        message=message,
        **fields,  # type: ignore[arg-type]
    )


EVENTS = (
    event(31, "pin.set", "umbrella/triage", "slot 5", cause="uid 1001"),
    event(45, "adapter.added", "globex/legal-v3", "rank 16, 84M", rev="1f8e02", cause="watch"),
    event(
        73,
        "adapter.rejected",
        "acme/broken",
        "size 1048576, header says 3355432",
        level="warn",
        cause="E_TRUNCATED",
    ),
    event(95, "slot.evict", "hooli/pied", "slot 10, idle 14m", cause="lru"),
    event(96, "slot.load", "stark/jarvis", "slot 10, 168M in 9 ms", cause="request"),
    event(98, "drain.start", "globex/legal-v3", "2 in flight", rev="c4a0d9", cause="watch"),
)

REQUESTS = tuple(
    RequestRow(
        id=f"req-{i:04}",
        adapter=("acme/sql-gen", "acme/support-de", "globex/summarise", "")[i % 4],
        rev="9f31c2",
        state="queued" if i % 9 == 8 else "running",
        endpoint="/v1/chat/completions",
        age_seconds=20.0 - i / 2,
        prompt_tokens=400 + 37 * i,
        cached_tokens=256 if i % 3 else 0,
        generated_tokens=0 if i % 9 == 8 else 100 + i,
        max_tokens=512,
        tokens_per_second=0.0 if i % 9 == 8 else 61.0,
        priority=50,
        tenant=("acme", "acme", "globex", "")[i % 4],
        client=f"uid {1000 + i % 3}",
    )
    for i in range(37)
)

TENANTS = (
    TenantRow(
        name="acme",
        running=20,
        waiting=1,
        requests_per_minute=1200.0,
        tokens_per_minute=260_000.0,
        rpm=2000,
        tpm=500_000,
        queue=64,
        weight=2.0,
        adapters=("acme/*",),
        keys=("ab12cd34",),
        last_used_at=moment(-1),
    ),
    TenantRow(name="globex", running=9, refused_per_minute=4.0, rpm=600, keys=("77aa01bb",)),
)

HEALTH = Health(
    checks=(
        Check(name="engine", level="ok", message="steps, the last 8 ms ago"),
        Check(
            name="disk",
            level="warn",
            message="the store has 4% free",
            hint="loractl gc --dry-run",
        ),
    ),
    reload_error="",
    reloaded_at=moment(-7200),
)


def board(slots: tuple[Slot, ...], **fields: object) -> Board:
    rest: dict[str, object] = {
        "sequence": 1,
        "time": moment(),
        "interval_seconds": 1.0,
        "status": status(),
        "load": load(),
        "machine": MACHINE,
        "churn": CHURN,
        "health": HEALTH,
        "slots": {row.name: row for row in slots},
        "requests": {row.id: row for row in REQUESTS},
        "num_requests": len(REQUESTS),
        "tenants": {row.name: row for row in TENANTS},
        "events": EVENTS,
    }
    return Board(**(rest | fields))  # type: ignore[arg-type]


# ----------------------------------------------------------------- the boards
def small() -> Board:
    """Sixteen slots under load: two load, one drains, three are pinned."""
    rows = (
        busy(
            "acme/sql-gen",
            0,
            11,
            8200,
            10_000,
            pinned=True,
            priority=90,
            rank=64,
            gpu_bytes=336 * MIB,
        ),
        busy(
            "acme/support-de",
            1,
            7,
            6300,
            10_000,
            pinned=True,
            priority=80,
            rank=32,
            gpu_bytes=168 * MIB,
        ),
        busy("globex/legal-v3@c4a0d9", 2, 2, 3100, 10_000, state="draining"),
        busy("globex/summarise", 3, 6, 4700, 10_000, waiting=1),
        busy("initech/tps", 4, 4, 9600, 10_000, rank=8, gpu_bytes=42 * MIB),
        busy(
            "umbrella/triage",
            5,
            3,
            1200,
            10_000,
            pinned=True,
            priority=95,
            rank=64,
            gpu_bytes=336 * MIB,
        ),
        busy("acme/router", 6, 2, 5000, 10_000, priority=40, rank=8, gpu_bytes=42 * MIB),
        slot("hooli/nucleus", 7, priority=40, life_query_tokens=100, life_hit_tokens=33),
        slot(
            "hooli/box",
            8,
            priority=40,
            idle_seconds=130.0,
            life_query_tokens=100,
            life_hit_tokens=61,
        ),
        slot("stark/hr-faq", 9, priority=30, rank=8, gpu_bytes=42 * MIB, idle_seconds=190.0),
        slot(
            "stark/jarvis",
            10,
            state="loading",
            priority=60,
            rank=32,
            gpu_bytes=168 * MIB,
            waiting=3,
            idle_seconds=None,
            load_source="ram",
            load_fraction=0.8,
            load_seconds=0.2,
            load_bytes_per_second=21.4e9,
        ),
        busy("wayne/alfred", 11, 2, 6600, 10_000),
        slot("wayne/bat-ops", 12, idle_seconds=370.0),
        slot("tyrell/voight", 13, priority=20, rank=8, gpu_bytes=42 * MIB, idle_seconds=560.0),
        slot("tyrell/nexus6", 14, priority=20, rank=8, gpu_bytes=42 * MIB, idle_seconds=690.0),
        slot(
            "globex/legal-v3",
            15,
            state="loading",
            idle_seconds=None,
            load_source="disk",
            load_fraction=0.35,
            load_seconds=1.4,
            load_bytes_per_second=2.1e9,
        ),
    )
    drains = {
        "globex/legal-v3": Drain(
            name="globex/legal-v3",
            rev="c4a0d9",
            next_rev="1f8e02",
            cause="replace",
            running=2,
            begun_with=3,
            seconds=8.2,
            limit_seconds=30.0,
        )
    }
    return board(rows, drains=drains)


def serving(*tasks: tuple[str, ...]) -> Board:
    """A model for each of these."""
    plain = small()
    models = tuple(
        ModelStatus(name=f"m{n}", base=f"/m/{n}", state="ready", tasks=each)
        for n, each in enumerate(tasks)
    )
    pace = load(pooled_tokens_per_second=12_000.0)
    return replace(plain, status=replace(plain.status, models=models), load=pace)


def two_models() -> Board:
    """A generator, and an encoder whose engine is away; each slot and request says whose it is."""
    board = small()
    models = (
        ModelStatus(name="llama", base="/m/llama", state="ready", tasks=("generate",), running=2),
        ModelStatus(
            name="minilm",
            base="/m/minilm",
            state="engine_restarting",
            reason="the engine is restarting",
            tasks=("embed",),
            slots_total=8,
        ),
    )
    slots = {n: replace(row, model="llama") for n, row in board.slots.items()}
    first, *_ = slots
    slots[first] = replace(slots[first], model="minilm")
    requests = {id: replace(row, model="llama") for id, row in board.requests.items()}
    base, *_ = requests
    requests[base] = replace(requests[base], adapter="", model="minilm")
    state = replace(board.status, models=models)
    return replace(board, status=state, slots=slots, requests=requests)


def replicas(*named: str) -> Board:
    """A model on two engines, one of which is being replaced; each slot and request says where."""
    board = small()
    first, second = named or ("0", "1")
    each = (
        ReplicaStatus(name=first, state="ready", device_name="H200", slots_used=2, running=2),
        ReplicaStatus(name=second, state="engine_restarting", reason="it died", engine_restarts=1),
    )
    model = ModelStatus(name="llama", base="/m/llama", state="ready", replicas=each)
    slots = {name: replace(row, replicas=(first, second)) for name, row in board.slots.items()}
    requests = {id: replace(row, replica=first) for id, row in board.requests.items()}
    state = replace(board.status, models=(model,))
    return replace(board, status=state, slots=slots, requests=requests)


def guessing() -> Board:
    """Tokens are guessed ahead: for the first name well, for the next one not any more."""
    board = small()
    first, second, *_ = board.slots
    lived = {"life_draft_tokens": 1000, "life_accepted_tokens": 600}
    recent = {"draft_tokens": 200, "accepted_tokens": 150, "tokens_per_draw": 2.5}
    slots = dict(board.slots)
    slots[first] = replace(slots[first], **lived, **recent)
    slots[second] = replace(slots[second], **lived)
    return replace(board, slots=slots)


def many(number: int = 256) -> Board:
    """So many slots, every third of them busy."""
    rows = tuple(
        busy(f"tenant{i % 17:02}/adapter-{i:03}", i, 1 + i % 5, i % 100, 100)
        if i % 3 == 0
        else slot(f"tenant{i % 17:02}/adapter-{i:03}", i, idle_seconds=float(i * 3))
        for i in range(number)
    )
    return board(rows, status=status(slots_total=number, slots_used=number, pinned=0))


def empty() -> Board:
    """A daemon that nobody asked for anything yet."""
    nothing = status(
        slots_used=0,
        pinned=0,
        running=0,
        waiting=0,
        uptime_seconds=3.0,
        adapters={},
        ram_used_bytes=0,
        pool=PoolPicture(total=4096, free=4096, block_bytes=2 * MIB, block_size=16),
        prefix=PrefixPicture(),
    )
    return board(
        (),
        status=nothing,
        load=Load(),
        machine=Machine(host_total_bytes=512 * GIB),
        churn=Churn(),
        requests={},
        num_requests=0,
        tenants={},
        events=(),
    )


#: Names that nobody can register, and what may come from a daemon of another version all the same.
HOSTILE_NAMES = (
    "[/bold]",
    "[red]not red[/red]",
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[31mred",
    "rtl-\u202egnp.exe\u202c",
    "\u200fmark\u200e",
    "tab\tand\nline",
    "wide-\u6f22\u5b57-\u4eee\u540d",
    "combining-e\u0301\u0301\u0301\u0301\u0301",
    "flag-\U0001f1e9\U0001f1ea-\U0001f468\u200d\U0001f469",
    "x" * 300,
    "nul\0nul",
    "c1-\x9b31m",
    "$(reboot)`id`",
    "%s%n{name}",
)


def hostile() -> Board:
    """Every foreign string is one that would like to drive the terminal."""
    bad = HOSTILE_NAMES
    rows = tuple(
        busy(name, i, 1, 50, 100, rev=bad[i % 4], state="active" if i % 2 else bad[2])
        for i, name in enumerate(bad)
    )
    events = tuple(
        event(i + 1, bad[i % 3], name, bad[(i + 1) % len(bad)], cause=bad[0], rev=bad[2])
        for i, name in enumerate(bad)
    )
    drains = {bad[2]: Drain(name=bad[2], rev=bad[0], next_rev=bad[3], running=1, begun_with=2)}
    churn = Churn(
        loads=(1,) * 60,
        evictions=(0,) * 60,
        reasons={bad[2]: 3, bad[1]: 1},
        top=((bad[10], 3), (bad[0], 2)),
        recent=(Loaded(name=bad[3], source="disk", num_bytes=1, seconds=1.0, ago_seconds=1.0),),
    )
    told = status(base=bad[1], device=bad[2], device_name=bad[10], version=bad[0], reason=bad[2])
    requests = {
        name: replace(
            REQUESTS[0], id=name, adapter=name, tenant=bad[2], client=bad[3], endpoint=bad[1]
        )
        for name in bad
    }
    tenants = {name: TenantRow(name=name, keys=(bad[2],), adapters=(bad[0],)) for name in bad}
    checks = tuple(Check(name=name, level="error", message=name, hint=bad[2]) for name in bad)
    return board(
        rows,
        status=told,
        churn=churn,
        drains=drains,
        events=events,
        requests=requests,
        tenants=tenants,
        health=Health(checks=checks, reload_error=bad[3], reloaded_at=bad[2]),
    )


# ----------------------------------------------------------------- what happens to them
def deltas(before: Board, number: int, *, rows: int = 40) -> Iterator[Delta]:
    """So many seconds of life: some rows change each time, figures move, ages are left alone."""
    names = list(before.slots)
    for step in range(1, number + 1):
        changed: dict[str, Slot] = {}
        for i in range(min(rows, len(names))):
            name = names[(step * 7 + i * 5) % len(names)]
            row = before.slots[name]
            turn = (step + i) % 4
            changed[name] = (
                replace(row, state="idle", running=0, tokens_per_second=0.0, idle_seconds=0.0)
                if turn == 0
                else replace(
                    row,
                    state="active",
                    running=turn,
                    tokens_per_second=100.0 * turn + step,
                    query_tokens=1000 + step,
                    hit_tokens=(step * 37 + i * 11) % 1000,
                    idle_seconds=0.0,
                )
            )
        yield Delta(
            sequence=before.sequence + step,
            time=moment(step),
            status=replace(
                before.status,
                running=30 + step % 9,
                waiting=step % 3,
                uptime_seconds=before.status.uptime_seconds + step,
            ),
            load=replace(
                before.load,
                tokens_per_second=8500.0 + 97 * (step % 11),
                requests_per_second=40 + step % 5,
            ),
            machine=replace(before.machine, gpu_busy=0.6 + 0.01 * (step % 20)),
            churn=replace(before.churn, loads=(*before.churn.loads[1:], step % 4)),
            slots=changed,
        )


def churny() -> tuple[Board, tuple[Delta, ...]]:
    """A small board, and a minute in which adapters come, load, serve and go."""
    before = small()
    steps = []
    for step, delta in enumerate(deltas(before, 60, rows=4), start=1):
        place = step % 4
        old, new = f"visitor/{step - 4:03}", f"visitor/{step:03}"
        arriving = slot(
            new,
            16 + place,
            state="loading",
            waiting=1,
            idle_seconds=None,
            load_source="ram",
            load_fraction=0.5,
            load_seconds=0.1,
            load_bytes_per_second=18e9,
        )
        rows = {**delta.slots, new: arriving}
        if step > 1:
            rows[f"visitor/{step - 1:03}"] = busy(
                f"visitor/{step - 1:03}", 16 + (place - 1) % 4, 1, 1, 9
            )
        gone = {"slots": (old,)} if step > 4 else {}
        steps.append(replace(delta, slots=rows, gone=gone))
    return before, tuple(steps)


class Script:
    """A source that tells what it is given, in order, and then waits for more."""

    def __init__(self, *messages: Message, title: str = "unix:///run/lorad/admin.sock") -> None:
        self.title = title
        self.paces: list[float] = []
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        for message in messages:
            self.tell(message)

    def tell(self, message: Message | None) -> None:
        """From any thread; None is the end."""
        self._queue.put(message)

    def pace(self, seconds: float) -> None:
        self.paces.append(seconds)

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        while (message := self._queue.get()) is not None and not stop.is_set():
            yield message


class Playing:
    """A source that plays a board and its deltas, one each `seconds`: to look at."""

    def __init__(self, before: Board, steps: Iterator[Delta], seconds: float = 1.0) -> None:
        self.title = "a play"
        self._before, self._steps, self._seconds = before, steps, seconds

    def pace(self, seconds: float) -> None:
        self._seconds = seconds

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        yield Whole(self._before)
        for delta in self._steps:
            if stop.wait(self._seconds):
                return
            yield Changed(delta)
