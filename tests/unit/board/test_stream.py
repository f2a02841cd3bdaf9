"""A stream without a socket: what each reader is told, and what it costs while none reads."""

import asyncio

from msgspec.structs import fields, replace

from lorad.board.stream import Stream
from lorad.board_apply import apply
from lorad.service.events import EventRing
from lorad.wire_status import PoolPicture, Status
from lorad.wire_stream import Board, RequestRow

_ZERO = {int: 0, str: "", float: 0.0}
STATUS = Status(
    **{f.name: _ZERO[f.type] for f in fields(Status) if f.required and f.type in _ZERO},
    adapters={},
    inbox=None,
    pool=PoolPicture(),
)


class Painter:
    """Each board has one request more."""

    def __init__(self):
        self.painted = 0

    def paint(self):
        self.painted += 1
        return Board(
            sequence=1,
            time="2026-01-01T00:00:00.000Z",
            interval_seconds=0.0,
            status=STATUS,
            num_requests=self.painted,
            requests={f"r{n}": row(f"r{n}") for n in range(self.painted)},
        )


def row(id):
    return RequestRow(
        id=id,
        adapter="",
        rev="",
        state="queued",
        endpoint="completions",
        age_seconds=0.0,
        prompt_tokens=1,
        cached_tokens=0,
        generated_tokens=0,
        max_tokens=None,
        tokens_per_second=0.0,
        priority=50,
        tenant="",
        client="",
    )


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(work):
    """With a stream whose time a test lets pass."""

    async def go():
        painter, clock = Painter(), Clock()
        events = EventRing(capacity=4, instance_id="i1")
        await work(Stream(painter.paint, events, clock), painter, clock, events)

    asyncio.run(go())


def test_who_was_away_is_told_all_that_changed_in_one_delta_and_nobody_painted_for_it():
    async def work(stream, painter, clock, events):
        messages = stream.follow(1.0)
        board = (await anext(messages)).value
        clock.now = 1.0
        board = apply(board, (await anext(messages)).value)
        clock.now = 1000.0  # the reader did not read
        assert painter.painted == 2
        painter.painted = 50
        board = apply(board, (await anext(messages)).value)
        assert (board.sequence, board.num_requests, len(board.requests)) == (3, 51, 51)
        await messages.aclose()

    run(work)


def test_each_reader_has_deltas_of_its_own():
    async def work(stream, painter, clock, events):
        one, other = stream.follow(1.0), stream.follow(1.0)
        first, second = (await anext(one)).value, (await anext(other)).value
        clock.now = 1.0
        first = apply(first, (await anext(one)).value)
        clock.now = 2.0
        first = apply(first, (await anext(one)).value)
        second = apply(second, (await anext(other)).value)
        assert (first.sequence, second.sequence) == (3, 2)
        assert (len(first.requests), len(second.requests)) == (4, 5)
        await one.aclose()
        await other.aclose()

    run(work)


def test_events_come_at_once_and_the_stream_ends_with_the_ring():
    async def work(stream, painter, clock, events):
        messages = stream.follow(5.0)
        await anext(messages)
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        events.publish("pin.set", name="sql")
        message = await waiting
        assert (message.name, message.value.type, message.id) == ("event", "pin.set", "i1-1")
        events.publish("pin.cleared", name="sql")
        events.close()
        assert [m.value.type async for m in messages] == ["pin.cleared"]

    run(work)


def test_who_comes_back_too_late_is_told_that_something_is_missing():
    async def work(stream, painter, clock, events):
        for _ in range(9):
            events.publish("pin.set")
        messages = stream.follow(5.0, after=2)
        board = await anext(messages)
        told = [await anext(messages) for _ in range(5)]
        assert [m.value.type for m in told] == ["gap"] + ["pin.set"] * 4
        assert [m.id for m in told] == ["", "i1-6", "i1-7", "i1-8", "i1-9"]
        assert board.value == replace(board.value, events=(), sequence=1, interval_seconds=5.0)
        await messages.aclose()

    run(work)
