"""A small engine that answers as the real one does, without a process."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.messages import (
    AdapterEvent,
    AddRevision,
    Answer,
    EngineInfo,
    EngineReady,
    EngineSnapshot,
    Evict,
    Fatal,
    GetSnapshot,
    Load,
    PoolStatus,
    RemoveRevision,
    RevisionStatus,
    SequenceDelta,
    SetRevision,
    StepFrame,
)

INFO = EngineInfo(
    device="cpu",
    device_name="cpu",
    dtype="float32",
    layout="0123456789ab",
    block_bytes=1 << 16,
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_num_seqs=8,
    max_batch_tokens=64,
    vocab_size=256,
    eos_token_ids=(0,),
    weight_bytes=1,
    arena_bytes=64 << 16,
    ram_cache_bytes=1 << 20,
    pid=4711,
)


class FakeClient:
    """`revisions`: rev -> tier.  `refuse`: rev -> code that its Load answers with."""

    def __init__(self, info=INFO, fatal=None):
        self.events = asyncio.Queue()
        self.info = None
        self.pid = None
        self.state = "starting"
        self.sent = []
        self.submitted = {}
        self.revisions, self.manifests, self.refuse, self.leases = {}, {}, {}, {}
        self.silent = False  # True: submits stay open until `finish`
        self.hold_loads = asyncio.Event()
        self.hold_loads.set()
        self._info, self._fatal, self._ids = info, fatal, 0

    async def start(self, config):
        if self._fatal:
            self.die(self._fatal)
            return
        self.info, self.state = self._info, "ready"
        self.events.put_nowait(EngineReady(self._info))

    def next_id(self):
        self._ids += 1
        return self._ids

    def submit(self, submit):
        self.submitted[submit.request_id] = submit
        assert submit.rev is None or submit.rev in self.revisions, "unknown revision"
        if not self.silent or submit.request_id == "warm-up":
            self.finish(submit.request_id)

    def finish(self, request_id, reason="stop"):
        self.submitted.pop(request_id)
        self.frame(
            deltas=(SequenceDelta(request_id=request_id, tokens=(1,), finish_reason=reason),)
        )

    def abort(self, request_id):
        if request_id in self.submitted:
            self.finish(request_id, "abort")

    def frame(self, **parts):
        self.events.put_nowait(StepFrame(step=1, **parts))

    def die(self, fatal=None):
        self.state = "dead"
        self.events.put_nowait(fatal or Fatal("internal_error", "killed by the test"))

    def move(self, rev, after, cause="load"):
        tier = {"idle": "gpu", "ram": "ram", "registered": "disk"}[after]
        before = {"gpu": "idle", "ram": "ram", "disk": "registered"}[self.revisions[rev]]
        if tier == self.revisions[rev]:
            return
        self.revisions[rev] = tier
        self.frame(adapters=(AdapterEvent(rev=rev, before=before, after=after, cause=cause),))

    async def call(self, command):
        self.sent.append(command)
        answer = Answer(command_id=command.command_id)
        match command:
            case AddRevision():
                self.revisions.setdefault(command.manifest.rev, "disk")
                self.manifests[command.manifest.rev] = command
            case RemoveRevision(_, rev):
                self.revisions.pop(rev)
            case Load():
                await self.hold_loads.wait()
                if code := self.refuse.get(command.rev):
                    return Answer(command_id=command.command_id, code=code, message="refused")
                self.move(command.rev, "idle" if command.tier == "gpu" else "ram")
            case Evict():
                self.move(command.rev, "ram" if command.to == "ram" else "registered", "manual")
            case SetRevision() if command.rev not in self.revisions:
                return Answer(command_id=command.command_id, code="model_not_found")
            case GetSnapshot():
                return Answer(command_id=command.command_id, snapshot=self.snapshot())
        return answer

    def snapshot(self):
        states = {"gpu": "idle", "ram": "ram", "disk": "registered"}
        revisions = tuple(
            RevisionStatus(
                rev=rev, state=states[tier], slot=n if tier == "gpu" else None, loads=1, max_rank=4
            )
            for n, (rev, tier) in enumerate(self.revisions.items())
        )
        pool = PoolStatus(
            total=64,
            free=60,
            kv_active=1,
            kv_cached=1,
            adapter_active=1,
            adapter_idle=1,
            block_bytes=1 << 16,
            block_size=16,
        )
        return EngineSnapshot(
            step=1,
            running=0,
            waiting=0,
            pool=pool,
            slots_total=8,
            slots_used=sum(tier == "gpu" for tier in self.revisions.values()),
            ram_used_bytes=0,
            ram_limit_bytes=1 << 20,
            revisions=revisions,
            base=RevisionStatus(rev="", state="idle"),
        )

    async def stop(self, timeout=10.0):
        self.state = "dead"

    def kinds(self, kind):
        return [command for command in self.sent if isinstance(command, kind)]


@pytest.fixture
def fake():
    """What the tests build links from."""
    return SimpleNamespace(Client=FakeClient, INFO=INFO)


@pytest.fixture
def eventually():
    """Await until a condition holds; fails after five seconds."""

    async def eventually(condition):
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)

    return eventually
