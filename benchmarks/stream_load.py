"""Streams over a Unix socket, read by one process of raw sockets, counted in shared memory.

    python benchmarks/stream_load.py SOCKET MODEL FIRST COUNT TOKENS COUNTS STAMPS [BODY-EXTRA]
    (spawned by benchmarks/stream.py)

Keeps COUNT chat streams open, numbers FIRST and up; each asks for TOKENS tokens and is asked again
when it has ended.  COUNTS is a file of doubles, `FIELDS` a stream: tokens, events, reads, requests
that ended, and the sum of their seconds from the question to the first token.  A stream that is
cut off or refused, or whose usage is not what was counted, ends the process with an error.

Every word of the made-up vocabulary begins with a space and holds no other, and the JSON around it
holds none: the tokens of any piece of a stream are its spaces less one for each `data: `.  STAMPS
is what the engine wrote; latencies, in ms from there to here, go to stdout as a histogram when
SIGTERM comes, over the time since the last SIGUSR1.  `-` for STAMPS measures none.
"""

import json
import mmap
import selectors
import signal
import socket
import sys
import time
from collections import Counter

FIELDS = 5
TOKENS, EVENTS, READS, ENDED, FIRST_SECONDS = range(FIELDS)
MAX_TOKENS = 1 << 16
BUCKET_MS = 0.05
LAST_CHUNK = b"\r\n0\r\n\r\n"


class Shared:
    """A file of doubles."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")


class Stream:
    """One connection, one request after the other."""

    def __init__(self, load: "Load", number: int) -> None:
        self.load, self.number = load, number
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(load.path)
        self.socket.setblocking(False)
        self._ask()

    def _ask(self) -> None:
        body = self.load.body(self.number)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: lorad\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.told = 0
        self._rest = b""
        self._in_body = False
        self._asked = time.monotonic()
        self.socket.sendall(head.encode() + body)

    def read(self) -> None:
        data = self.socket.recv(1 << 18)
        now = time.monotonic()
        if not data:
            raise SystemExit(f"stream {self.number} was cut off: {self._rest[-300:]!r}")
        data = self._rest + data
        if not self._in_body:
            head, whole, data = data.partition(b"\r\n\r\n")
            if not whole:
                self._rest = head
                return
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"stream {self.number} was refused: {head!r} {data!r}")
            self._in_body = True
        end = len(data) if data.endswith(LAST_CHUNK) else data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return
        events, self._rest = data[:end], data[end:]
        self._count(events, now)
        if b'"usage":{' in events:
            self._usage = events
        if events.endswith(LAST_CHUNK):
            self._end()

    def _count(self, events: bytes, now: float) -> None:
        heads = events.count(b"data: ")
        tokens = events.count(b" ") - heads - events.count(b": ping")
        cells, at = self.load.counts.cells, self.number * FIELDS
        if self.told == 0 and tokens:
            cells[at + FIRST_SECONDS] += now - self._asked
        cells[at + TOKENS] += tokens
        cells[at + EVENTS] += heads
        cells[at + READS] += 1
        if self.load.stamps is not None and tokens:
            base, stamps = self.number * MAX_TOKENS, self.load.stamps.cells
            for n in range(self.told, self.told + tokens):
                late = now - stamps[base + n % MAX_TOKENS]
                self.load.latencies[int(late * 1e3 / BUCKET_MS)] += 1
        self.told += tokens

    def _end(self) -> None:
        line = next(e for e in self._usage.split(b"\n\n") if b'"usage":{' in e)
        usage = json.loads(line[line.index(b"{") :])["usage"]
        if usage["completion_tokens"] != self.told:
            raise SystemExit(f"stream {self.number}: counted {self.told}, usage is {usage}")
        self.load.counts.cells[self.number * FIELDS + ENDED] += 1
        self._ask()


class Load:
    """All streams of this process."""

    def __init__(self, arguments: list[str]) -> None:
        self.path, model, first, count, tokens, counts, stamps, *extra = arguments
        self._body = {
            "model": model,
            "messages": [{"role": "user", "content": "Say many words. " * 32}],
            "max_tokens": int(tokens),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **json.loads(extra[0] if extra else "{}"),
        }
        self.counts = Shared(counts)
        self.stamps = Shared(stamps) if stamps != "-" else None
        self.latencies: Counter[int] = Counter()
        self.selector = selectors.DefaultSelector()
        for number in range(int(first), int(first) + int(count)):
            stream = Stream(self, number)
            self.selector.register(stream.socket, selectors.EVENT_READ, stream)

    def body(self, number: int) -> bytes:
        return json.dumps(self._body | {"seed": number}).encode()

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                key.data.read()


def main() -> None:
    load = Load(sys.argv[1:])

    def end(*_: object) -> None:
        print(json.dumps({str(k): n for k, n in load.latencies.items()}), flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, lambda *_: load.latencies.clear())
    load.run()


if __name__ == "__main__":
    main()
