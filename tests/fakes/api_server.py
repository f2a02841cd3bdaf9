"""The real HTTP faces over real Unix sockets, on services that a test can steer.

`ApiServer` runs both apps in an event loop of its own thread, as the daemon does in its main one.
The engine behind it, `FakeEngine`, answers with the bytes that a test chose: a token is a byte, so
that half characters happen all the time.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import tokenizers
from msgspec import structs
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.messages import EngineInfo, SequenceDelta, Submit, TokenLogprobs
from lorad import wire, wire_explain, wire_status
from lorad.api.app import admin_app, inference_app
from lorad.api.deps import Deps
from lorad.api.guard import admin_uids
from lorad.api.server import HttpServer, bind_unix
from lorad.api.uploads import Uploads
from lorad.board.stream import Message, Stream
from lorad.config import Settings
from lorad.config_sections import Admin, Inference, Limits, Model
from lorad.errors import LoradError
from lorad.log_ring import LogRing
from lorad.metrics.http import HttpCounts
from lorad.registry.records import OperationRecord
from lorad.service.audit import Audit
from lorad.service.callers import Callers
from lorad.service.events import EventRing, rfc3339, utc_now
from lorad.service.guides import Guides
from lorad.service.pooling import PoolBackend, PoolingService
from lorad.service.requests import RequestService
from lorad.service.seams import Backend
from lorad.service.tenancy import Tenancy
from lorad.service.text import RevisionText
from lorad.text.template import ChatTemplate
from lorad.text.token_bytes import byte_alphabet
from lorad.text.tokenizer import Tokenizer
from lorad.wire_operate import DrainAsk, Drained, Reloaded, RunningConfig
from lorad.wire_operations import PulledFile, PullPlan, PullStart
from lorad.wire_stream import Board
from tests.fakes import pooled

T = TypeVar("T")


BASE = "tiny"
END = 256  # ends a turn
VOCAB = 257
CONTEXT = 512
REVS = {"acme/sql": "a1" * 32, "bible": "b2" * 32}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


#: Of "bible", which was made for tools.
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}<assistant>"
)


def byte_text(template: str = TEMPLATE) -> RevisionText:
    """A vocabulary of the 256 bytes, each its own id, and an end of turn."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer = Tokenizer(inner, specials={"eos_token": "<|im_end|>"})
    return RevisionText(tokenizer, ChatTemplate({"default": template}, {}))


class FakeEngine:
    """`reply` (bytes, or a function of the Submit) comes in deltas of `per_delta` tokens.

    `gate`, when set, is awaited before the delta that holds token number `gate_at`; `error` ends
    the sequence instead of a finish.
    """

    def __init__(self) -> None:
        self.info: EngineInfo | None = EngineInfo(
            device="cpu",
            device_name="fake",
            dtype="float32",
            layout="fake",
            block_bytes=1024,
            block_size=16,
            num_blocks=64,
            max_model_len=CONTEXT,
            max_num_seqs=16,
            max_batch_tokens=512,
            num_layers=1,
            module_dims=((8, 8),) * 7,
            num_ids=VOCAB,
            vocab_size=VOCAB,
            eos_token_ids=(END,),
            weight_bytes=1,
            arena_bytes=1,
            ram_cache_bytes=1,
            pid=1,
        )
        self.reset()

    def reset(self) -> None:
        self.submits: list[Submit] = []
        self.aborts: list[str] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self.reply: bytes | Callable[[Submit], bytes] = b"Hello world"
        self.per_delta = 1
        self.gate: asyncio.Event | None = None
        self.gate_at = 0
        self.error: tuple[str, str] | None = None
        self.cached_tokens = 0
        self.starts_per_second = 0.0
        self.not_ready: LoradError | None = None

    def check(self) -> None:
        if self.not_ready is not None:
            raise self.not_ready

    def submit(self, submit: Submit, on_delta: Callable[[SequenceDelta], None]) -> None:
        self.submits.append(submit)
        task = asyncio.get_running_loop().create_task(self._run(submit, on_delta))
        self.running[submit.request_id] = task

    def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)
        if (task := self.running.get(request_id)) is not None:
            task.cancel()

    async def _run(self, submit: Submit, on_delta: Callable[[SequenceDelta], None]) -> None:
        try:
            await self._answer(submit, on_delta)
        except asyncio.CancelledError:
            on_delta(SequenceDelta(request_id=submit.request_id, finish_reason="abort"))
        finally:
            self.running.pop(submit.request_id, None)

    async def _answer(self, submit: Submit, on_delta: Callable[[SequenceDelta], None]) -> None:
        reply = self.reply(submit) if callable(self.reply) else self.reply
        sampling = submit.sampling
        tokens = [*reply, *([] if sampling.ignore_eos else [END])][: sampling.max_tokens]
        first = True
        for start in range(0, len(tokens), self.per_delta):
            piece = tokens[start : start + self.per_delta]
            if self.gate is not None and start + len(piece) > self.gate_at:
                await self.gate.wait()
            await asyncio.sleep(0)
            done = start + len(piece) >= len(tokens)
            if done and self.error is not None:
                break
            finish = ("stop" if tokens[-1] == END else "length") if done else None
            on_delta(
                SequenceDelta(
                    request_id=submit.request_id,
                    tokens=tuple(piece),
                    logprobs=self._logprobs(submit, piece, sampling.logprobs),
                    prompt_logprobs=self._prompt_logprobs(submit) if first else (),
                    cached_tokens=self.cached_tokens if first else None,
                    queued_seconds=0.0 if first else None,
                    finish_reason=finish,  # type: ignore[arg-type]
                )
            )
            first = False
        if self.error is not None:
            code, message = self.error
            on_delta(
                SequenceDelta(
                    request_id=submit.request_id, finish_reason="error", code=code, message=message
                )
            )

    def _logprobs(
        self, submit: Submit, tokens: list[int], top: int | None
    ) -> tuple[TokenLogprobs, ...]:
        if top is None:
            return ()
        alternatives = tuple((ord("a") + i, -0.5 - i) for i in range(top))
        return tuple(TokenLogprobs(token, -0.25, alternatives) for token in tokens)

    def _prompt_logprobs(self, submit: Submit) -> tuple[TokenLogprobs | None, ...]:
        if submit.sampling.prompt_logprobs is None:
            return ()
        return (None, *self._logprobs(submit, submit.prompt[1:], submit.sampling.prompt_logprobs))


@dataclasses.dataclass(frozen=True)
class Meant:
    rev: str | None
    name: str | None = None
    priority: int | None = None
    model: str = BASE


class FakeAdapters:
    """Names and revisions; wishes are noted in `calls`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reset()

    def reset(self) -> None:
        self.revs = dict(REVS)
        self.priority = 50
        self.leases: Counter[str] = Counter()
        self.calls: list[tuple[Any, ...]] = []
        self.answer: LoradError | None = None
        self.added_files: dict[str, int] = {}
        self.add_gate: asyncio.Event | None = None
        self.verifications: tuple[wire.Verification, ...] = ()
        self.explained: dict[str, wire_explain.Explained] = {}
        self.garbage: tuple[wire.GarbageItem, ...] = ()

    def resolve(self, model: str) -> Meant:
        if model == BASE:
            return Meant(None)
        model, _, digest = model.partition("@")
        if model not in self.revs or not self.revs[model].startswith(digest):
            raise LoradError(
                "model_not_found", f"The model {model[:200]!r} does not exist", param="model"
            )
        return Meant(self.revs[model], model, self.priority)

    def lease(self, rev: str) -> None:
        self.leases[rev] += 1

    def release(self, rev: str) -> None:
        self.leases[rev] -= 1
        assert self.leases[rev] >= 0

    async def add_folder(self, name: str, path: str, *, replace: bool) -> wire.Added:
        self._note("add_folder", name, path, replace)
        return wire.Added(name=name, rev="c3" * 32, state="gpu")

    async def stage(self, expected_bytes: int = 0) -> "Staged":
        path = self.folder / f"staged-{len(list(self.folder.iterdir()))}"
        path.mkdir()
        return Staged(path)

    async def discard(self, staging: "Staged") -> None:
        self.calls.append(("discard", staging.path))

    async def add(self, staging: "Staged", name: str, **options: Any) -> wire.Added:
        self._note("add", name, options)
        if self.add_gate is not None:
            await self.add_gate.wait()
        self.added_files = {p.name: p.stat().st_size for p in staging.path.iterdir()}
        added = wire.Added(name=name, rev="c3" * 32, state="registered")
        if options["load"]:
            return structs.replace(added, state="idle", num_bytes=3 << 20, load_seconds=0.041)
        return added

    async def load(self, names: wire.Names) -> wire.Results:
        return self._results("load", names)

    async def evict(self, names: wire.Names) -> wire.Results:
        return self._results("evict", names)

    async def pin(self, names: wire.Names) -> wire.Results:
        return self._results("pin", names)

    async def unpin(self, names: wire.Names) -> wire.Results:
        return self._results("unpin", names)

    async def verify(self, wish: wire.Names) -> wire.Verifications:
        self._note("verify", wish.names, wish)
        return wire.Verifications(items=self.verifications)

    async def explain(self, name: str) -> wire_explain.Explained:
        self._note("explain", name)
        if name not in self.explained:
            raise LoradError("model_not_found", f"no adapter named {name!r}", hint="loractl ls")
        return self.explained[name]

    async def gc(self, ask: wire.GcAsk) -> wire.Garbage:
        self._note("gc", ask.dry_run)
        size = sum(item.num_bytes for item in self.garbage)
        return wire.Garbage(
            items=self.garbage, num_bytes=size, dry_run=ask.dry_run, used_bytes=3 << 20
        )

    async def patch(self, name: str, patch: wire.AdapterPatch) -> None:
        self._note("patch", name, patch)

    async def remove(self, name: str, *, keep_files: bool = False) -> wire.Removed:
        self._note("remove", name, keep_files)
        return wire.Removed(name=name, rev=self.revs.get(name))

    def _results(self, verb: str, names: wire.Names) -> wire.Results:
        self._note(verb, names)
        return wire.Results(items=tuple(wire.ItemResult(name=n, ok=True) for n in names.names))

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.answer is not None:
            raise self.answer


class FakePulls:
    """Pulls and operations in one: `begin` files a row that a test moves on with `move`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rows: dict[str, OperationRecord] = {}
        self.starts: list[PullStart] = []
        self.answer: LoradError | None = None
        self.first: dict[str, Any] = {"state": "running"}  # of the next one
        self.pending: list[str] = []  # what clients wait for; of those before a reset no more
        self.seen: OperationRecord | None = None  # what the last of them was told
        self._moved = asyncio.Event()

    def move(self, id: str, **values: Any) -> None:
        """On the loop."""
        self.rows[id] = dataclasses.replace(self.rows[id], **values)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def plan(self, start: PullStart) -> PullPlan:
        self._note(start)
        files = (
            PulledFile(name="adapter_config.json", num_bytes=700),
            PulledFile(name="adapter_model.safetensors", num_bytes=None),
        )
        return PullPlan(
            reference=f"{start.reference}@{'c' * 40}",
            commit="c" * 40,
            name=start.name or "sql",
            files=files,
            total_bytes=None,
        )

    async def begin(self, start: PullStart, *, actor: str) -> OperationRecord:
        self._note(start)
        id = f"0000000{len(self.rows)}"
        self.rows[id] = OperationRecord(
            id=id,
            kind="pull",
            target=start.reference,
            name=start.name or "sql",
            actor=actor,
            created_at=time.time(),
            updated_at=time.time(),
            **self.first,
        )
        return self.rows[id]

    def get(self, id: str) -> OperationRecord:
        if id not in self.rows:
            raise LoradError("not_found", f"no operation {id!r}", hint="loractl op ls")
        return self.rows[id]

    def list(self, *, live: bool = False, limit: int = 100) -> tuple[OperationRecord, ...]:
        rows = [row for row in reversed(self.rows.values()) if row.live or not live]
        return tuple(rows[:limit])

    async def wait(self, id: str, seconds: float | None = None) -> OperationRecord:
        pending = self.pending
        pending.append(id)
        try:
            if self.get(id).live:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._moved.wait(), seconds)
        finally:
            pending.remove(id)
        self.seen = self.get(id)
        return self.seen

    async def cancel(self, id: str) -> OperationRecord:
        if not self.get(id).live:
            raise LoradError("conflict", f"operation {id} is {self.get(id).state} already")
        self.move(id, state="cancelled")
        return self.get(id)

    def _note(self, start: PullStart) -> None:
        self.starts.append(start)
        if self.answer is not None:
            raise self.answer


@dataclasses.dataclass(frozen=True)
class Staged:
    path: Path


class FakeListing:
    """Pictures of what FakeAdapters holds."""

    def __init__(self, adapters: FakeAdapters) -> None:
        self.adapters = adapters
        self.reset()

    def reset(self) -> None:
        self.not_ready = ""
        self.looks = 0

    async def look(self) -> None:
        self.looks += 1

    def ready(self, model: str | None = None) -> tuple[bool, str]:
        return not self.not_ready, self.not_ready

    def waiting(self) -> str:
        return ""

    def status(self) -> wire_status.Status:
        zero: dict[type, Any] = {int: 0, str: "", float: 0.0}
        given = {"adapters": {"idle": 2}, "pool": wire_status.PoolPicture(), "inbox": None}
        plain = {
            field.name: zero[field.type]
            for field in msgspec.structs.fields(wire_status.Status)
            if field.required and field.name not in given
        }
        return wire_status.Status(**plain, **given)

    def page(self, *, limit: int, cursor: str | None, **filters: str | None) -> wire.AdapterPage:
        names = sorted(self.adapters.revs)
        start = int(cursor or 0)
        items = tuple(map(self._row, names[start : start + limit]))
        more = start + limit < len(names)
        return wire.AdapterPage(
            items=items, total=len(names), cursor=str(start + limit) if more else None
        )

    def detail(self, name: str) -> wire.AdapterDetail:
        if name not in self.adapters.revs:
            raise LoradError("model_not_found", f"no adapter named {name!r}")
        return wire.AdapterDetail(adapter=self._row(name), serving=None, candidate=None)

    def slots(self) -> wire.SlotPage:
        return wire.SlotPage(items=(), slots_total=8, slots_used=0)

    def _row(self, name: str) -> wire.Adapter:
        return wire.Adapter(
            name=name,
            tenant=None,
            model=BASE,
            state="quarantined" if name == "broken" else "idle",
            pinned=False,
            priority=50,
            rev=self.adapters.revs[name],
            candidate_rev=None,
            rank=8,
            num_bytes=1,
            source="upload",
            labels={},
            reason=None,
            reason_message=None,
            created_at="2025-03-01T09:30:00.000Z",
            last_used_at=None,
        )


class FakeBoards:
    """Streams of a board that a test changes: `parts` are its fields."""

    def __init__(self, listing: FakeListing, events: EventRing) -> None:
        self._listing = listing
        self.stream = Stream(self.paint, events)
        self.painted = self.readers = 0
        self.reset()

    def reset(self) -> None:
        self.parts: dict[str, Any] = {}

    def paint(self) -> Board:
        self.painted += 1
        board = Board(
            sequence=1,
            time=rfc3339(utc_now()),
            interval_seconds=0.0,
            status=self._listing.status(),
        )
        return msgspec.structs.replace(board, **self.parts)

    async def once(self) -> Board:
        return self.paint()

    async def follow(
        self, interval: float, after: int | None = None
    ) -> AsyncGenerator[Message, None]:
        self.readers += 1
        try:
            async with contextlib.aclosing(self.stream.follow(interval, after)) as messages:
                async for message in messages:
                    yield message
        finally:
            self.readers -= 1


class FakeMetrics:
    """Answers scrapes with `text`, in the type that was asked for."""

    def __init__(self) -> None:
        self.text = "# TYPE lorad_ready gauge\nlorad_ready 1.0\n"

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        return self.text.encode(), accept or "text/plain; version=0.0.4; charset=utf-8"


class FakeOperator:
    """Reload and drain as a test wants them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.asked: list[tuple[str, DrainAsk]] = []
        self.reloaded = Reloaded()
        self.config = RunningConfig(settings={}, origins={})
        self.refusal: LoradError | None = None

    async def reload(self) -> Reloaded:
        if self.refusal is not None:
            raise self.refusal
        return self.reloaded

    async def drain(self, ask: DrainAsk) -> Drained:
        self.asked.append(("drain", ask))
        if self.refusal is not None:
            raise self.refusal
        return Drained(name=ask.name, draining=True)

    def resume(self, ask: DrainAsk) -> Drained:
        self.asked.append(("resume", ask))
        return Drained(name=ask.name, draining=False, still=("acme/sql",))


class Deaf:
    """An audit that nobody reads."""

    def note(self, *words: str, **more: str) -> None:
        pass


class ApiServer:
    """Both sockets in `folder`; `limits` and `admin` replace the settings' defaults.

    `registry`, where there is one, holds tenants and the audit.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        admin: Admin | None = None,
        *,
        ping_seconds: float = 15.0,
        max_upload: int = 1 << 20,
        auth: Any = "peer",
        registry: Any = None,
        trace: Any = None,
    ) -> None:
        self.trace = trace
        self.inference = folder / "inference.sock"
        self.admin = folder / "admin.sock"
        self.limits = limits
        self.engine = FakeEngine()
        self.pool = pooled.FakePool()
        (folder / "tokenizer.json").write_text(byte_text().tokenizer._inner.to_str())
        self.guides = Guides(folder)
        (folder / "staging").mkdir()
        self.adapters = FakeAdapters(folder / "staging")
        self.listing = FakeListing(self.adapters)
        self.pulls = FakePulls()
        self.operator = FakeOperator()
        self.log_ring = LogRing()
        self.settings = Settings(
            models=(Model(base="/models/tiny", name=BASE),),
            limits=limits,
            admin=admin or Admin(),
            inference=Inference(auth=auth),
        )
        self.registry = registry
        self._ping_seconds, self._max_upload = ping_seconds, max_upload
        listeners = [bind_unix(path, 0o600) for path in (self.inference, self.admin)]
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._start, listeners)

    async def _start(self, listeners: list[Any]) -> None:
        text, tooled = byte_text(), byte_text(TOOL_TEMPLATE)
        self.events = EventRing(capacity=8, instance_id="i1")
        self.requests = RequestService(
            self.adapters,
            {
                BASE: Backend(
                    self.engine,
                    lambda rev: tooled if rev == REVS["bible"] else text,
                    "ba5eba5eba5e",
                    self.guides,
                )
            },
            limits=self.limits,
            version="0.1.0",
            trace=self.trace,
        )
        self.pooling = PoolingService(
            self.requests.reception,
            {BASE: PoolBackend(self.pool, lambda: self.pool.facts)},
            limits=self.limits,
            meter=self.requests.meter,
            crowd=self.requests.crowd,
            trace=self.trace,
        )
        self.board = FakeBoards(self.listing, self.events)
        operators = admin_uids(self.settings.admin.allow_uids)
        self.callers = Callers((BASE,), operators=operators)
        self.tenancy: Any = None
        self.audit: Any = Deaf()
        if self.registry is not None:
            self.audit = Audit(self.registry, "both")
            self.tenancy = Tenancy(self.registry, self.callers, self.events)
            self.tenancy.on_change = self.requests.rates.forget
        self.uploads = Uploads(self.adapters, max_bytes=self._max_upload)
        self.metrics, self.http = FakeMetrics(), HttpCounts()
        self.deps = Deps(
            settings=self.settings,
            requests=self.requests,
            pooling=self.pooling,
            adapters=self.adapters,
            verification=self.adapters,
            explaining=self.adapters,
            housekeeping=self.adapters,
            ledger=self.adapters,
            pulls=self.pulls,
            operations=self.pulls,
            audit=self.audit,
            callers=self.callers,
            tenancy=self.tenancy,
            listing=self.listing,
            board=self.board,
            events=self.events,
            uploads=self.uploads,
            folders=SimpleNamespace(add=self.adapters.add_folder),
            metrics=self.metrics,
            http=self.http,
            log=self.log_ring,
            draining=self.operator,
            reload=self.operator.reload,
            config=lambda: self.operator.config,
            version="0.1.0",
            started=1_740_000_000.0,
            ping_seconds=self._ping_seconds,
        )
        apps = (inference_app(self.deps), admin_app(self.deps))
        self.servers = [
            HttpServer(
                app,
                listener,
                receipt_seconds=self.limits.request_receipt,
                idle_seconds=self.limits.idle,
                connections=self.limits.connections,
                header_bytes=self.limits.headers,
                on_refused=self.deps.note_refused,
            )
            for app, listener in zip(apps, listeners, strict=True)
        ]
        for server in self.servers:
            await server.start()

    def run(self, function: Callable[..., Awaitable[T] | T], *args: Any) -> T:
        """Call `function` on the server's loop and wait for what it returns."""

        async def call() -> T:
            result = function(*args)
            return await result if isinstance(result, Awaitable) else result

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def until(self, true: Callable[[], object], seconds: float = 5.0) -> None:
        """Poll on the loop until `true`; AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.run(true):
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.002)

    def hold_engine(self, at: int = 0) -> asyncio.Event:
        """From token number `at` on, the engine waits until the event is set (on the loop)."""
        self.engine.gate, self.engine.gate_at = asyncio.Event(), at
        return self.engine.gate

    def reset(self) -> None:
        """Between tests: nothing may be left over."""
        for request_id in list(self.engine.running):
            self.run(self.engine.abort, request_id)
        self.until(lambda: not self.engine.running and self.requests.active == 0)
        assert self.requests.waiting == 0
        assert not any(self.adapters.leases.values())
        fakes = (
            self.engine,
            self.pool,
            self.adapters,
            self.listing,
            self.pulls,
            self.operator,
            self.board,
        )
        for fake in fakes:
            fake.reset()

    def close(self) -> None:
        for server in self.servers:
            self.run(server.stop, 0.2)
        self.guides.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()
