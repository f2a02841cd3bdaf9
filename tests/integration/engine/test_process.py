"""The child's own manners: last words, heartbeats, and an outbox that blocks nobody."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.framing import event_reader
from engine.messages import Event, Fatal, Heartbeat, Starting
from engine.process import Outbox

#: A process with the real main around a core that does `body` in its step.
SCRIPT = """
import time
import engine.process as process
from engine.messages import StepFrame
from types import SimpleNamespace

class Core:
    info = None
    idle = False
    starts_per_second = 2.5
    stats = SimpleNamespace(steps=7)
    def step(self):
        {body}
        return StepFrame(step=7)

process._build = lambda *_: Core()
process.EngineReady = lambda info: process.Starting("fake", 1.0)
process.run()
"""


class Child:
    """A process on one end of a socket pair; iterate over its events."""

    def __init__(self, body: str) -> None:
        self.ours, theirs = socket.socketpair()
        config = msgspec.json.encode(EngineConfig(model="none")).decode()
        command = [sys.executable, "-c", SCRIPT.format(body=body), str(theirs.fileno()), config]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
        )
        theirs.close()
        self.ours.settimeout(30)

    def events(self) -> Iterator[Event]:
        frames = event_reader()
        while data := self.ours.recv(1 << 16):
            yield from frames.feed(data)

    def end(self) -> tuple[int, str]:
        self.ours.close()
        _, said = self.process.communicate(timeout=20)
        return self.process.returncode, said


def test_what_an_error_of_the_start_advises_is_told_apart_from_it() -> None:
    child = Child("from engine.errors import NoDevice; raise NoDevice('no card', hint='buy one')")
    assert list(child.events())[-1] == Fatal("no_device", "no card", "buy one")
    assert child.end()[0] == 1


def test_a_crash_is_told_in_last_words_and_in_the_exit_status() -> None:
    child = Child("raise RuntimeError('the step broke')")
    events = list(child.events())
    assert events[-1] == Fatal("internal_error", "RuntimeError: the step broke")
    status, said = child.end()
    assert status == 1 and "Traceback" in said and "the step broke" in said


def test_the_collector_passes_over_what_was_there_before_the_first_step() -> None:
    child = Child("raise RuntimeError(f'frozen {__import__(\"gc\").get_freeze_count()}')")
    last = list(child.events())[-1]
    assert isinstance(last, Fatal) and int(last.message.split()[-1]) > 10_000
    child.end()


def test_heartbeats_say_how_long_the_loop_is_inside_one_step() -> None:
    child = Child("time.sleep(60)")
    beats = []
    for event in child.events():
        if isinstance(event, Heartbeat):
            beats.append(event)
        if len(beats) == 2:
            break
    assert [beat.starts_per_second for beat in beats] == [2.5, 2.5]
    assert beats[0].step == 7 and beats[1].stalled_seconds >= beats[0].stalled_seconds + 0.4
    status, _ = child.end()
    assert status == 1, "it outlived the daemon's end of the socket, step or no step"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    other.settimeout(20)
    yield one, other
    one.close()
    other.close()


def test_the_outbox_never_blocks_its_writer_and_keeps_the_order(pair) -> None:
    sock, peer = pair
    outbox = Outbox(sock, limit_bytes=1 << 20)
    word = "x" * 1000
    for n in range(5000):  # 5 MB: far more than the socket takes while nobody reads
        outbox.put(Starting(word, n / 5000))
    assert not outbox.has_room
    waited = threading.Event()
    thread = threading.Thread(target=lambda: (outbox.wait_for_room(), waited.set()))
    thread.start()
    assert not waited.is_set()
    frames, seen = event_reader(), []
    while len(seen) < 5000:
        seen.extend(frames.feed(peer.recv(1 << 20)))
    thread.join(20)
    assert waited.is_set() and outbox.has_room
    assert [event.fraction for event in seen] == [n / 5000 for n in range(5000)]
    outbox.close()


def test_closing_the_outbox_sends_what_is_queued(pair) -> None:
    sock, peer = pair
    outbox = Outbox(sock)
    outbox.put(Fatal("code", "last words"))
    outbox.close()
    [event] = event_reader().feed(peer.recv(1 << 16))
    assert event == Fatal("code", "last words")
