"""A small engine that answers as the real one does, without a process."""

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.adapters.peft import AdapterManifest
from engine.config import EngineConfig
from engine.errors import AdapterInvalid, EngineDied, EngineError
from engine.layout import stream_id
from engine.messages import (
    AdapterEvent,
    AddRevision,
    Answer,
    EngineInfo,
    EngineReady,
    Evict,
    Explain,
    Fatal,
    GetSnapshot,
    Load,
    PackedManifest,
    PackedModule,
    RemoveRevision,
    SequenceDelta,
    SetRevision,
    StepFrame,
)
from engine.status_messages import EngineSnapshot, PoolStatus, PrefixStatus, RevisionStatus
from engine.verify_messages import VerifyRevision
from lorad.errors import LoradError
from lorad.registry.registry import Registry
from lorad.service.adapters import AdapterService
from lorad.service.catalog import Catalog
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.housekeeping import Housekeeping
from lorad.service.inbox import Inbox, Memory
from lorad.service.intake import Intake
from lorad.service.lineup import Lineup, ModelAdapters
from lorad.service.listing import Listing
from lorad.service.making_room import RoomMaker
from lorad.service.names import Names, entry_of
from lorad.service.picture import Picture
from lorad.service.registration import Registration
from lorad.service.revisions import Revisions
from lorad.service.tasks import Tasks
from tests.fakes.fresh_registry import open_fresh

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
    num_layers=1,
    module_dims=((4096, 4096),) * 7,
    num_ids=256,
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
        self.sent, self.shares = [], []
        self.submitted = {}
        self.revisions, self.manifests, self.refuse, self.leases = {}, {}, {}, {}
        self.pin_room = 99  # how many revisions may be pinned
        self.pinned = set()
        self.damaged = Counter()  # rev -> how many reads find it so
        self.unreadable = Counter()  # rev -> how many reads fail
        self.explanations = {}  # rev -> what an Explain is answered
        self.reports = []  # answers to VerifyRevision: a report or a code
        self.silent = False  # True: submits stay open until `finish`
        self.hold_loads = asyncio.Event()
        self.hold_loads.set()
        self.hold_snapshots = asyncio.Event()
        self.hold_snapshots.set()
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

    def give_way(self, share):
        self.shares.append(share)

    def frame(self, **parts):
        self.events.put_nowait(StepFrame(step=1, **parts))

    def die(self, fatal=None):
        self.state = "dead"
        self.events.put_nowait(fatal or Fatal("internal_error", "killed by the test"))

    def move(self, rev, after, cause="load"):
        if after == "idle" and self.revisions[rev] == "disk":
            read = {"before": "loading", "after": "ram", "cause": cause}
            self.frame(adapters=(AdapterEvent(rev=rev, **read),))
        tier = {"idle": "gpu", "ram": "ram", "registered": "disk"}[after]
        before = {"gpu": "idle", "ram": "ram", "disk": "registered"}[self.revisions[rev]]
        if tier == self.revisions[rev]:
            return
        self.revisions[rev] = tier
        self.frame(adapters=(AdapterEvent(rev=rev, before=before, after=after, cause=cause),))

    async def call(self, command):
        if self.state == "dead":
            raise EngineDied("the engine process is gone")
        self.sent.append(command)
        answer = Answer(command_id=command.command_id)
        match command:
            case AddRevision():
                self.revisions.setdefault(command.manifest.rev, "disk")
                self.manifests[command.manifest.rev] = command
                return self.mark(command, command.manifest.rev)
            case RemoveRevision(_, rev):
                self.move(rev, "registered", "remove")
                self.revisions.pop(rev)
                self.pinned.discard(rev)
            case Load():
                await self.hold_loads.wait()
                if self.damaged[command.rev]:
                    return self.find_damaged(command)
                if self.unreadable[command.rev]:
                    return self.fail_to_read(command)
                if code := self.refuse.get(command.rev):
                    return Answer(command_id=command.command_id, code=code, message="refused")
                self.move(command.rev, "idle" if command.tier == "gpu" else "ram")
            case Evict():
                self.move(command.rev, "ram" if command.to == "ram" else "registered", "manual")
            case SetRevision() if command.rev not in self.revisions:
                return Answer(command_id=command.command_id, code="model_not_found")
            case SetRevision():
                return self.mark(command, command.rev)
            case VerifyRevision():
                said = self.reports.pop(0)
                if isinstance(said, str):
                    return Answer(command_id=command.command_id, code=said, message="said so")
                return Answer(command_id=command.command_id, report=said)
            case Explain(command_id, rev) if rev in self.explanations:
                return Answer(command_id=command_id, explanation=self.explanations[rev])
            case Explain():
                return Answer(command_id=command.command_id, code="model_not_found")
            case GetSnapshot():
                await self.hold_snapshots.wait()
                return Answer(command_id=command.command_id, snapshot=self.snapshot())
        return answer

    def find_damaged(self, command):
        """One load more has failed; the transition is told after the answer."""
        self.damaged[command.rev] -= 1
        words = {"rev": command.rev, "cause": "damaged", "message": "block 0 is wrong"}
        event = AdapterEvent(before="loading", after="registered", **words)
        self.frame(adapters=(event,))
        code = "adapter_damaged"
        return Answer(command_id=command.command_id, code=code, message="block 0 is wrong")

    def fail_to_read(self, command):
        self.unreadable[command.rev] -= 1
        words = {"rev": command.rev, "cause": "error", "message": "no such file"}
        self.frame(adapters=(AdapterEvent(before="loading", after="registered", **words),))
        return Answer(command_id=command.command_id, code="load_failed", message="no such file")

    def mark(self, command, rev):
        """A pin without room is refused, and the revision stays what it was."""
        if command.pinned and len(self.pinned | {rev}) > self.pin_room:
            return Answer(command_id=command.command_id, code="no_room", message="too many pins")
        (self.pinned.add if command.pinned else self.pinned.discard)(rev)
        return Answer(command_id=command.command_id)

    def snapshot(self):
        states = {"gpu": "idle", "ram": "ram", "disk": "registered"}
        revisions = tuple(
            RevisionStatus(
                rev=rev,
                state=states[tier],
                slot=n if tier == "gpu" else None,
                loads=1,
                max_rank=4,
                prefix_query_tokens=80,
                prefix_hit_tokens=32,
                prefix_lost_tokens=16,
                prefix_saved_seconds=0.5,
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
            prefix=PrefixStatus(query_tokens=90, hit_tokens=32, found_blocks=(1, 1)),
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


# ----------------------------------------------------------------- adapters without tensors
class World:
    """Services over a real registry and store, a fake engine, and adapters that are one number.

    A folder's `adapter_config.json` holds `{"n": ...}`, its identity, or `{"bad": "E_..."}`.
    """

    def __init__(self, state_dir, **client):
        self.dir = state_dir
        start = Registry.open if state_dir.exists() else open_fresh
        self.registry = start(state_dir)
        self.store = self.registry.store
        self.events = EventRing()
        self.tasks = Tasks()
        self.clients = []
        self.pin_room = 99
        self.packed = []
        self.bad_packs = {}  # rev -> reason
        self.info = INFO
        self.with_gain = set()  # revisions that depend on the base's weights
        self.packs_as = {}  # rev -> what its files are by now
        self.link = EngineLink(
            EngineConfig(model="m"), self.events, new_client=self.new_client, first_pause=0.0
        )
        records = [serving.adapter for serving in self.registry.all_serving()]
        self.catalog = Catalog(entry_of(record, ("base",)) for record in records)
        self.names = Names(self.registry, self.catalog, models=("base",))
        self.picture = Picture(self.link)
        self.intake = Intake(self.store, inspect=self.inspect, pack=self.pack)
        self.revisions = Revisions(
            self.registry,
            self.link,
            self.intake,
            self.catalog,
            self.events,
            self.tasks,
            model="base",
        )
        shelf = self.revisions.shelf
        self.housekeeping = Housekeeping(self.registry, [self.link], shelf, self.events)
        room = RoomMaker(self.registry, lambda rev: self.revisions, self.housekeeping.collect)
        self.intake.make_room = self.housekeeping.make_room = room.make
        self.registration = Registration(
            "base",
            self.names,
            self.link,
            self.intake,
            self.revisions,
            self.events,
            check_pin=self.check_pin,
        )
        self.pins_refused = False
        self.model = ModelAdapters(
            "base",
            self.names,
            self.link,
            self.intake,
            self.revisions,
            self.registration,
            self.events,
            self.tasks,
            check_pin=self.check_pin,
            refresh=self.picture.refresh,
        )
        self.lineup = Lineup(self.catalog, [self.model])
        self.adapters = AdapterService(
            self.names,
            self.lineup,
            self.intake,
            self.events,
            self.tasks,
            refresh=self.picture.refresh,
        )
        self.crowd = []
        self.listing = Listing(
            self.names,
            self.picture,
            self.events,
            info=lambda model: self.info,
            crowd=self.crowd,
        )
        self.inbox = Inbox(
            self.adapters,
            self.names,
            self.intake,
            self.events,
            self.tasks,
            Memory(state_dir / "inbox.json"),
            copy=lambda folder, staging: shutil.copytree(folder, staging.path, dirs_exist_ok=True),
            on_delete="keep",
        )
        self.model.losses.on_lost = self.inbox.recover
        self.housekeeping.on_lost = self.adapters.lose_files

    def new_client(self):
        client = FakeClient(self.info)
        client.pin_room = self.pin_room
        self.clients.append(client)
        return client

    @property
    def engine(self):
        return self.clients[-1]

    def check_pin(self, rev, modules=()):
        if self.pins_refused:
            raise LoradError("no_room", "too many pins")

    async def start(self):
        self.link.start()
        async with asyncio.timeout(5):
            await self.link.ready.wait()

    async def close(self):
        await self.link.stop()
        await self.tasks.cancel()
        self.registry.close()

    def folder(self, n, **config):
        folder = self.dir / "folders" / f"f{n}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"n": n, **config}))
        return folder

    def rev(self, n):
        return hashlib.sha256(str(n).encode()).hexdigest()

    def modules(self, rev):
        return (PackedModule(0, "q_proj", 4, 2.0, gain=rev in self.with_gain),)

    def inspect(self, folder, /):
        config = json.loads((folder / "adapter_config.json").read_text())
        if "bad" in config:
            raise AdapterInvalid(config["bad"], "not an adapter")
        manifest = AdapterManifest(
            rank=4,
            ranks={"q_proj": 4},
            alpha=8.0,
            rslora=False,
            targets=("q_proj",),
            dtype="float32",
            num_layers=1,
            file_bytes=100,
            modules=self.modules(self.rev(config["n"])),
            tensors=(),
            changes_kv=True,
            warnings=(),
            semantic={},
            text_files=(),
        )
        return manifest, self.rev(config["n"])

    async def pack(self, folder, out):
        rev = folder.name
        if reason := self.bad_packs.get(rev):
            raise AdapterInvalid(reason, "cannot be packed")
        self.packed.append(rev)
        stream = stream_id(self.info.layout, self.info.base, self.modules(rev))
        path = out / f"packed-{stream}.bin"
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(2 * INFO.block_bytes))
        path.with_suffix(".sums").touch()
        return PackedManifest(
            rev=self.packs_as.get(rev, rev),
            path=str(path),
            layout=stream,
            num_blocks=2,
            true_bytes=100,
            max_rank=4,
            changes_kv=True,
            modules=self.modules(rev),
        )

    async def disk_full(self, folder, out):
        error = EngineError("no room for the packed file")
        error.code = "no_room"
        raise error

    async def add(self, name, n, **options):
        staging = await self.adapters.stage()
        shutil.copytree(self.folder(n), staging.path, dirs_exist_ok=True)
        options = {"source": "upload", **options}
        return await self.adapters.add(staging, name, **options)

    def types(self, name=None):
        items = self.events.newest(1000)
        return [item.type for item in items if name is None or item.name == name]


@pytest.fixture
def memory_dir(tmp_path):
    """A directory whose fsync costs nothing, where there is one: durability is tested elsewhere."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def world(memory_dir):
    """Run `scenario(world)` with a started engine, or without; the same directory each time."""

    def run(scenario, *, start=True):
        async def inner():
            world = World(memory_dir / "state")
            try:
                async with asyncio.timeout(20):
                    if start:
                        await world.start()
                    return await scenario(world)
            finally:
                await world.close()

        return asyncio.run(inner())

    return run


@pytest.fixture
def fleet(world, fake):
    """fleet(scenario): `scenario(fleet)` with three engines that are up."""

    from tests.fakes.replica_fleet import Fleet

    def run(scenario):
        async def inner(w):
            fleet = Fleet(w, fake)
            await fleet.start()
            try:
                await scenario(fleet)
            finally:
                await fleet.stop()

        world(inner, start=False)

    return run
