"""An engine that crashes: the real scheduler, residency and pool behind a client's face.

`Client` has the face of `engine.client.EngineClient` and no process: each of its turns is one step
of `Engine`, the harness of tests/unit/engine with its fake weights, memory and copies.  It dies or
hangs when told.  Both hold that transitions follow from one another, that an answer comes once,
and that nothing is told of a request after its end.
"""

import asyncio
import importlib.util
from dataclasses import replace
from itertools import count
from pathlib import Path

from engine.adapters.states import TRANSITIONS, State
from engine.errors import EngineDied
from engine.messages import (
    Abort,
    Answer,
    EngineInfo,
    EngineReady,
    Fatal,
    GetSnapshot,
    Starting,
    StepFrame,
    Submit,
)
from engine.status_messages import EngineSnapshot, PoolStatus, RevisionStatus

BLOCK_BYTES = 100
BOX = {"num_blocks": 24, "slots": 3, "kv_floor": 4, "ram_blocks": 10, "blocks_in_flight": 6}
INFO = EngineInfo(
    device="cpu",
    device_name="cpu",
    dtype="float32",
    layout="0123456789ab",
    block_bytes=BLOCK_BYTES,
    block_size=4,
    num_blocks=24,
    max_model_len=64,
    max_num_seqs=8,
    max_batch_tokens=32,
    num_layers=1,
    module_dims=((8, 8),) * 7,
    num_ids=10_000,
    vocab_size=10_000,
    eos_token_ids=(),
    weight_bytes=1,
    arena_bytes=24 * BLOCK_BYTES,
    ram_cache_bytes=10 * BLOCK_BYTES,
    pid=1,
)


def load(path):
    """A module of another folder of tests."""
    spec = importlib.util.spec_from_file_location(f"lives_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


engine_parts = load(Path(__file__).parents[1] / "unit" / "engine" / "conftest.py")


class Host(engine_parts.FakeHost):
    """Looks at the packed file when it has read it: gone or cut is an error, spoilt is damage."""

    def __init__(self, limit_blocks) -> None:
        super().__init__(limit_blocks)
        self.paths = {}

    def want(self, rev, path, num_bytes):
        self.paths[rev] = path
        return super().want(rev, path, num_bytes)

    def poll(self):
        done = []
        for read in super().poll():
            if read.cancelled:
                done.append(read)
                continue
            path, size = Path(self.paths[read.rev]), self.sizes.get(read.rev, 0)
            data = path.read_bytes() if path.exists() else b""
            error = "" if len(data) == size else f"expected {size} bytes, found {len(data)}"
            damaged = not error and data.startswith(b"spoilt")
            if error or damaged:
                self.sizes.pop(read.rev, None)
            done.append(replace(read, error=error or "spoilt" * damaged, damaged=damaged))
        return done


class Engine(engine_parts.Harness):
    """`told`: what the last step has to say.  Holds that transitions follow from one another."""

    def __init__(self) -> None:
        super().__init__(**BOX, step_seconds=0.0)
        host = Host(BOX["ram_blocks"])
        for owner in (self, self.residency, self.residency._loader, self.copier):
            setattr(owner, "_host" if hasattr(owner, "_host") else "host", host)
        self.copier.copies_take = 2
        self.states: dict[str, str] = {}
        self.ended: set[str] = set()
        self.told = ([], [], [])
        self.turns = 0

    def turn(self, commands, now) -> tuple[list, list, list]:
        """One step as the core does it; (deltas, transitions, answers)."""
        self.clock.now, self.told = now, ([], [], [])
        self.turns += 1
        for command in commands:
            match command:
                case Submit():
                    self.scheduler.add(command)
                case Abort():
                    self.scheduler.abort(command.request_id)
                case GetSnapshot():
                    paint = self.paint()
                    self.told[2].append(Answer(command_id=command.command_id, snapshot=paint))
                case _:
                    self.residency.command(command)
        self.step()
        return self.told

    def _collect(self, deltas) -> None:
        deltas = [*deltas, *self.scheduler.take_deltas()]
        for delta in deltas:
            assert delta.request_id not in self.ended, "told of after its end"
            if delta.finish_reason:
                self.ended.add(delta.request_id)
        events = self.residency.take_events()
        for event in events:
            before = self.states.get(event.rev, State.REGISTERED)
            assert event.before == before, f"{event} does not follow {before}"
            assert State(event.after) in TRANSITIONS[State(event.before)]
            self.states[event.rev] = event.after
        for parts, more in zip(
            self.told, (deltas, events, self.residency.take_answers()), strict=True
        ):
            parts.extend(more)

    def paint(self) -> EngineSnapshot:
        counts = self.pool.counts
        return EngineSnapshot(
            step=1,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            pool=PoolStatus(
                total=self.pool.num_blocks,
                free=counts.free,
                kv_active=counts.kv_active,
                kv_cached=counts.kv_cached,
                adapter_active=counts.adapter,
                adapter_idle=0,
                block_bytes=BLOCK_BYTES,
                block_size=4,
            ),
            slots_total=self.slots.num_slots,
            slots_used=self.slots.num_slots - self.slots.num_free,
            ram_used_bytes=self.host.used_bytes,
            ram_limit_bytes=self.host.limit_bytes,
            revisions=tuple(
                RevisionStatus(rev=r.rev, state=r.state) for r in self.residency.revisions()
            ),
            base=RevisionStatus(rev="", state="idle"),
        )

    @property
    def resting(self) -> bool:
        return not (self.scheduler.has_work or self.flights or self.residency.busy)


class Client:
    """The face of `engine.client.EngineClient`: one process, from `start` to `die` or `stop`."""

    def __init__(self, start_seconds=0.3) -> None:
        self.events: asyncio.Queue = asyncio.Queue()
        self.info = self.pid = None
        self.state = "new"
        self.engine = Engine()
        self.start_seconds = start_seconds
        self.last_words = None  # of one that fails to start
        self._commands: list = []
        self._owed: dict[int, asyncio.Future] = {}
        self._answered: set[int] = set()
        self._ids = count(1)
        self._bell = asyncio.Event()
        self._loop = None

    async def start(self, config) -> None:
        self.state = "starting"
        self._loop = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self.events.put_nowait(Starting("weights", 0.5))
        await asyncio.sleep(self.start_seconds)
        if self.last_words is not None:
            self.die(self.last_words)
            return
        self.info, self.state = INFO, "ready"
        self.events.put_nowait(EngineReady(INFO))
        time = asyncio.get_running_loop().time
        while True:
            if self.engine.resting and not self._commands:
                self._bell.clear()
                await self._bell.wait()
            await asyncio.sleep(0.01)
            if self.state == "stalled":
                continue
            commands, self._commands = self._commands, []
            deltas, transitions, answers = self.engine.turn(commands, time())
            for answer in answers:
                assert answer.command_id not in self._answered, "answered twice"
                self._answered.add(answer.command_id)
                future = self._owed.pop(answer.command_id, None)
                if future is not None and not future.done():
                    future.set_result(answer)
            parts = {"adapters": tuple(transitions), "deltas": tuple(deltas)}
            self.events.put_nowait(StepFrame(step=1, answers=tuple(answers), **parts))

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, submit) -> None:
        self._send(submit)

    def abort(self, request_id) -> None:
        if self.state != "dead":
            self._send(Abort(request_id))

    async def call(self, command) -> Answer:
        assert command.command_id not in self._owed, "one id, two commands"
        future = self._owed[command.command_id] = asyncio.get_running_loop().create_future()
        self._send(command)
        return await future

    def _send(self, command) -> None:
        if self.state == "dead":
            raise EngineDied("it is dead")
        self._commands.append(command)
        self._bell.set()

    def die(self, fatal=None) -> None:
        """Whatever it was doing.  Frames that were sent arrive; the rest does not."""
        if self.state == "dead":
            return
        self.state = "dead"
        self.events.put_nowait(fatal or Fatal("internal_error", "killed"))
        for future in self._owed.values():
            if not future.done():
                future.set_exception(EngineDied("killed"))
        self._owed.clear()
        if self._loop is not None:
            self._loop.cancel()

    async def stop(self, timeout=10.0) -> None:
        self.state = "dead"
        if self._loop is not None:
            self._loop.cancel()
