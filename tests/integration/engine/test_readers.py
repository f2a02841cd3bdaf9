"""Readers: files into memory on several threads, where one that is slow holds up no other."""

import os
import threading
import time
import zlib
from collections import defaultdict

import pytest

from engine.adapters import checksums, reader
from engine.adapters.reader import Readers
from engine.adapters.tiers import READERS

BLOCK = 1 << 10
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Files of a few blocks are shared out as large ones are."""
    monkeypatch.setattr(reader, "FIRST_BYTES", 2 * BLOCK)
    monkeypatch.setattr(reader, "LEAST_BYTES", 3 * BLOCK)
    monkeypatch.setattr(reader, "FAST", 0.0)


@pytest.fixture
def readers():
    made = []

    def make(**settings):
        made.append(Readers(block_bytes=BLOCK, **{"wake": lambda: None, **settings}))
        return made[-1]

    yield make
    assert all([one.close() for one in made]), "a reader is stuck"


@pytest.fixture
def write(tmp_path):
    def file(name, blocks, *, cut=0):
        body = os.urandom(blocks * BLOCK)
        path = tmp_path / name
        path.write_bytes(body[: len(body) - cut])
        sums = [zlib.crc32(body[n : n + BLOCK]) for n in range(0, len(body), BLOCK)]
        checksums.write(checksums.path_of(path), sums)
        return str(path), body

    return file


def wait(pool, *revs):
    """rev -> its end; each comes once."""
    done, limit = {}, time.monotonic() + PATIENCE
    while not set(revs) <= set(done):
        assert time.monotonic() < limit, f"{set(revs) - set(done)} did not end"
        for one in pool.poll():
            assert one.rev not in done, "it ended twice"
            done[one.rev] = one
    return done


@pytest.fixture
def threads_of(monkeypatch):
    """path -> names of the threads that read it; and bytes that every read is made to wait for."""
    seen, plain, paths = defaultdict(set), os.preadv, {}
    opened = os.open

    def note(path, *rest, **named):
        fd = opened(path, *rest, **named)
        paths[fd] = path
        return fd

    def preadv(fd, buffers, offset):
        seen[paths[fd]].add(threading.current_thread().name)
        return plain(fd, buffers, offset)

    monkeypatch.setattr(reader.os, "open", note)
    monkeypatch.setattr(reader.os, "preadv", preadv)
    return seen


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 7, 40])
def test_every_byte_arrives_in_its_place_whoever_read_it(readers, write, blocks, verify):
    pool, target = readers(verify=verify), bytearray(blocks * BLOCK)
    path, body = write("a", blocks)
    pool.read("a", path, memoryview(target))
    assert wait(pool, "a")["a"].error == ""
    assert bytes(target) == body


def test_it_can_be_told_how_far_a_file_is(readers, write, monkeypatch):
    pool, plain = readers(), os.preadv
    path, body = write("a", 40)
    here, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def preadv(fd, buffers, offset):
        count = plain(fd, [buffers[0][:BLOCK]], offset)
        here.release()
        assert go_on.acquire(timeout=PATIENCE)
        return count

    monkeypatch.setattr(reader.os, "preadv", preadv)
    monkeypatch.setattr(reader, "FAST", float("inf"))
    assert pool.arrived("a") is None
    pool.read("a", path, memoryview(bytearray(len(body))))
    for blocks in range(40):
        assert here.acquire(timeout=PATIENCE)
        assert pool.arrived("a") == blocks * BLOCK
        go_on.release()
    wait(pool, "a")
    assert pool.arrived("a") is None


def test_a_fast_file_is_shared_and_a_slow_one_keeps_one_thread(
    readers, write, threads_of, monkeypatch
):
    pool = readers()
    together = threading.Barrier(reader.SHARERS)
    go_on = Readers._go_on

    def all_at_once(self, part):
        if part.end - part.start < 10 * BLOCK:  # a share, and not the whole rest
            together.wait(PATIENCE)
        go_on(self, part)

    monkeypatch.setattr(Readers, "_go_on", all_at_once)
    path, body = write("quick", 2 + 4 * reader.SHARERS)
    target = bytearray(len(body))
    pool.read("quick", path, memoryview(target))
    wait(pool, "quick")
    assert len(threads_of[path]) == reader.SHARERS and bytes(target) == body
    monkeypatch.setattr(reader, "FAST", float("inf"))
    path, body = write("slow", 2 + 4 * reader.SHARERS)
    pool.read("slow", path, memoryview(bytearray(len(body))))
    wait(pool, "slow")
    assert len(threads_of[path]) == 1


def test_files_that_hang_hold_up_no_other(readers, write, tmp_path):
    """A pipe that nobody writes to hangs whoever opens it, as a server that has gone does."""
    pool = readers()
    pipes = [tmp_path / f"pipe{n}" for n in range(READERS - 1)]
    for pipe in pipes:
        os.mkfifo(pipe)
        pool.read(pipe.name, str(pipe), memoryview(bytearray(BLOCK)))
    for name in ("b", "c"):
        path, body = write(name, 30)
        target = bytearray(len(body))
        pool.read(name, path, memoryview(target))
        assert set(wait(pool, name)) == {name}
        assert bytes(target) == body
    for pipe in pipes:
        with open(pipe, "wb"):
            pass
    ends = wait(pool, *(pipe.name for pipe in pipes))
    assert all("expected 1024 bytes, found 0" in end.error for end in ends.values())


def test_reads_begin_in_the_order_in_which_they_were_asked_for(readers, write, monkeypatch):
    pool, gate, begun = readers(), threading.Event(), []
    begin = Readers._begin

    def slow(self, file):
        begun.append(file.rev)
        assert gate.wait(PATIENCE)
        begin(self, file)

    monkeypatch.setattr(Readers, "_begin", slow)
    revs = [f"r{n}" for n in range(READERS + 3)]
    for rev in revs:
        path, body = write(rev, 5)
        pool.read(rev, path, memoryview(bytearray(len(body))))
    limit = time.monotonic() + PATIENCE
    while len(begun) < READERS:
        assert time.monotonic() < limit
    assert set(begun) == set(revs[:READERS]), "as many as there are readers, and the first"
    gate.set()
    wait(pool, *revs)
    assert set(begun) == set(revs)


def test_a_file_that_no_thread_has_begun_can_be_cancelled_and_ends_at_once(
    readers, write, monkeypatch
):
    pool, gate, begun = readers(), threading.Event(), threading.Semaphore(0)
    open_file = Readers._open

    def slow(self, file):
        begun.release()
        assert gate.wait(PATIENCE)
        return open_file(self, file)

    monkeypatch.setattr(Readers, "_open", slow)
    revs = [f"r{n}" for n in range(READERS + 2)]
    targets = {}
    for rev in revs:
        path, body = write(rev, 5)
        targets[rev] = bytearray(len(body)), body
        pool.read(rev, path, memoryview(targets[rev][0]))
    for _ in range(READERS):
        assert begun.acquire(timeout=PATIENCE)
    for _ in range(2):
        pool.cancel(revs[0])
        pool.cancel(revs[-1])
        pool.cancel("never heard of")
    (end,) = pool.poll()
    assert (end.rev, end.cancelled, end.error) == (revs[-1], True, "")
    gate.set()
    ends = wait(pool, *revs[:-1])
    assert not any(end.cancelled or end.error for end in ends.values())
    assert all(bytes(target) == body for target, body in list(targets.values())[:-1])
    assert not any(targets[revs[-1]][0]), "not a byte of it was read"


@pytest.mark.parametrize("cut", [1, BLOCK, 39 * BLOCK])
def test_a_file_that_is_cut_while_it_is_read_is_an_error(readers, write, monkeypatch, cut):
    path, body = write("a", 40, cut=cut)
    stat = os.fstat

    class Before:
        st_size = len(body)

    monkeypatch.setattr(reader.os, "fstat", lambda fd: Before if stat(fd) else None)
    pool = readers()
    pool.read("a", path, memoryview(bytearray(len(body))))
    end = wait(pool, "a")["a"]
    assert "a: expected 40960 bytes, found " in end.error and not end.damaged


def test_a_damaged_block_is_found_whoever_reads_it(readers, write):
    pool = readers(verify="full")
    for block in (0, 1, 2, 20, 39):
        name = f"bad{block}"
        path, body = write(name, 40)
        with open(path, "r+b") as file:
            file.seek(block * BLOCK + 17)
            file.write(bytes([body[block * BLOCK + 17] ^ 1]))
        pool.read(name, path, memoryview(bytearray(len(body))))
        end = wait(pool, name)[name]
        assert (end.error, end.damaged) == (
            f"{name}: block {block} of 40 is not what was packed",
            True,
        )


def test_any_block_may_be_the_one_that_is_looked_at(readers, write, monkeypatch):
    """Of a file where all is wrong, a sample finds each block in turn."""
    path, body = write("a", 40)
    with open(path, "wb") as file:
        file.write(bytes(b ^ 255 for b in body))
    turns = iter((0, 5, 39))
    monkeypatch.setattr(reader.random, "randrange", lambda count: next(turns))
    pool = readers(verify="sample")
    for block in (0, 5, 39):
        pool.read("a", path, memoryview(bytearray(len(body))))
        assert f"block {block} of 40" in wait(pool, "a")["a"].error


def test_no_file_is_left_open(readers, write):
    def opened():
        return len(os.listdir("/proc/self/fd"))

    pool, before = readers(verify="full"), opened()
    whole, body = write("whole", 30)
    short, _ = write("short", 30, cut=5)
    bare, _ = write("bare", 30)
    os.unlink(checksums.path_of(bare))
    paths = {"whole": whole, "short": short, "bare": bare, "none": whole + ".none"}
    for rev, path in paths.items():
        pool.read(rev, path, memoryview(bytearray(len(body))))
    ends = wait(pool, *paths)
    assert [bool(ends[rev].error) for rev in paths] == [False, True, True, True]
    assert ends["bare"].damaged and not ends["short"].damaged
    assert opened() == before
