"""EngineClient: the daemon's end of one engine process.  asyncio, torch-free.

Goes in: an EngineConfig, then commands.  Comes out: events in order on `events`, and one answer for
every `call`.  The last event of a process is always a `Fatal` unless it was stopped on purpose, and
answers that are still owed then raise EngineDied.  Restarting is the caller's: a client serves one
process.  By its name, too, for callers that may not import torch: what `packers` does, and what can
be told of a base and its fit.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.draft_fit import doubt as draft_doubt
from engine.errors import EngineDied, EngineError
from engine.fit import check_fit
from engine.framing import encode_frame, event_reader
from engine.guests import bytes_of as guests_bytes
from engine.guests import usual_room as guests_room
from engine.messages import (
    Abort,
    Answer,
    Command,
    EngineInfo,
    EngineReady,
    Event,
    Fatal,
    Heartbeat,
    Shutdown,
    StepFrame,
    Submit,
)
from engine.models.bases import BaseSpec, read_base
from engine.models.encoder_spec import EncoderSpec
from engine.models.spec import ModelSpec, read_spec
from engine.packers import child_environment, pack, packed_layout, verify
from engine.pooling.config import PoolingConfig
from engine.pooling.fit import read_model, scores_by_words, usual_tasks
from engine.pooling_messages import AbortPool, GiveWay, PoolRequest

__all__ = [
    "BaseSpec",
    "EncoderSpec",
    "EngineClient",
    "ModelSpec",
    "check_fit",
    "check_weight_files",
    "child_environment",
    "draft_doubt",
    "guests_bytes",
    "guests_room",
    "pack",
    "packed_layout",
    "read_base",
    "read_model",
    "read_spec",
    "scores_by_words",
    "usual_tasks",
    "verify",
]

ClientState = Literal["new", "starting", "ready", "stalled", "dead"]

#: Without a heartbeat, or inside one step, for this long: stalled.
STALL_SECONDS = 10.0
#: How long a process that has closed its socket may take to go.
REAP_SECONDS = 5.0
READ_BYTES = 1 << 18
#: Past this many events that nobody has taken, no more are read; looked at this often.
EVENTS_AHEAD, BEHIND_SECONDS = 512, 0.001
STDERR_FD = 2


def check_weight_files(folder: Path) -> None:
    """Open a base's weight files and read their headers.  Raises ConfigError, ModelUnsupported."""
    from engine.models.base_files import BaseFiles  # imports numpy, which a client does without

    with BaseFiles(folder):
        pass


class EngineClient:
    """One engine process, from `start` to `stop`.  Use it from one event loop."""

    #: What the interpreter runs; a socket and the configuration follow.
    program: tuple[str, ...] = ("-m", "engine.process")

    def __init__(
        self, *, stall_seconds: float = STALL_SECONDS, env: Mapping[str, str] | None = None
    ) -> None:
        """`env`: of the process, beside what it inherits."""
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._stall_seconds, self._env = stall_seconds, dict(env or {})
        self.info: EngineInfo | None = None
        self.last_heartbeat: Heartbeat | None = None
        self.fatal: Fatal | None = None
        self.pid: int | None = None
        self._state: Literal["new", "starting", "ready", "dead"] = "new"
        self._heard = time.monotonic()
        self._stopping = False
        self._ids = itertools.count(1)
        self._owed: dict[int, asyncio.Future[Answer]] = {}
        self._ready = asyncio.Event()  # set when the engine is ready, or never will be
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def state(self) -> ClientState:
        """`stalled` is `ready` without a sign of life for `stall_seconds`."""
        if self._state == "ready" and self._stalled_for() > self._stall_seconds:
            return "stalled"
        return self._state

    @property
    def returncode(self) -> int | None:
        """Exit status of the process; negative for a signal, None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self, config: EngineConfig | PoolingConfig) -> None:
        """Spawn the process.  It is not ready yet: see `wait_ready`, or EngineReady on `events`."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self.program,
                str(theirs.fileno()),
                msgspec.json.encode(config).decode(),
                *(("pool",) if isinstance(config, PoolingConfig) else ()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=STDERR_FD,  # results are printed by others; whatever it says is log
                pass_fds=(theirs.fileno(),),
                env=child_environment() | self._env,
                start_new_session=True,  # it is ended together with its other ranks
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._state = "starting"
        self.pid = self._process.pid
        self._listener = asyncio.create_task(self._listen(reader))

    async def wait_ready(self) -> EngineInfo:
        """What the engine became.  Raises EngineError with the engine's own last words."""
        await self._ready.wait()
        if self.info is None:
            raise self._death()
        return self.info

    def next_id(self) -> int:
        """A fresh command id."""
        return next(self._ids)

    def submit(self, submit: Submit) -> None:
        """Send a sequence; its deltas come on `events`.  Raises EngineDied."""
        self._send(submit)

    def abort(self, request_id: str) -> None:
        """End a sequence; harmless when it has ended, or the engine has."""
        with contextlib.suppress(EngineError):
            self._send(Abort(request_id))

    def pool(self, request: PoolRequest) -> None:
        """Send an input; its one result comes on `events`.  Raises EngineDied."""
        self._send(request)

    def abort_pool(self, request_id: str) -> None:
        """Forget an input, which has no result then; harmless when it has ended."""
        with contextlib.suppress(EngineError):
            self._send(AbortPool(request_id))

    def give_way(self, share: float) -> None:
        """Of the device's time, to an engine that pools; harmless when it has ended."""
        with contextlib.suppress(EngineError):
            self._send(GiveWay(share))

    async def call(self, command: Command) -> Answer:
        """Send a command that has a `command_id` and wait for its answer.  Raises EngineDied."""
        unanswered = Submit | Abort | PoolRequest | AbortPool | GiveWay
        assert not isinstance(command, unanswered), "has no answer"
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._owed[command.command_id] = future
        try:
            self._send(command)
            return await future
        finally:
            self._owed.pop(command.command_id, None)

    async def stop(self, timeout: float = 10.0) -> None:
        """Shut down in order; past `timeout` seconds, kill.  Returns when the process is gone."""
        if self._process is None:
            return
        self._stopping = True
        try:
            async with asyncio.timeout(timeout):
                with contextlib.suppress(EngineError):  # it may have died before
                    await self.call(Shutdown(self.next_id()))
                await self._process.wait()
        except TimeoutError:
            self._kill()
        await self._process.wait()
        if self._listener is not None:
            await self._listener

    # ------------------------------------------------------------- inside
    def _send(self, command: Command) -> None:
        if self._writer is None or self._state == "dead":
            raise self._death()
        self._writer.write(encode_frame(command))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        frames = event_reader()
        try:
            while data := await reader.read(READ_BYTES):
                for event in frames.feed(data):
                    self._take(event)
                await self._have_room()
        except OSError:
            pass  # reset instead of closed: it died with commands unread
        except ValueError as error:  # msgspec's own errors are ValueErrors
            self.fatal = self.fatal or Fatal("internal_error", f"broken engine socket: {error}")
            self._kill()
        finally:
            await self._bury()

    async def _have_room(self) -> None:
        """Read no more while nobody takes what was read: the socket fills, and the engine waits.

        Looks again and again, since a queue tells nobody when it shrinks; at rest it costs nothing.
        """
        while self.events.qsize() > EVENTS_AHEAD and not self._stopping:
            await asyncio.sleep(BEHIND_SECONDS)

    def _take(self, event: Event) -> None:
        self._heard = time.monotonic()
        match event:
            case EngineReady(info):
                self.info, self._state = info, "ready"
                self._ready.set()
            case Heartbeat():
                self.last_heartbeat = event
            case StepFrame():
                for answer in event.answers:
                    future = self._owed.pop(answer.command_id, None)
                    if future is not None and not future.done():
                        future.set_result(answer)
            case Fatal():
                self.fatal = event
                return  # told once, by _bury, when the process is known to be gone
        self.events.put_nowait(event)

    async def _bury(self) -> None:
        """The socket has ended: reap the process and tell everybody who waits."""
        assert self._process is not None and self._writer is not None
        self._writer.close()
        try:
            async with asyncio.timeout(REAP_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            self._kill()
            code = await self._process.wait()
        self._end_group()
        self._state = "dead"
        if not self._stopping:
            self.fatal = self.fatal or Fatal("internal_error", _how_it_ended(code))
            self.events.put_nowait(self.fatal)
        for future in self._owed.values():
            if not future.done():
                future.set_exception(EngineDied(_how_it_ended(code)))
        self._owed.clear()
        self._ready.set()

    def _kill(self) -> None:
        """Not `Process.kill`: it may reap the child under asyncio's watcher and lose its status."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _end_group(self) -> None:
        """Ranks end with the first one by themselves, but for one that hangs, and would keep its
        GPU from those who are started next."""
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _death(self) -> EngineError:
        """Before it was ready, the engine's own reason; afterwards that it died."""
        if self.fatal is not None and self.info is None:
            error = EngineError(self.fatal.message, hint=self.fatal.hint)
            error.code = self.fatal.code
            return error
        return EngineDied(self.fatal.message if self.fatal else "the engine process is not running")

    def _stalled_for(self) -> float:
        inside = self.last_heartbeat.stalled_seconds if self.last_heartbeat else 0.0
        return max(inside, time.monotonic() - self._heard)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the engine process was ended by signal {-code}"
    return f"the engine process ended with status {code}"
