"""EngineLink: the one owner of the engine process, from first start to last stop.

Goes in: sequences with a callback, inputs to pool, and commands.  Comes out: deltas to the callback
of their sequence, results, adapter transitions to one listener, answers.  A dead engine is
replaced: what is in flight ends with the error `engine_restarting`, and `bring_up` gives the new
process what the old one held.  A few crashes within minutes end the daemon through `failed`.  Knows
no names and no HTTP.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.messages import (
    AdapterEvent,
    Answer,
    Command,
    EngineInfo,
    Event,
    Fatal,
    Heartbeat,
    Starting,
    StepFrame,
    Submit,
)
from engine.pooling.config import PoolingConfig
from engine.pooling.requests import PoolRequest, PoolResult
from lorad.errors import LoradError, StartError, from_engine
from lorad.service.engine_face import Client, LinkState, Turn, not_ready, nothing, refused
from lorad.service.engine_start import Crashes, Refusal, first_result, first_token, start_error
from lorad.service.events import EventRing, Level
from lorad.service.flights import Flights, OnDelta
from lorad.service.inputs import Inputs
from lorad.service.stalls import Look, Stalls
from lorad.service.turns import Turns

log = logging.getLogger("lorad.engine")

#: A step that has not ended for this long never will: the process is replaced.
REPLACE_AFTER = 60.0
#: And so much later it is, or nobody looks after it; a start reports as it goes, and often.
REPLACE_GRACE, START_SILENCE = 30.0, 600.0


class EngineLink:
    """Use it from the daemon's loop.  `start`, then wait for `ready` or `failed`."""

    def __init__(
        self,
        config: EngineConfig | PoolingConfig,
        events: EventRing,
        *,
        new_client: Callable[[], Client],
        clock: Callable[[], float] = time.monotonic,
        first_pause: float = 0.5,
        replace_after: float = REPLACE_AFTER,
        model: str = "",
        replica: str = "",
        no_device: Refusal | None = None,
    ) -> None:
        """`model`: whose engine it is, where there are several, and which of that model's where it
        has several: `replica`.  `no_device`: what an operator is
        told if it finds no device, in place of the engine's words."""
        self.config = config
        self.events = events
        self.state: LinkState = "starting"
        self.progress = "starting the engine"  # for people: why it is not ready
        self.fraction = 0.0
        self.info: EngineInfo | None = None
        self.restarts = 0
        self.starts_per_second = 0.0  # as the last heartbeat said
        self.last_step_at = 0.0  # seconds since the epoch; 0.0 = none yet
        self._step = 0
        #: Revisions that the present engine process knows; kept by whoever sends AddRevision.
        self.known: set[str] = set()
        #: Entered before a process starts, left when it is there or dead: what it is told.
        self.turn: Turn = lambda: contextlib.nullcontext(self.config)
        #: Of the device's time, for one that pools; 1.0 = all that there is.
        self.share: Callable[[], float] = lambda: 1.0
        self._share_told = 1.0  # to the present process
        self.bring_up: Callable[[EngineInfo], Awaitable[None]] = nothing
        self.prepare: Callable[[str], Awaitable[None]] = nothing
        self.on_adapter: Callable[[AdapterEvent], None] = lambda event: None
        self.on_death: Callable[[], None] = lambda: None  # before the next process hears anything
        self.on_ready: Callable[[], None] = lambda: None  # a new process takes requests
        self.on_stalled: Callable[[], None] = lambda: None  # it hangs, and may go on yet
        self.on_progress: Callable[[str, float], None] = lambda phase, fraction: None
        self.on_state: Callable[[], None] = lambda: None  # `state` or `progress` has changed
        self.flights = Flights(self._live, self.known, lambda rev: self.prepare(rev), self._spawn)
        self._inputs = Inputs(self._live, self.known, lambda rev: self.prepare(rev))
        self.ready = asyncio.Event()  # set while the state is `ready`
        self.hanging = asyncio.Event()  # set while it is `engine_stalled`
        self.informed = asyncio.Event()  # `info` is there
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._new_client = new_client
        self._clock = clock
        self._pause = first_pause
        self._replace_after, self._no_device = replace_after, no_device
        self._model, self._replica = model, replica
        self._client: Client | None = None
        self._crashes = Crashes()
        self._moved = clock()  # when the state changed, or a start reported progress
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._waits = False  # for its turn to start a process

    # ------------------------------------------------------------- for the services
    def check(self) -> None:
        """Raise what a request is told while the engine cannot take it."""
        if self.state != "ready":
            raise not_ready(self.state, self.progress, gave_up=self.failed.done())

    def submit(self, submit: Submit, on_delta: OnDelta) -> None:
        """Run a sequence; `on_delta` gets every delta, the last one with a finish_reason.

        A revision that the engine does not know yet is prepared first (packed, added); if that
        fails, the one delta is an error.  Raises LoradError while the engine is not ready.
        """
        self.check()
        self.flights.begin(submit, on_delta)

    def abort(self, request_id: str) -> None:
        """End a sequence; its last delta follows.  Unknown ids are ignored."""
        self.flights.abort(request_id)

    def where(self, request_id: str) -> str:
        """No name: the one engine has it; see Replicas."""
        return ""

    async def pool(self, request: PoolRequest) -> PoolResult:
        """Run one input on an engine that pools; of one that generates it is refused.

        A revision that the engine does not know yet is prepared first.  Cancelling it takes the
        input back.  Raises LoradError: the engine's own refusals, not ready, `engine_restarting`.
        """
        self.check()
        return await self._inputs.run(request)

    def take_back(self, request_id: str) -> None:
        """End an input with `engine_stalled`: somebody else can do it.  Unknown ids are ignored."""
        self._inputs.take_back(request_id, "engine_stalled", "the step loop has not moved")

    def keep_share(self) -> None:
        """Tell the process its `share`, if that has changed; one that starts is told later."""
        client, share = self._client, self.share()
        if client is not None and client.info is not None and share != self._share_told:
            self._share_told = share
            client.give_way(share)

    def next_id(self) -> int:
        """A fresh id for a command of the present engine process."""
        return self._live().next_id()

    async def call(self, command: Command) -> Answer:
        """The successful answer to a command; LoradError with the engine's code otherwise."""
        try:
            answer = await self._live().call(command)
        except EngineError as error:
            raise from_engine(error) from error
        if answer.code:
            raise refused(answer)
        return answer

    @property
    def pid(self) -> int | None:
        """Of the engine process that lives now."""
        client = self._client
        return client.pid if client is not None and client.state != "dead" else None

    @property
    def running(self) -> int:
        """Sequences and inputs in flight, as the daemon counts them."""
        return len(self.flights) + len(self._inputs)

    @property
    def tended(self) -> bool:
        """It is ready, or will be: a start reports progress, what stalls is replaced in time."""
        if self.state in ("ready", "stopped") or self._waits:
            return True
        stalled = self.state == "engine_stalled"
        patience = self._replace_after + REPLACE_GRACE if stalled else START_SILENCE
        return self._clock() - self._moved <= patience

    # ------------------------------------------------------------- for the daemon
    def start(self) -> None:
        self.state = "loading_base"
        self._spawn(self._supervise())
        self._spawn(self._watch_heartbeat())

    async def stop(self, timeout: float = 10.0) -> None:
        """End the engine in order; what still runs ends with `abort` deltas."""
        self._stopping = True
        self._set("stopped", "stopped")
        if self._client is not None:
            # One that is loading weights hears nothing, and has nothing to lose.
            await self._client.stop(timeout if self.info is not None else 0.5)
            self._drain_events(self._client)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_all("draining", "lorad is stopping")

    # ------------------------------------------------------------- supervision
    async def _supervise(self) -> None:
        while not self._stopping:
            client = self._client = self._new_client()
            self._share_told = 1.0
            fatal = await self._serve(client)
            if self._stopping:
                return
            died_young = self.info is None
            self._bury(fatal)
            if died_young:
                self._fail(start_error(fatal, self._no_device))
                return
            if (end := self._crashes.give_up(fatal)) is not None:
                self._fail(end)
                return
            await asyncio.sleep(self._pause * 2 ** (len(self._crashes) - 1))

    async def _serve(self, client: Client) -> Fatal:
        """One process from spawn to death."""
        async with contextlib.AsyncExitStack() as turn:
            self._waits = True
            config = await turn.enter_async_context(self.turn())
            self._waits, self._moved = False, self._clock()  # its own start begins now
            return await self._serve_with(client, config, turn)

    async def _serve_with(
        self,
        client: Client,
        config: EngineConfig | PoolingConfig,
        turn: contextlib.AsyncExitStack,
    ) -> Fatal:
        """`turn` is over once the engine has all of its memory."""
        try:
            await client.start(config)
        except OSError as error:
            return Fatal("internal_error", f"cannot start the engine process: {error}")
        rising: asyncio.Task[None] | None = None
        turns = Turns(client.events)
        try:
            while True:
                event = await turns.next()
                if isinstance(event, Fatal):
                    return event
                if client.info is not None and rising is None:
                    await turn.aclose()
                    rising = self._spawn(self._rise(client.info))
                self._take(event)
        finally:
            if rising is not None:
                rising.cancel()

    def _take(self, event: Event) -> None:
        match event:
            case Starting(phase, fraction):
                self.progress, self.fraction = f"{phase} {fraction:.0%}", fraction
                self._moved = self._clock()
                self.on_progress(phase, fraction)
            case Heartbeat():
                self.starts_per_second = event.starts_per_second
                if event.step != self._step:
                    self._step, self.last_step_at = event.step, time.time()
            case StepFrame():
                for transition in event.adapters:
                    self.on_adapter(transition)
                for delta in event.deltas:
                    self.flights.deliver(delta)
                for pooled in event.pooled:
                    self._inputs.deliver(pooled)

    async def _rise(self, info: EngineInfo) -> None:
        """From EngineReady to `ready`: one forward pass, then the adapters that belong there."""
        self.info = info
        self.informed.set()
        self.keep_share()
        self.progress = "warming up"
        try:
            if info.generates:
                await first_token(self.flights)
            else:
                await first_result(self._inputs, info.pooling)
            self.progress = "loading pinned adapters"
            await self.bring_up(info)
        except LoradError as error:
            log.error("the engine did not come up: %s", error)
            self._kill()  # dead already, or of no use: its death is counted and it is replaced
            return
        self._set("ready", "ready")
        self._tell("engine.ready", message=f"{info.device_name}, {info.dtype}")
        self.on_ready()

    def _bury(self, fatal: Fatal) -> None:
        """Count the crash and end what was in flight."""
        self.known.clear()
        self.starts_per_second = 0.0
        self.on_death()
        self._crashes.note(self._clock())
        self.restarts += 1
        self._set("engine_restarting", f"the engine is restarting: {fatal.message}")
        self._tell("engine.died", level="error", cause=fatal.code, message=fatal.message)
        self._end_all("engine_restarting", f"the engine ended: {fatal.message}")

    def _fail(self, error: StartError) -> None:
        self._set("stopped", error.message)
        replica = f"replica {self._replica}" if self._replica else ""
        if whose := f"{self._model} {replica}".strip():  # others go on without it
            self._tell("engine.died", level="error", cause="gave_up", message=error.message)
            error = type(error)(f"{whose}: {error.message}", hint=error.hint)
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _watch_heartbeat(self) -> None:
        """A stalled engine is announced at once and replaced after `replace_after` seconds."""
        stalls = Stalls(self._clock, self._replace_after)
        while True:
            await asyncio.sleep(0.5)
            client = self._client
            match stalls.look(client is not None and client.state == "stalled"):
                case Look.STALLED:
                    self._set("engine_stalled", "the step loop has not moved")
                    self._tell("engine.stalled", level="error", message=self.progress)
                    self.on_stalled()
                case Look.HOPELESS:
                    self._kill()
                case Look.MOVES if self.state == "engine_stalled":
                    self._set("ready", "ready")
                    self._tell("engine.ready", cause="moving again")

    # ------------------------------------------------------------- inside
    def _end_all(self, code: str, message: str) -> None:
        self.flights.end_all(code, message)
        self._inputs.end_all(code, message)

    def _set(self, state: LinkState, progress: str) -> None:
        self.state, self.progress = state, progress
        self._moved = self._clock()
        for flag, its in ((self.ready, "ready"), (self.hanging, "engine_stalled")):
            flag.set() if state == its else flag.clear()
        self.on_state()

    def _tell(
        self, type: str, *, level: Level = "info", cause: str = "", message: str = ""
    ) -> None:
        """An event; of several models or replicas it says whose."""
        if self._model:
            message = f"{self._model}: {message}" if message else self._model
        told = self.events.publish
        told(type, level=level, cause=cause, message=message, replica=self._replica)

    def _kill(self) -> None:
        client = self._client
        if client is not None and client.state != "dead" and client.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(client.pid, signal.SIGKILL)

    def _live(self) -> Client:
        if self._client is None:
            raise LoradError("loading_base", f"the engine is not ready: {self.progress}")
        return self._client

    def _drain_events(self, client: Client) -> None:
        while not client.events.empty():
            self._take(client.events.get_nowait())

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """A supervisor that fails is the daemon's end, never a silence."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("engine supervision failed", exc_info=task.exception())
            self._fail(
                StartError(
                    f"engine supervision failed: {task.exception()}",
                    hint="this is a fault of lorad: report the traceback in its log",
                )
            )
