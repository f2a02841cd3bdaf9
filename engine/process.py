"""The engine process: a step loop with a socket to the daemon.

Goes in: `python -m engine.process FD CONFIG [pool]`, then command frames on that socket; with
`pool`, CONFIG is a PoolingConfig.  Comes out: Starting, EngineReady, a StepFrame for a step that
has something to say, a Heartbeat twice a second, and Fatal as last words.  Three threads serve the
step loop, which itself never touches the socket: the inbox reads, the sender writes from a
byte-bounded queue, the heartbeat watches.

The process ends when the daemon's end of the socket closes; Ctrl+C is the daemon's to judge.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from typing import NoReturn, Protocol

import msgspec

from engine.collector import collecting_nothing, spare_what_is_there
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.framing import command_reader, encode_frame, in_parts
from engine.last_words import spare_stderr, tell
from engine.messages import (
    Answer,
    Command,
    EngineInfo,
    EngineReady,
    Event,
    Fatal,
    Heartbeat,
    Shutdown,
    Starting,
    StepFrame,
)
from engine.pooling.config import PoolingConfig
from engine.stats import Stats

READ_BYTES = 1 << 18
HEARTBEAT_SECONDS = 0.5
#: Past this many unsent bytes the loop stops stepping until the daemon has read some.
OUTBOX_BYTES = 32 << 20
#: How long last words may take to leave.
FLUSH_SECONDS = 5.0


class Core(Protocol):
    """What is served: of EngineCore, or of ServedPooling."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def idle(self) -> bool: ...
    @property
    def starts_per_second(self) -> float: ...
    def take(self, command: Command) -> None: ...
    def step(self) -> StepFrame: ...
    def wait(self) -> None: ...
    def shutdown(self) -> StepFrame: ...


class Outbox:
    """Frames on their way out: `put` never blocks, one thread sends."""

    def __init__(self, sock: socket.socket, limit_bytes: int = OUTBOX_BYTES) -> None:
        self._sock = sock
        self._limit = limit_bytes
        self._frames: deque[bytes] = deque()
        self._unsent = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send_all, name="lorad-sender", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue one event."""
        frame = encode_frame(event)
        with self._changed:
            self._frames.append(frame)
            self._unsent += len(frame)
            self._changed.notify_all()

    @property
    def has_room(self) -> bool:
        return self._unsent < self._limit

    def wait_for_room(self) -> None:
        """Block between two steps while the daemon is slow to read."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent < self._limit or self._closed)

    def close(self, timeout: float = FLUSH_SECONDS) -> None:
        """Send what is queued, at most for `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._frames or self._closed)
                if not self._frames:
                    return
                frame = self._frames.popleft()
            try:
                self._sock.sendall(frame)
            except OSError:  # the daemon is gone; the inbox sees it too, and ends the process
                return
            with self._changed:
                self._unsent -= len(frame)
                self._changed.notify_all()


class Inbox:
    """Commands as they arrive, and the bell that wakes an idle step loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._commands: deque[Command] = deque()
        self.bell = threading.Event()
        threading.Thread(target=self._read_all, name="lorad-inbox", daemon=True).start()

    def take(self) -> list[Command]:
        """Everything that has arrived, in order."""
        taken = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    def _read_all(self) -> None:
        frames = command_reader()
        try:
            while data := self._sock.recv(READ_BYTES):
                self._commands.extend(frames.feed(data))
                self.bell.set()
        except (OSError, ValueError) as error:
            print(f"lorad engine: broken daemon socket: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # nobody is left to serve, and nothing here outlives the process


class Pulse:
    """Says twice a second which step the loop is in, and for how long."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.core: Core | None = None  # once there is one
        self._step = 0
        self._entered: float | None = None  # when the loop entered the step that it is in
        threading.Thread(target=self._beat, name="lorad-pulse", daemon=True).start()

    def enter(self, step: int) -> None:
        self._step, self._entered = step, time.monotonic()

    def alive(self) -> None:
        """A part of the step is done: it does not hang."""
        if self._entered is not None:
            self._entered = time.monotonic()

    def leave(self) -> None:
        self._entered = None

    def _beat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            entered = self._entered
            stalled = time.monotonic() - entered if entered is not None else 0.0
            rate = self.core.starts_per_second if self.core is not None else 0.0
            if self._outbox.has_room:
                self._outbox.put(
                    Heartbeat(step=self._step, stalled_seconds=stalled, starts_per_second=rate)
                )


def serve(core: Core, inbox: Inbox, outbox: Outbox, pulse: Pulse) -> None:
    """The loop.  Returns after Shutdown was carried out and answered."""
    while True:
        outbox.wait_for_room()
        commands = inbox.take()
        pulse.enter(core.stats.steps)
        stop = next((c for c in commands if isinstance(c, Shutdown)), None)
        for command in commands:
            if command is not stop:
                core.take(command)
        if stop is not None:
            frame = core.shutdown()
            answers = (*frame.answers, Answer(command_id=stop.command_id))
            _put(outbox, msgspec.structs.replace(frame, answers=answers))
            return
        frame = core.step()
        pulse.leave()
        if not frame.silent:
            _put(outbox, frame)
        if core.idle:
            core.wait()


def _put(outbox: Outbox, frame: StepFrame) -> None:
    for part in in_parts(frame):
        outbox.put(part)


def main(arguments: list[str]) -> int:
    """Build the core from `arguments` (fd, config JSON, `pool`) and serve.  The exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(arguments[0]))
    outbox, inbox = Outbox(sock), Inbox(sock)
    pulse = Pulse(outbox)
    try:
        outbox.put(Starting("importing", 0.0))
        core = _build(_config(arguments), inbox, outbox, pulse)
        pulse.core = core
        spare_what_is_there()
        outbox.put(EngineReady(core.info))
        serve(core, inbox, outbox, pulse)
        status = 0
    except EngineError as error:
        outbox.put(Fatal(error.code, error.message, error.hint))
        status = 1
    except Exception as error:
        traceback.print_exc()
        outbox.put(Fatal("internal_error", f"{type(error).__name__}: {error}"))
        status = 1
    outbox.close()
    return status


def _config(arguments: list[str]) -> EngineConfig | PoolingConfig:
    if arguments[2:] == ["pool"]:
        return msgspec.json.decode(arguments[1], type=PoolingConfig)
    return msgspec.json.decode(arguments[1], type=EngineConfig)


def _build(
    config: EngineConfig | PoolingConfig, inbox: Inbox, outbox: Outbox, pulse: Pulse
) -> Core:
    def progress(phase: str, fraction: float) -> None:
        outbox.put(Starting(phase, fraction))

    # Torch takes seconds to import: the daemon is told first.
    if isinstance(config, PoolingConfig):
        with collecting_nothing():
            from engine.pooling.keeping import keeping
            from engine.pooling.served import ServedPooling

        config = keeping(config) or config
    if isinstance(config, PoolingConfig):
        pooling = ServedPooling(config, progress=progress, bell=inbox.bell, alive=pulse.alive)
        tell(pooling.memory_table())
        return pooling
    with collecting_nothing():
        from engine.core import EngineCore

    def die(error: EngineError) -> None:
        """The step loop waits for a rank that is gone: nothing but this ends the process."""
        outbox.put(Fatal(error.code, error.message, error.hint))
        outbox.close()
        os._exit(1)

    core = EngineCore(config, progress=progress, bell=inbox.bell, on_death=die)
    tell(core.machine.memory.table())
    return core


def run() -> NoReturn:
    """Serve, then leave at once: daemon threads of torch and ours need no farewell."""
    spare_stderr()
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
