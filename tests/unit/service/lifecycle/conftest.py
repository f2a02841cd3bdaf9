"""The daemon's services over an engine that crashes: what is played, and what has to come of it.

`Home` is the real services, registry and store over tests/fakes/crashing_engine.py.  Time is
virtual and the only thread does everything, so a seed plays the same life again.
"""

import asyncio
import importlib.util
import random
import shutil
import tempfile
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import pytest

from engine.messages import Fatal, PackedManifest, SamplingParams
from lorad.config_sections import Limits
from lorad.registry import writer
from lorad.service.ask import Ask
from lorad.service.requests import RequestService
from lorad.service.seams import Backend
from lorad.service.text_threads import TextThreads
from lorad.text.detok import Piece as Decoded

_TESTS = Path(__file__).parents[3]


def _load(path):
    """A module of another folder of tests."""
    spec = importlib.util.spec_from_file_location(f"lives_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


virtual = _load(_TESTS / "fakes" / "virtual_loop.py")
crashing = _load(_TESTS / "fakes" / "crashing_engine.py")
service_parts = _load(_TESTS / "unit" / "service" / "conftest.py")
BLOCK_BYTES, INFO = crashing.BLOCK_BYTES, crashing.INFO


# ------------------------------------------------------------------- the daemon
class LateWriter:
    """Jobs of the registry end some milliseconds after they were given, one after another."""

    def __init__(self, registry, seconds) -> None:
        registry.changes.writer.close()
        self._engine = writer.sqlite.writer_engine(registry.path)
        self._connection = self._engine.connect()
        self._seconds = seconds
        self._jobs: deque = deque()

    def submit(self, work, then=None) -> Future:
        job = writer._Job(work, then, Future())
        self._jobs.append(job)
        asyncio.get_running_loop().call_later(self._seconds(), self._do)
        return job.future

    def _do(self) -> None:
        job = self._jobs.popleft()
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            result = writer._transact(self._connection, job.work)
        except BaseException as error:
            job.future.set_exception(writer.sqlite.translate(error))
        else:
            writer._after(job, result)
            job.future.set_result(result)

    def close(self) -> None:
        while self._jobs:
            self._do()
        self._connection.close()
        self._engine.dispose()


class Words:
    """Text of ids, and back: numbers."""

    num_tokens, vocabulary = 0, None

    def ends(self, base, *, chat):
        return frozenset(base)

    def detokenizers(self, stop, **which):
        return lambda prompt: self

    def push(self, ids):
        return Decoded("".join(f"{token}," for token in ids), False, len(ids))

    def finish(self):
        return ""


class Home(service_parts.World):
    """A started daemon without HTTP.  `serving` is what each name has to mean by now."""

    def __init__(self, folder, draw) -> None:
        self.draw = draw
        self.engine_seconds = 0.3
        super().__init__(folder)
        self.loop = asyncio.get_running_loop()
        self.registry.changes.writer = LateWriter(self.registry, lambda: draw.random() * 0.02)
        self.link._clock = self.loop.time
        self.link._kill = lambda: self.client.die(Fatal("internal_error", "replaced"))
        self.requests = RequestService(
            self.adapters,
            {"base": Backend(self.link, lambda rev: Words(), "0" * 8)},
            limits=Limits(queue=60, queue_per_tenant=20, deadline=60.0),
            version="1",
            threads=TextThreads(virtual.InlineExecutor(1)),
            clock=self.loop.time,
        )
        self.info = INFO
        self.pack_fails: set[str] = set()
        self.pack_seconds: dict[str, float] = {}

    def new_client(self):
        self.clients.append(crashing.Client(self.engine_seconds))
        return self.clients[-1]

    @property
    def client(self):
        return self.clients[-1]

    async def pack(self, folder, out):
        rev = folder.name
        await asyncio.sleep(self.pack_seconds.get(rev, self.draw.random() * 0.2))
        if rev in self.pack_fails:
            raise service_parts.AdapterInvalid("E_NAN", "a value is not finite")
        blocks, stream = self.blocks(rev), service_parts.stream_id(INFO.layout, INFO.base, ())
        path = out / f"packed-{stream}.bin"
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(blocks * BLOCK_BYTES))
        path.with_suffix(".sums").touch()
        return PackedManifest(
            rev=rev,
            path=str(path),
            layout=stream,
            num_blocks=blocks,
            true_bytes=blocks * BLOCK_BYTES,
            max_rank=4,
            changes_kv=True,
            modules=self.modules(rev),
        )

    def blocks(self, rev) -> int:
        """Of the pool: 1 to 5."""
        return int(rev[:8], 16) % 5 + 1

    def packed_file(self, rev) -> Path | None:
        return next(iter(self.store.path(rev).glob("packed-*.bin")), None)

    async def ask(self, model, prompt, max_tokens):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return await self.requests.start(
            Ask(model=model, prompts=(prompt,), sampling=sampling, max_tokens=max_tokens)
        )

    async def add(self, name, n, **options):
        """Without the copy of files that the services' tests make."""
        staging = await self.adapters.stage()
        (staging.path / "adapter_config.json").write_text(f'{{"n": {n}}}')
        return await self.adapters.add(staging, name, source="upload", **options)

    async def settled(self, *, of=lambda: True) -> None:
        """Until nothing of the daemon's own runs and the engine rests."""
        async with asyncio.timeout(600):
            while not (self.link.state == "ready" and self.client.engine.resting and of()):
                await asyncio.sleep(0.05)
            await self.tasks.settle()
            await asyncio.sleep(0.5)

    def expected(self, prompt, rev, length) -> str:
        tokens = self.client.engine.alone(list(prompt), rev, length)
        return "".join(f"{token}," for token in tokens)


# ------------------------------------------------------------------- fixtures
def play(scenario, *, seed=0):
    """`scenario(home)` in virtual time, in a directory whose fsync costs nothing."""
    shm = Path("/dev/shm")

    async def inner(folder):
        home = Home(folder / "state", random.Random(seed))
        try:
            await home.start()
            return await scenario(home)
        finally:
            await home.close()

    folder = Path(tempfile.mkdtemp(prefix="lives-", dir=shm if shm.is_dir() else None))
    try:
        return virtual.run(inner(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def at_home():
    return play
