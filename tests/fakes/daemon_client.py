"""The client of a daemon that is not there: ten thousand adapters, pages of them, and what is done.

Goes in: how many adapters, and what is to go wrong.  Comes out: wire Structs as a LoradClient's.
`hold` makes it slow: every call waits until `let_go`.
"""

import threading
from typing import Any

from msgspec.structs import replace

from lorad import wire, wire_explain
from lorad.caller import ApiError
from lorad.tui.paging import STATES
from lorad.wire_operate import DrainAsk, Drained, Reloaded, RequestCancelled, RunningConfig

MIB = 1 << 20
SINCE = "2026-03-01T12:00:00Z"


def adapter(number: int, **fields: object) -> wire.Adapter:
    """Every one differs a little, and none by chance."""
    state = ("registered", "registered", "registered", "ram", "idle", "active")[number % 6]
    rest: dict[str, object] = {
        "name": f"tenant{number % 17:02}/adapter-{number:05}",
        "tenant": f"tenant{number % 17:02}",
        "model": "qwen3-8b",
        "state": state,
        "pinned": number % 50 == 0,
        "priority": 50 + number % 3,
        "rev": f"{number * 7919 % (1 << 24):06x}" + "0" * 58,
        "candidate_rev": None,
        "rank": 8 << number % 4,
        "num_bytes": (42 << number % 4) * MIB,
        "source": "watch",
        "labels": {},
        "reason": None,
        "reason_message": None,
        "created_at": SINCE,
        "last_used_at": None,
        "slot": number % 256 if state in ("idle", "active") else None,
        "running": number % 4 + 1 if state == "active" else 0,
        "idle_seconds": float(number % 900) if state in ("idle", "active") else None,
        "loads": number % 5,
        "prefix_query_tokens": 1000 if state == "active" else 0,
        "prefix_hit_tokens": number % 1000 if state == "active" else 0,
    }
    return wire.Adapter(**(rest | fields))  # type: ignore[arg-type]


class FakeDaemon:
    """What all its clients share."""

    def __init__(self, *adapters: wire.Adapter) -> None:
        self.adapters = {row.name: row for row in adapters}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.threads: set[int] = set()  # that asked
        self.refuses: dict[str, wire.ItemResult | Exception] = {}  # by verb
        self.settings = RunningConfig(
            settings={
                "model": {"base": "Qwen/Qwen3-8B", "dtype": "auto"},
                "admin": {"socket": "/run/lorad/admin.sock", "group": "lorad-admin"},
                "limits": {"deadline": 600.0, "queue": 512},
                "watch": {"inbox": "/var/lib/lorad/inbox", "extra": []},
            },
            origins={
                "model.base": "/etc/lorad/lorad.toml:3",
                "limits.queue": "LORAD_LIMITS__QUEUE",
                "admin.group": "--admin-group",
            },
            needs_restart={"limits.queue": 1024},
        )
        self.arrived = threading.Semaphore(0)  # one for each call
        self.closed = threading.Semaphore(0)  # one for each client that was closed
        self._gate = threading.Event()
        self._gate.set()
        self._lock = threading.Lock()

    def client(self) -> "FakeClient":
        return FakeClient(self)

    def hold(self) -> None:
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    def enter(self, verb: str, **asked: Any) -> None:
        """A call arrives: it is kept, waits, and fails if it is to."""
        with self._lock:
            self.asked.append((verb, asked))
            self.threads.add(threading.get_ident())
        self.arrived.release()
        self._gate.wait()
        refusal = self.refuses.get(verb)
        if isinstance(refusal, Exception):
            raise refusal

    def calls(self, verb: str) -> list[dict[str, Any]]:
        with self._lock:
            return [asked for name, asked in self.asked if name == verb]


class FakeClient:
    """One of them."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def adapters(
        self,
        *,
        state: str | None = None,
        tenant: str | None = None,
        q: str | None = None,
        sort: str = "name",
        limit: int = 100,
        cursor: str | None = None,
    ) -> wire.AdapterPage:
        self._daemon.enter("adapters", state=state, tenant=tenant, q=q, sort=sort, cursor=cursor)
        if state is not None and state not in STATES:
            raise refused(400, "invalid_value", f"no state {state!r}")
        rows = [
            row
            for row in self._daemon.adapters.values()
            if (state is None or row.state == state)
            and (tenant is None or row.tenant == tenant)
            and (q is None or q in row.name)
        ]
        word = sort.removeprefix("-")
        key = {"size": "num_bytes", "last_used": "last_used_at", "created": "created_at"}
        rows.sort(
            key=lambda row: (
                (getattr(row, key.get(word, word)) or 0, row.name)
                if word not in ("name", "state", "tenant")
                else (getattr(row, word), row.name)
            ),
            reverse=sort.startswith("-"),
        )
        start = int(cursor or 0)
        following = str(start + limit) if start + limit < len(rows) else None
        return wire.AdapterPage(
            items=tuple(rows[start : start + limit]), total=len(rows), cursor=following
        )

    def adapter(self, name: str) -> wire.AdapterDetail:
        self._daemon.enter("adapter", name=name)
        row = self._row(name)
        serving = wire.Revision(
            rev=row.rev or "",
            rank=row.rank or 0,
            ranks={"q_proj": 16, "k_proj": 16, "v_proj": 16, "o_proj": 8},
            alpha=32.0,
            rslora=False,
            targets=("q_proj", "k_proj", "v_proj", "o_proj"),
            num_layers=36,
            dtype="bf16",
            file_bytes=80 * MIB,
            packed_bytes=84 * MIB,
            num_blocks=42,
            changes_kv=True,
            scalings=(2.0,),
            created_at=SINCE,
        )
        said = "size 1048576, header says 3355432"
        events = (
            wire.EventItem(id=3, time=SINCE, type="adapter.added", name=name, message="rank 16"),
            wire.EventItem(
                id=9, time=SINCE, level="warn", type="adapter.rejected", name=name, message=said,
                cause="E_TRUNCATED",
            ),
        )  # fmt: skip
        return wire.AdapterDetail(
            adapter=row,
            serving=serving if row.rev else None,
            candidate=None,
            history=("c4a0d9" + "1" * 58, "77e1aa" + "2" * 58),
            events=events,
        )

    def explain(self, name: str) -> wire_explain.Explained:
        self._daemon.enter("explain", name=name)
        row = self._row(name)
        return wire_explain.Explained(
            name=name,
            rev=row.rev,
            state=row.state,
            tier="gpu" if row.slot is not None else "disk",
            served=row.slot is not None,
            why="it is on the GPU" if row.slot is not None else "nobody asked for it yet",
            next="a request starts with the next step",
            hint="" if row.slot is not None else f"loractl load {name}",
            running=row.running,
            waiting=row.waiting,
            load_seconds=0.009,
        )

    def config(self) -> RunningConfig:
        self._daemon.enter("config")
        return self._daemon.settings

    def load(self, *names: str, **options: Any) -> wire.Results:
        return self._wish("load", names, options, {"state": "idle"})

    def evict(self, *names: str, **options: Any) -> wire.Results:
        return self._wish("evict", names, options, {"state": "ram", "slot": None})

    def pin(self, *names: str, **options: Any) -> wire.Results:
        return self._wish("pin", names, options, {"pinned": True})

    def unpin(self, *names: str, **options: Any) -> wire.Results:
        return self._wish("unpin", names, options, {"pinned": False})

    def patch(self, name: str, patch: wire.AdapterPatch) -> wire.AdapterDetail:
        self._daemon.enter("patch", name=name, priority=patch.priority)
        row = replace(self._row(name), priority=patch.priority or 0)
        self._daemon.adapters[name] = row
        return wire.AdapterDetail(adapter=row, serving=None, candidate=None)

    def drain(self, ask: DrainAsk) -> Drained:
        self._daemon.enter("drain", name=ask.name, wait=ask.wait)
        return Drained(name=ask.name, draining=True, running=3)

    def resume(self, name: str | None = None) -> Drained:
        self._daemon.enter("resume", name=name)
        return Drained(name=name, draining=False, changed=False)

    def cancel_request(self, id: str) -> RequestCancelled:
        self._daemon.enter("cancel_request", id=id)
        return RequestCancelled(id=id, adapter="acme/sql-gen", rev="", generated_tokens=7)

    def reload(self) -> Reloaded:
        self._daemon.enter("reload")
        return Reloaded(changed=("limits.queue",))

    def close(self) -> None:
        self._daemon.closed.release()

    def _row(self, name: str) -> wire.Adapter:
        row = self._daemon.adapters.get(name)
        if row is None:
            raise refused(404, "model_not_found", f"no adapter {name}", hint="loractl ls")
        return row

    def _wish(
        self, verb: str, names: tuple[str, ...], options: dict[str, Any], change: dict[str, Any]
    ) -> wire.Results:
        self._daemon.enter(verb, names=names, **options)
        refusal = self._daemon.refuses.get(verb)
        if isinstance(refusal, wire.ItemResult):
            return wire.Results(items=(refusal,))
        items = []
        for name in names:
            row = replace(self._row(name), **change)
            self._daemon.adapters[name] = row
            items.append(wire.ItemResult(name=name, ok=True, state=row.state))
        return wire.Results(items=tuple(items))


def refused(status: int, code: str, message: str, *, hint: str = "") -> ApiError:
    details = {"hint": hint} if hint else {}
    body = wire.ErrorBody(message=message, type="invalid_request_error", code=code, details=details)
    return ApiError(status, body)
