"""The copier of a card without a card: its calls of the driver, and what it does without them."""

import ctypes
import logging
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from engine.adapters.copier import CudaCopier
from engine.adapters.host import HostCache
from engine.memory.arena import Arena
from engine.memory.pool import BlockPool
from engine.models.spec import read_spec


class Stream:
    """Of the card: everything on it has ended at once; `log` is what was asked of it."""

    cuda_stream = 7

    def __init__(self, device=None) -> None:
        self.log: list[object] = []

    def wait_event(self, event) -> None:
        self.log.append(event)


class Event:
    def record(self, stream) -> None:
        stream.log.append("event")

    def query(self) -> bool:
        return True


class Calls:
    """Copies at once, unless it refuses: then half of the pieces are there."""

    def __init__(self, copier_of, refuses: int = 0) -> None:
        self.asked, self.refuses, self._copier_of = [], refuses, copier_of

    def queue(self, target, source, pieces, block_bytes, stream) -> int:
        assert stream == Stream.cuda_stream
        self._copier_of()._stream.log.append("copies")
        self.asked.append(list(pieces))
        for index, block, count in pieces[: 1 if self.refuses else None]:
            size = count * block_bytes
            ctypes.memmove(target + block * block_bytes, source + index * block_bytes, size)
        return self.refuses


@pytest.fixture
def make(model_dir, tmp_path, monkeypatch):
    """A copier with the given calls, and "a" of three blocks in host memory."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    spec = read_spec(model_dir)
    layout = spec.block_layout(block_size=16, dtype="float32")
    size = layout.block_bytes
    cache = HostCache(block_bytes=size, budget_bytes=4 * size)
    path = Path(tmp_path) / "a"
    path.write_bytes(bytes(n % 251 for n in range(3 * size)))
    assert cache.want("a", str(path), 3 * size)
    limit = time.monotonic() + 10
    while not cache.poll():
        assert time.monotonic() < limit, "the reader did not answer"
    arena = Arena(spec, layout, block_size=16, num_blocks=8, device=torch.device("cpu"))
    pool = BlockPool(8)

    def start(calls):
        copier = CudaCopier(arena, cache, pool)
        copier.calls = calls
        return (
            copier,
            arena,
            pool,
            torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8),
        )

    yield start
    cache.close()


def loaded(copier, arena, blocks) -> torch.Tensor:
    arena.bytes.zero_()
    copier.start("a", blocks)
    assert copier.busy("a") and copier.poll() == ["a"] and not copier.busy("a")
    others = [n for n in range(arena.num_blocks) if n not in blocks]
    assert not arena.bytes[others].any(), "blocks of others"
    return arena.bytes[list(blocks)].view(-1)


def test_a_load_is_one_call_behind_its_fences_and_ahead_of_its_event(make) -> None:
    calls = Calls(lambda: copier)
    copier, arena, pool, body = make(calls)
    fence = Event()
    pool.fence([5], fence)
    assert loaded(copier, arena, [1, 4, 5]).equal(body)
    assert calls.asked == [[(0, 1, 1), (1, 4, 2)]]
    assert copier._stream.log == [fence, "copies", "event"]


@pytest.mark.parametrize("refuses", [1, 801])
def test_once_the_driver_has_refused_torch_copies_all_of_it_and_every_load_after(
    make, refuses, caplog
) -> None:
    calls = Calls(lambda: copier, refuses)
    copier, arena, _, body = make(calls)
    with caplog.at_level(logging.WARNING):
        assert loaded(copier, arena, [6, 2, 3]).equal(body)
        assert loaded(copier, arena, [0, 3, 7]).equal(body)
    assert len(calls.asked) == 1 and copier.calls is None
    assert [f"error {refuses}" in record.message for record in caplog.records] == [True]


def test_without_calls_torch_copies(make) -> None:
    copier, arena, _, body = make(None)
    assert loaded(copier, arena, [6, 7, 3]).equal(body)


def test_a_copier_asks_the_driver_where_there_is_one(make, monkeypatch) -> None:
    made = make(None)[0]
    there = object()
    monkeypatch.setattr("engine.adapters.copier.each_piece", lambda: there)
    copier = CudaCopier(made._arena, made._host, made._pool)
    assert copier.calls is there
