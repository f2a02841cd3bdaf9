"""Readers: packed files into host memory, several at a time, on a few threads.

Goes in: a revision, the path of its packed file, and the memory to fill.  Comes out, later, from
`poll`: that the whole file is there, or why not.  Knows nothing of budgets, extents or states.

A file is begun by one thread.  If its first piece comes as fast as the page cache or a good disk
gives it, the rest is shared out among the threads; a slow one keeps the thread that began it, and
no other, so that it holds up nobody.  Reading and checking leave the interpreter to the step loop.
"""

import os
import queue
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from engine.adapters import checksums
from engine.adapters.tiers import READERS, HostDone
from engine.config import VerifyOnLoad

#: Of the threads, how many share one file.
SHARERS = 4
#: Bytes that a file is judged by, and the least that is worth another thread.
FIRST_BYTES = 4 << 20
LEAST_BYTES = 8 << 20
#: Bytes of one call at the most, so that it can be told how far a large file is.
CALL_BYTES = 16 << 20
#: Bytes a second from which on others help: what an SSD gives, and a disk or a far server does not.
FAST = 250e6
#: How long `close` waits for reads under way.
PATIENCE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _File:
    """One file that is being read.  `parts` is set before a second thread knows of it."""

    rev: str
    path: str
    target: memoryview
    fd: int = -1
    began: float = 0.0
    sums: dict[int, int] = field(default_factory=dict)  # block -> what its checksum has to be
    parts: int = 1
    errors: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    arrived: dict[int, int] = field(default_factory=dict)  # start of a stretch -> bytes of it
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: Taken once: by the reader that begins it, or by whoever cancels it before.
    claim: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Part:
    file: _File
    start: int
    end: int


class Readers:
    """`block_bytes` is what checksums are of.  `wake` is called from a reader when a file ends.

    `verify` holds what was read against its checksums, as it comes: one block of each file or all
    of them.  `slow_seconds` is fault injection: a sleep before each file.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        wake: Callable[[], None],
        verify: VerifyOnLoad = "off",
        slow_seconds: float = 0.0,
    ) -> None:
        self.block_bytes = block_bytes
        self._wake = wake
        self._verify = verify
        self.slow_seconds = slow_seconds
        self._jobs: queue.SimpleQueue[_File | _Part | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[HostDone] = queue.SimpleQueue()
        self._files: dict[str, _File] = {}  # asked for, and not told of by `poll`
        self._threads = [
            threading.Thread(target=self._work, name=f"lorad-reader-{n}", daemon=True)
            for n in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, rev: str, path: str, target: memoryview) -> None:
        """Begin: the file at `path` has to be just as long as `target`, which it is to fill."""
        file = self._files[rev] = _File(rev, path, target)
        self._jobs.put(file)

    def cancel(self, rev: str) -> None:
        """A file that no thread has begun is not read; it ends `cancelled`, and holds up nobody.

        One that is being read goes on: what was begun is of use to the next who asks.
        """
        file = self._files.get(rev)
        if file is not None and file.claim.acquire(blocking=False):
            self._done.put(HostDone(rev, cancelled=True))

    def poll(self) -> list[HostDone]:
        """Files that ended since the last call, each once."""
        done = []
        while not self._done.empty():
            done.append(self._done.get())
            del self._files[done[-1].rev]
        return done

    def arrived(self, rev: str) -> int | None:
        """Bytes of its file that are here; None if it is not being read."""
        file = self._files.get(rev)
        return None if file is None else sum(list(file.arrived.values()))

    def close(self) -> bool:
        """End the threads after what they are at.  False: some are stuck, and may write still."""
        for _ in self._threads:
            self._jobs.put(None)
        limit = time.monotonic() + PATIENCE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ------------------------------------------------------------- on the readers' threads
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _File):
                self._begin(job)
            else:
                self._go_on(job)

    def _begin(self, file: _File) -> None:
        """Open, judge by the first piece, and read the rest alone or with others."""
        if not file.claim.acquire(blocking=False):
            return  # cancelled
        file.began = time.monotonic()
        if self.slow_seconds:
            time.sleep(self.slow_seconds)
        size = len(file.target)
        if not self._open(file):
            self._end(file)
            return
        first = min(size, -(-FIRST_BYTES // self.block_bytes) * self.block_bytes)
        started = time.monotonic()
        self._fill(file, 0, first)
        fast = first >= FAST * (time.monotonic() - started)
        own, *others = self._shares(first, size, SHARERS if fast else 1)
        file.parts = 1 + len(others)
        for start, end in others:
            self._jobs.put(_Part(file, start, end))
        self._go_on(_Part(file, *own))

    def _go_on(self, part: _Part) -> None:
        self._fill(part.file, part.start, part.end)
        with part.file.lock:
            part.file.parts -= 1
            last = not part.file.parts
        if last:
            os.close(part.file.fd)
            self._end(part.file)

    def _shares(self, start: int, end: int, most: int) -> list[tuple[int, int]]:
        """Stretches of whole blocks, as even as these are; one at least, though it be empty."""
        blocks = -(-(end - start) // self.block_bytes)
        least = -(-LEAST_BYTES // self.block_bytes)
        count = max(1, min(most, blocks // least))
        marks = [start + n * blocks // count * self.block_bytes for n in range(count)] + [end]
        return list(pairwise(marks))

    def _open(self, file: _File) -> bool:
        """False: there is no such file, its length is another, or its checksums are no good."""
        try:
            file.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            have, want = os.fstat(file.fd).st_size, len(file.target)
            if have != want:
                file.errors.append(f"{_shown(file.path)}: expected {want} bytes, found {have}")
        except OSError as error:
            file.errors.append(f"{_shown(file.path)}: {error.strerror or error}")
        if not file.errors:
            self._choose(file)
        if file.errors or file.damage:
            if file.fd >= 0:
                os.close(file.fd)
            return False
        return True

    def _choose(self, file: _File) -> None:
        """Which blocks are held against which checksums."""
        count = len(file.target) // self.block_bytes
        if self._verify == "off" or not count:
            return
        try:
            sums = checksums.read(file.path, count)
        except (OSError, ValueError) as error:
            file.damage.append(f"{_shown(file.path)}: {error}")
            return
        blocks = range(count) if self._verify == "full" else (random.randrange(count),)
        file.sums = {block: sums[block] for block in blocks}

    def _fill(self, file: _File, start: int, end: int) -> None:
        """Read one stretch, and hold the blocks in it against their checksums."""
        at = start
        try:
            while at < end:
                piece = file.target[at : min(end, at + CALL_BYTES)]
                if not (count := os.preadv(file.fd, [piece], at)):
                    break
                at += count
                file.arrived[start] = at - start
        except OSError as error:
            file.errors.append(f"{_shown(file.path)}: {error.strerror or error}")
            return
        if at < end:  # it was cut since it was opened
            want = len(file.target)
            file.errors.append(f"{_shown(file.path)}: expected {want} bytes, found {at}")
            return
        self._check(file, range(start // self.block_bytes, end // self.block_bytes))

    def _check(self, file: _File, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in file.sums:
                continue
            data = file.target[block * self.block_bytes :][: self.block_bytes]
            if zlib.crc32(data) != file.sums[block]:
                count = len(file.target) // self.block_bytes
                said = f"{_shown(file.path)}: block {block} of {count} is not what was packed"
                file.damage.append(said)

    def _end(self, file: _File) -> None:
        error, damage = "".join(file.errors[:1]), "".join(file.damage[:1])
        seconds = time.monotonic() - file.began
        self._done.put(HostDone(file.rev, error or damage, bool(damage and not error), seconds))
        self._wake()


def _shown(path: str) -> str:
    """The file alone: its folder is a revision, which says nothing to who asked for a name."""
    return path.rsplit("/", 1)[-1]
