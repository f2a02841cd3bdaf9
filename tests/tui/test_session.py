"""Three and a half minutes of a real daemon under churn, played through all that shows a board.

`data/churn.jsonl.gz` was recorded with `loractl top --record` from the daemon of `lorad demo`, with
a pool of 176 MiB and `demo/traffic.py --clients 6 --adapters 32`; its folders were renamed.
"""

import asyncio
import gzip
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from rich.cells import cell_len

from lorad.board_apply import apply, with_event
from lorad.tui import once, replay
from lorad.tui.app import Settings, TopApp
from lorad.tui.draw import ASCII, UNICODE
from lorad.tui.messages import Changed, Ended, Happened, Message, Whole
from lorad.tui.model import Model
from lorad.wire_stream import Board

TAPE = Path(__file__).parent / "data/churn.jsonl.gz"


@cache
def messages() -> tuple[Message, ...]:
    return tuple(map(replay.as_message, replay.read(TAPE)))


@cache
def boards() -> tuple[Board, ...]:
    """After every message."""
    found: list[Board] = []
    for message in messages():
        match message:
            case Whole(board):
                found.append(board)
            case Changed(delta):
                found.append(apply(found[-1], delta))
            case Happened(event):
                found.append(with_event(found[-1], event))
    return tuple(found)


class AtOnce:
    """The whole recording without its pauses, which then stays open."""

    title = "replay churn.jsonl.gz"

    def __init__(self) -> None:
        self.said = threading.Event()

    def pace(self, seconds: float) -> None:
        raise AssertionError("nobody asked for another pace")

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        yield from messages()
        self.said.set()
        stop.wait(60)


def test_it_is_a_session_in_which_everything_moves() -> None:
    events = Counter(m.event.type for m in messages() if isinstance(m, Happened))
    assert {"slot.load", "slot.evict", "slot.drain", "adapter.replaced", "pin.set"} <= set(events)
    states = {row.state for board in boards() for row in board.slots.values()}
    assert {"active", "idle", "loading", "draining"} <= states
    assert any(board.drains for board in boards())
    last = boards()[-1]
    assert last.churn.thrashes > 0
    assert 0 < last.load.hit_tokens < last.load.query_tokens
    assert {row.name for row in last.tenants.values()} >= {"acme", "globex", "initech", "umbrella"}


def test_the_boards_of_a_real_daemon_agree_with_themselves() -> None:
    for board in boards():
        pool = board.status.pool
        parts = (pool.kv_active, pool.kv_cached, pool.adapter_active, pool.adapter_idle, pool.free)
        assert sum(parts) <= pool.total
        assert all(key == row.name for key, row in board.slots.items())
        assert all(row.hit_tokens <= row.query_tokens for row in board.slots.values())
        assert board.load.hit_tokens <= board.load.query_tokens
        taken = [row.slot for row in board.slots.values() if row.slot is not None]
        assert len(taken) == len(set(taken)), "two names in one slot"


def test_the_model_ends_where_the_recording_ends() -> None:
    model = Model(lambda: 0.0)
    for message in messages():
        model.take(message)
    assert model.link.up
    assert model.board is not None
    assert model.board.sequence == boards()[-1].sequence
    assert model.board.slots == boards()[-1].slots
    told = [m.event for m in messages() if isinstance(m, Happened)]
    assert model.events[-len(told) :] == tuple(told)
    assert replay.last_board(TAPE) == boards()[-1]


def test_once_shows_every_moment_of_it_within_its_width() -> None:
    for board in boards()[::8]:
        for glyphs, width in ((ASCII, 80), (UNICODE, 120)):
            shown = once.lines(board, glyphs, width)
            assert max(map(cell_len, shown)) <= width
        text = "\n".join(once.lines(board, ASCII))
        assert all(name in text for name in board.slots)


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 16)], ids=lambda size: str(size[0]))
def test_the_dashboard_shows_it_at_every_size(size: tuple[int, int]) -> None:
    async def play() -> list[str]:
        source = AtOnce()
        app = TopApp(source, Settings(ascii=True, theme="mono"))
        async with app.run_test(size=size) as pilot:
            await asyncio.to_thread(source.said.wait, 60)
            while app.num_taken < len(messages()):
                await pilot.pause()
            app.paint()
            await pilot.pause()
            return [strip.text for strip in app.screen._compositor.render_strips()]

    shown = asyncio.run(play())
    assert [len(line) for line in shown] == [size[0]] * size[1]
    rows = sorted(boards()[-1].slots.values(), key=lambda row: (row.slot is None, row.slot))
    assert any(rows[0].name in line for line in shown)
    assert any("READY" in line for line in shown)


def test_a_replay_of_it_ends_and_can_be_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    source = replay.Replay(TAPE, speed=1e6)
    stop = threading.Event()
    played = source.messages(stop)
    source.seek(100.0)
    first = next(played)
    assert isinstance(first, Whole)
    moment = [b for b, line in zip(boards(), replay.read(TAPE), strict=True) if line.at <= 100.0]
    assert first.board == moment[-1]
    rest: list[Message] = []
    for message in played:
        rest.append(message)
        if isinstance(message, Ended):
            stop.set()
    assert rest[-1] == Ended("the recording is over")
    assert len(rest) == len(messages()) - len(moment) + 1


def test_neither_prompts_nor_keys_are_in_it() -> None:
    text = gzip.decompress(TAPE.read_bytes()).decode()
    for secret in ("hacker", "You work for", "Bearer", "lorad_"):
        assert secret not in text
