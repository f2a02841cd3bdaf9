"""Copies by calls of the driver: signatures held against a driver of this test's own, in memory."""

import ctypes
from types import SimpleNamespace

import pytest

from engine.adapters import copy_calls
from engine.adapters.copy_calls import EachPiece, OneBatch, each_piece, one_batch

BLOCK = 16
STREAM = 0xDEAD_BEEF_CAFE
INT, SIZE, VOID, ADDRESS = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64
ADDRESSES, SIZES = ctypes.POINTER(ADDRESS), ctypes.POINTER(SIZE)


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes as cuda.h has it, flat: an order, two places of two ints each, flags."""

    _fields_ = tuple((name, INT) for name in ("order", "from_", "id", "to", "to_id", "flags"))


class Driver:
    """Copies at once.  `refuses` is the result that it gives instead."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.streams, self.attributes, self.calls = refuses, [], [], 0
        each = ctypes.CFUNCTYPE(INT, ADDRESS, VOID, SIZE, VOID)
        head = (ADDRESSES, ADDRESSES, SIZES, SIZE, ctypes.POINTER(Attributes), SIZES, SIZE)
        new, old = ctypes.CFUNCTYPE(INT, *head, VOID), ctypes.CFUNCTYPE(INT, *head, SIZES, VOID)
        self._kept = each(self._each), new(self._batch), old(self._older)

    def library(self, *names: str) -> SimpleNamespace:
        """Symbols as a library has them: addresses, of whose types nothing is known."""
        every = "cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"
        symbols = {
            name: ctypes.CFUNCTYPE(INT)(ctypes.cast(function, VOID).value)
            for name, function in zip(every, self._kept, strict=True)
        }
        return SimpleNamespace(**{name: symbols[name] for name in names})

    def _each(self, target, source, size, stream) -> int:
        self.calls += 1
        if not self.refuses:
            ctypes.memmove(target, source, size)
            self.streams.append(stream)
        return self.refuses

    def _batch(self, targets, sources, sizes, count, attributes, firsts, kinds, stream) -> int:
        self.calls += 1
        if self.refuses:
            return self.refuses
        assert (kinds, firsts[0]) == (1, 0), "one way of copying, from the first piece on"
        self.attributes = [getattr(attributes[0], name) for name, _ in Attributes._fields_]
        for n in range(count):
            ctypes.memmove(targets[n], sources[n], sizes[n])
        self.streams.append(stream)
        return 0

    def _older(self, *arguments) -> int:
        *same, failed, stream = arguments
        failed[0] = 3  # it may write there
        return self._batch(*same, stream)


def copied(calls, pieces):
    """What eight blocks hold after the pieces of five."""
    source = ctypes.create_string_buffer(bytes(range(1, 1 + 5 * BLOCK)), 5 * BLOCK)
    target = ctypes.create_string_buffer(8 * BLOCK)
    result = calls.queue(ctypes.addressof(target), ctypes.addressof(source), pieces, BLOCK, STREAM)
    assert result == 0
    return [target.raw[n * BLOCK : (n + 1) * BLOCK] for n in range(8)], source.raw


WAYS = {
    "each": (EachPiece, "cuMemcpyHtoDAsync_v2"),
    "batch": (OneBatch, "cuMemcpyBatchAsync_v2"),
    "batch of an older driver": (OneBatch, "cuMemcpyBatchAsync"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_piece_is_in_its_place_and_nothing_else_is_touched(way) -> None:
    make, symbol = WAYS[way]
    driver = Driver()
    there, source = copied(make(driver.library(symbol)), [(0, 6, 2), (2, 1, 1), (3, 3, 2)])
    block = [source[n * BLOCK : (n + 1) * BLOCK] for n in range(5)]
    nothing = bytes(BLOCK)
    assert there == [nothing, block[2], nothing, block[3], block[4], nothing, block[0], block[1]]
    assert set(driver.streams) == {STREAM}
    assert driver.calls == (3 if way == "each" else 1), "calls of one load"


@pytest.mark.parametrize("way", WAYS)
def test_what_the_driver_refuses_is_told(way) -> None:
    make, symbol = WAYS[way]
    driver = Driver(refuses=801)
    calls = make(driver.library(symbol))
    assert calls.queue(4096, 8192, [(0, 0, 1), (1, 1, 1)], BLOCK, STREAM) == 801
    assert driver.calls == 1, "nothing more is asked of it"


@pytest.mark.parametrize("way", WAYS)
def test_nothing_to_copy_is_no_call(way) -> None:
    make, symbol = WAYS[way]
    driver = Driver()
    assert make(driver.library(symbol)).queue(4096, 8192, [], BLOCK, STREAM) == 0
    assert driver.calls == 0


def test_a_batch_reads_in_the_order_of_its_stream_with_no_hint_of_places() -> None:
    driver = Driver()
    copied(OneBatch(driver.library("cuMemcpyBatchAsync_v2"), flags=1), [(0, 0, 1)])
    assert driver.attributes == [copy_calls.IN_STREAM_ORDER, 0, 0, 0, 0, 1]


def test_the_newer_batch_is_taken_where_both_are() -> None:
    driver = Driver()
    both = driver.library("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
    both.cuMemcpyBatchAsync = None  # nobody may as much as look at it
    blocks, source = copied(OneBatch(both), [(0, 0, 1)])
    assert (driver.calls, blocks[0]) == (1, source[:BLOCK])


def test_without_a_driver_there_are_no_calls() -> None:
    assert each_piece("libnothing-of-the-kind.so.1") is None
    assert one_batch("libnothing-of-the-kind.so.1") is None


def test_a_library_without_the_call_is_no_driver() -> None:
    assert each_piece("libc.so.6") is None


def test_a_driver_without_the_batched_copy_has_none() -> None:
    assert one_batch("libc.so.6") is None
