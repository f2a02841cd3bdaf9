"""A load generator: one process, raw Unix sockets, OpenAI streaming.

Goes in, as JSON lines on stdin: jobs, each with requests whose HTTP bytes are made before the run.
Comes out, as JSON lines on stdout: when each token arrived.  During a run it only sends what was
made before, and notes what arrived and when; everything is parsed afterwards.  Several of these run
side by side, so that the generator is never what is measured; each says how busy it was.

    job                  {"socket", "background": [...], "arrivals": [...], "seconds"}
    -> "armed"           all requests are encoded
    start T              the background begins at T of the monotonic clock
    -> "started"         each stream of the background has sent a token
    go T                 the arrivals' clock begins at T
    -> "done"            everything has ended or was cut off
    -> the result

Standard library only.
"""

import gc
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

READ_BYTES = 1 << 18
TOKEN_MARK = b"data: {"
STDIN = 0


class Connection:
    """One request on a connection of its own."""

    def __init__(self, path: str, data: bytes, due: float) -> None:
        self.due = due
        self.pieces: list[tuple[float, bytes]] = []
        self.begun = False
        self.ended: float | None = None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.sent = time.monotonic()
        self.socket.sendall(data)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Take what is there; False at the end."""
        try:
            data = self.socket.recv(READ_BYTES)
        except ConnectionResetError:
            data = b""
        now = time.monotonic()
        if not data:
            self.ended = now
            return False
        self.pieces.append((now, data))
        if not self.begun:
            self.begun = TOKEN_MARK in data
        return True


class Generator:
    """One job from its arming to its result."""

    def __init__(self, job: dict[str, Any], control: "Control") -> None:
        self.path, self.seconds = job["socket"], job["seconds"]
        self.background = [encode(r) for r in job["background"]]
        self.arrivals = [(r["at"], encode(r)) for r in job["arrivals"]]
        self.control = control
        self.poll = select.poll()
        self.poll.register(STDIN, select.POLLIN)
        self.open: dict[int, Connection] = {}

    def run(self) -> dict[str, Any]:
        self.control.say("armed")
        started = self.control.time_of("start")
        sleep_until(started)
        busy = time.process_time()
        background = [self.connect(data, started) for data in self.background]
        while not all(c.begun for c in background):
            self.turn(None)
            if any(c.ended for c in background):
                break  # it failed: the result will say how
        self.control.say("started")
        while (go := self.control.poll_for("go")) is None:
            self.turn(None)
        arrivals, unsent = self.serve(go)
        end = time.monotonic()
        busy = time.process_time() - busy
        for connection in self.open.values():
            connection.socket.close()
        self.control.say("done")
        return {
            "cpu": busy / (end - started),
            "end": end,
            "background": [parse(c) for c in background],
            "arrivals": [*(parse(c) for c in arrivals), *map(never_sent, unsent)],
        }

    def serve(self, go: float) -> tuple[list[Connection], list[float]]:
        """Send arrivals when they are due, until they have ended or the time is up.

        Returns what was sent, and when the rest would have been due.
        """
        until = go + self.seconds if self.seconds is not None else None
        waiting = list(reversed(self.arrivals))
        sent: list[Connection] = []
        while until is None or time.monotonic() < until:
            while waiting and go + waiting[-1][0] <= time.monotonic():
                at, data = waiting.pop()
                sent.append(self.connect(data, go + at))
                # Whoever is behind would else read nothing until all are sent.
                self.turn(0.0)
            if until is None and not waiting and all(c.ended for c in sent):
                break
            times = [go + waiting[-1][0]] if waiting else []
            self.turn(min([*times, *([until] if until is not None else [])], default=None))
        return sent, [go + at for at, _ in reversed(waiting)]

    def connect(self, data: bytes, due: float) -> Connection:
        connection = Connection(self.path, data, due)
        number = connection.socket.fileno()
        self.open[number] = connection
        self.poll.register(number, select.POLLIN)
        return connection

    def turn(self, until: float | None) -> None:
        """Take in what arrives, for as long as nothing else is due."""
        patience = None if until is None else max(0.0, 1e3 * (until - time.monotonic()))
        for number, _ in self.poll.poll(patience):
            if number == STDIN:
                self.control.read()
            elif not self.open[number].read():
                self.poll.unregister(number)
                self.open.pop(number).socket.close()


class Control:
    """Lines from the parent process, read without ever waiting behind its back."""

    def __init__(self) -> None:
        self.buffer = b""
        self.lines: list[str] = []

    def read(self) -> None:
        data = os.read(STDIN, 1 << 20)
        if not data:
            raise SystemExit(0)  # the parent has gone
        *whole, self.buffer = (self.buffer + data).split(b"\n")
        self.lines += [line.decode() for line in whole]

    def line(self) -> str:
        while not self.lines:
            self.read()
        return self.lines.pop(0)

    def time_of(self, word: str) -> float:
        said, when = self.line().split()
        assert said == word, f"{said} where {word} was due"
        return float(when)

    def poll_for(self, word: str) -> float | None:
        return self.time_of(word) if self.lines else None

    def say(self, value: object) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()


def sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


# ----------------------------------------------------------------- HTTP
def encode(request: dict[str, Any]) -> bytes:
    """The whole request, to be sent with one write."""
    body = json.dumps(
        {
            "model": request["model"],
            "prompt": request["prompt"],
            "max_tokens": request["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        separators=(",", ":"),
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: lorad\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def never_sent(due: float) -> dict[str, Any]:
    """A stream that did not come about."""
    return {"due": due, "sent": due, "ended": None, "times": [], "tokens": 0, "error": ""}


def parse(connection: Connection) -> dict[str, Any]:
    """What a stream was: times of its tokens, how many there were, and what went wrong."""
    told = never_sent(connection.due) | {"sent": connection.sent, "ended": connection.ended}
    raw = b"".join(data for _, data in connection.pieces)
    head, _, body = raw.partition(b"\r\n\r\n")
    status = head.split(b"\r\n")[0].decode(errors="replace")
    if not raw:
        told["error"] = "" if connection.ended is None else "the connection closed without a word"
        return told
    if " 200 " not in f"{status} ":
        told["error"] = f"{status}: {body[-300:].decode(errors='replace')}"
        return told
    done = False
    for when, data in events(connection.pieces, len(head) + 4):
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            told["error"] = str(chunk["error"].get("message", chunk["error"]))
        if chunk.get("usage"):
            told["tokens"] = chunk["usage"]["completion_tokens"]
        if any(choice.get("text") for choice in chunk.get("choices", ())):
            told["times"].append(when)
    if connection.ended is not None and not done and not told["error"]:
        told["error"] = "the stream ended without [DONE]"
    return told


def events(pieces: list[tuple[float, bytes]], skip: int) -> Iterator[tuple[float, bytes]]:
    """(when its end arrived, data) of each server-sent event of a chunked body."""
    text = b""  # of an event that is not whole
    for when, data in unchunked(pieces, skip):
        text += data
        *whole, text = text.split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    yield when, line[6:]


def unchunked(pieces: list[tuple[float, bytes]], skip: int) -> Iterator[tuple[float, bytes]]:
    """(when it arrived, data), without the head of `skip` bytes and without the chunks' frames."""
    buffer, left = b"", 0  # left: bytes of the present chunk, its line end included
    for when, piece in pieces:
        piece, skip = piece[skip:], max(0, skip - len(piece))
        buffer += piece
        while buffer:
            if not left:
                line, found, rest = buffer.partition(b"\r\n")
                if not found:
                    break  # its size is not whole
                size, buffer = int(line.split(b";")[0], 16), rest
                if not size:
                    return
                left = size + 2
            data, buffer = buffer[:left], buffer[left:]
            keep = max(0, min(len(data), left - 2))
            left -= len(data)
            yield when, data[:keep]


def main() -> None:
    control = Control()
    gc.disable()
    while True:
        result = Generator(json.loads(control.line()), control).run()
        control.say(result)
        gc.collect()


if __name__ == "__main__":
    main()
