"""The live stream of a real daemon, under a little churn."""

import threading

import pytest

from lorad.board_apply import apply, with_event
from lorad.wire import EventItem
from lorad.wire_operate import DrainAsk
from lorad.wire_stream import Board, Delta


class Reader(threading.Thread):
    """Applies what comes, and keeps all of it."""

    def __init__(self, daemon, last_event_id=""):
        super().__init__(daemon=True)
        self._daemon, self._last = daemon, last_event_id
        self.ids, self.boards, self.events, self.ended = [], [], [], False
        self.start()

    def run(self):
        board = None
        with self._daemon.client() as client:
            for id, message in client.follow_board(0.2, self._last):
                self.ids.append(id)
                if isinstance(message, Board):
                    board = message
                elif isinstance(message, Delta):
                    board = apply(board, message)
                else:
                    assert isinstance(message, EventItem)
                    self.events.append(message)
                    board = with_event(board, message)
                self.boards.append(board)
        self.ended = True

    def when(self, poll, what, true):
        """The first board of which it is true."""
        return poll(lambda: next((b for b in list(self.boards) if true(b)), None), what)


class Answer(threading.Thread):
    """A long one, until it is told to go."""

    def __init__(self, daemon, model):
        super().__init__(daemon=True)
        self._daemon, self._model, self.leave = daemon, model, threading.Event()
        self.start()

    def run(self):
        body = self._daemon.body(self._model, 3900, stream=True)
        with (
            self._daemon.http() as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for _ in answer.iter_lines():
                if self.leave.is_set():
                    return


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon().start()
    daemon.upload("bible", 1)
    daemon.upload("acme/sql", 2)
    return daemon


def test_a_reader_sees_a_load_a_request_a_drain_and_an_eviction(daemon, poll):
    reader = Reader(daemon)
    reader.when(poll, "the first board", lambda b: b.status.state == "ready")
    first = reader.boards[0]
    assert first.sequence == 1 and first.status.pid == daemon.process.pid
    assert first.machine.daemon_rss_bytes > 0 and first.machine.engine_rss_bytes > 0
    levels = {check.name: check.level for check in first.health.checks}
    assert levels["engine"] == levels["sockets"] == levels["registry"] == "ok"

    answer = Answer(daemon, "acme/sql")
    # The daemon counts tokens as they come; what slots do is the engine's word, a moment older.
    busy = reader.when(
        poll,
        "a request that runs",
        lambda b: (
            any(r.generated_tokens > 20 for r in b.requests.values())
            and b.slots["acme/sql"].state != "loading"
        ),
    )
    (row,) = busy.requests.values()
    assert (row.adapter, row.state, row.endpoint, row.tenant) == (
        *("acme/sql", "running", "completions"),
        "acme",
    )
    assert row.max_tokens == 3900 and row.client.startswith("uid ")
    assert busy.num_requests == 1
    slot = busy.slots["acme/sql"]
    assert (slot.state, slot.running, slot.rev, slot.loads) == ("active", 1, row.rev, 1)
    fast = reader.when(
        poll,
        "a rate",
        lambda b: "acme/sql" in b.slots and b.slots["acme/sql"].tokens_per_second,
    )
    assert fast.load.tokens_per_second > 0
    timed = reader.when(poll, "times between tokens", lambda b: b.load.inter_token.p50)
    assert timed.load.first_token.count == 1 and timed.load.inter_token.p50 > 0
    assert busy.tenants["acme"].running == 1

    with daemon.client() as client:
        drained = client.drain(DrainAsk(name="acme/sql", wait=False))
        assert drained.running == 1
        held = reader.when(poll, "a drain", lambda b: "acme/sql" in b.drains).drains["acme/sql"]
        assert (held.running, held.begun_with, held.held, held.cause) == (1, 1, True, "operator")
        client.resume("acme/sql")
        reader.when(poll, "no drain", lambda b: "acme/sql" not in b.drains and b.sequence > 9)
        answer.leave.set()
        answer.join(30)
        reader.when(poll, "no request", lambda b: not b.requests and b.sequence > busy.sequence)
        client.evict("acme/sql")
    gone = reader.when(
        poll,
        "an eviction",
        lambda b: b.sequence > busy.sequence and "acme/sql" not in b.slots,
    )
    gone = reader.when(poll, "its count", lambda b: sum(b.churn.evictions) == 1)
    assert gone.churn.reasons == {"manual": 1}
    assert sum(gone.churn.loads) == 1 and gone.churn.top == (("acme/sql", 1),)
    assert gone.churn.recent[0].name == "acme/sql"
    types = [event.type for event in reader.events]
    assert types.index("slot.load") < types.index("drain.start") < types.index("slot.evict")
    assert [b.sequence for b in reader.boards] == sorted(b.sequence for b in reader.boards)


def test_a_reader_that_comes_back_gets_the_board_anew_and_the_events_it_missed(daemon, poll):
    before = Reader(daemon)
    poll(lambda: before.boards, "a board")
    last = before.ids[0]
    daemon.upload("fresh", 9)
    back = Reader(daemon, last)
    poll(lambda: [e for e in back.events if e.type == "adapter.added"], "the event that it missed")
    assert back.boards[0].sequence == 1
    instance, _, number = last.rpartition("-")
    assert [event.id for event in back.events[:1]] == [int(number) + 1]
    assert all(id.startswith(instance) for id in back.ids)


def test_one_board_is_what_the_stream_begins_with(daemon, poll):
    daemon.ask("bible", 2)
    with daemon.client() as client:
        poll(lambda: "bible" in client.board().slots, "it is on the board")
        board = client.board()
    assert board.sequence == 1
    assert board.events and board.status.adapters


def test_the_stream_ends_with_the_daemon_and_shows_how_it_drains(daemon, poll):
    reader = Reader(daemon)
    poll(lambda: reader.boards, "a board")
    answer = Answer(daemon, "bible")
    reader.when(poll, "a request", lambda b: b.requests)
    daemon.process.terminate()
    drain = reader.when(poll, "the daemon's drain", lambda b: "" in b.drains).drains[""]
    assert (drain.cause, drain.held, drain.limit_seconds) == ("stop", False, 20.0)
    answer.leave.set()
    answer.join(30)
    assert daemon.stop() == 0
    poll(lambda: reader.ended, "the end")
    assert "drain.start" in [event.type for event in reader.events]
