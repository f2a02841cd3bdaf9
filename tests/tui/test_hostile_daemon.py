"""What answers on the socket is no daemon, or of another version: the link says so and goes on."""

import errno
import socket
import threading
from contextlib import suppress

import msgspec
import pytest
from msgspec.structs import replace

from lorad import caller
from lorad.client import LoradClient
from lorad.tui import feed, save
from lorad.tui.feed import Feed, Live
from lorad.tui.messages import Changed, Ended, Happened, Lost, Whole
from lorad.wire import EventItem
from lorad.wire_stream import Delta

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"


@pytest.fixture
def said(tmp_path):
    """`said(answer, ...)`: what a dashboard hears of a server that says so, and its questions."""
    path = tmp_path / "s"

    def ask(*answers):
        asked, stop = [], threading.Event()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(8)

            def serve():
                left = list(answers)
                while left:
                    one, _ = listener.accept()
                    with one:
                        head = one.recv(65536)
                        if head:  # else it only looked whether anybody is there
                            asked.append(head)
                            with suppress(OSError):  # who has heard enough hangs up
                                one.sendall(left.pop(0))

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()

            def wait(stop, seconds):
                if len(asked) == len(answers):
                    stop.set()

            with LoradClient(f"unix://{path}", timeout=20) as client:
                opened = lambda last: client.follow_board(1.0, last)  # noqa: E731
                told = list(Live("here", opened, wait=wait).messages(stop))
            thread.join(20)
        path.unlink()
        return told, asked

    return ask


def event(name, body, id="i-1"):
    return f"id: {id}\nevent: {name}\ndata: ".encode() + body + b"\n\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(b"\xff\xfe\x00garbage\n\n", "connection broke", id="no-http"),
        pytest.param(b"", "connection broke", id="nothing"),
        pytest.param(HEAD + b"\r\n" + b"\xff\xfe\xfd\n\n\n", "another version", id="no-utf8"),
        pytest.param(HEAD + b"\r\n" + b"\0" * 5000, "ended the stream", id="no-line"),
        pytest.param(
            HEAD + b"\r\n" + event("board", b'{"x":'), "another version", id="half-a-board"
        ),
        pytest.param(HEAD + b"\r\n" + event("board", b"[" * 100_000), "another version", id="deep"),
        pytest.param(
            HEAD + b"content-encoding: gzip\r\n\r\nno gzip", "connection broke", id="no-gzip"
        ),
        pytest.param(
            HEAD + b"content-length: 900\r\n\r\ndata: {", "connection broke", id="cut-off"
        ),
        pytest.param(
            HEAD + b"\r\n" + event("nonsense", b"1"), "ended the stream", id="unknown-event"
        ),
    ],
)
def test_whatever_a_server_says_the_link_is_tried_again(said, boards, answer, why):
    good = HEAD + b"\r\n" + event("board", msgspec.json.encode(boards.small()))
    told, _ = said(answer, good)
    first, second, last = told
    assert isinstance(first, Lost) and why in first.why
    assert isinstance(second, Whole) and isinstance(last, Lost)


def test_a_board_with_fields_of_a_later_version_is_shown(said, boards):
    board = msgspec.to_builtins(boards.small())
    board |= {"later": [1, {"x": None}]}
    board["status"] |= {"later": "x"}
    next(iter(board["slots"].values()))["later"] = 1.5
    told, _ = said(HEAD + b"\r\n" + event("board", msgspec.json.encode(board)))
    assert told[0] == Whole(boards.small())


def test_an_id_that_is_no_header_is_not_sent_back(said, boards):
    content = msgspec.json.encode(boards.small())
    answers = [HEAD + b"\r\n" + event("board", content, id=id) for id in ("é\x1b漢", "i-9", "")]
    told, asked = said(*answers)
    assert not any(isinstance(message, Ended) for message in told)
    assert [b"last-event-id: i-9" in head.lower() for head in asked] == [False, False, True]


def test_a_line_without_an_end_does_not_fill_the_memory(said, boards, monkeypatch):
    monkeypatch.setattr(caller, "MAX_LINE_BYTES", 1 << 16)
    told, _ = said(HEAD + b"\r\ndata: " + b"x" * (1 << 20))
    assert [type(message) for message in told] == [Lost] and "broke" in told[0].why


def test_a_source_waits_for_a_screen_that_takes_nothing(monkeypatch):
    """What is dropped in the midst of deltas would be a gap for ever."""
    monkeypatch.setattr(feed, "MAX_WAITING", 10)
    taken, done = [], threading.Event()

    class Source:
        title = "many"

        def messages(self, stop):
            for number in range(1000):
                yield Lost(str(number), 1.0)
            done.set()

    news = threading.Event()
    link = Feed(Source(), news.set)
    link.start()
    while len(taken) < 1000:
        assert news.wait(20)
        news.clear()
        some = link.take()
        assert len(some) <= 10 or done.is_set()
        taken += some
    assert [message.why for message in taken] == [str(number) for number in range(1000)]
    link.stop()


# ----------------------------------------------------------------- what a board may say
HUGE = 10**400  # JSON may, and then it is an int that no float has room for


def wild(value, number):
    """The same with that number wherever one stands."""
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
        return replace(value, **{name: wild(getattr(value, name), number) for name in names})
    if isinstance(value, dict):
        return {key: wild(each, number) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(wild(each, number) for each in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return number if isinstance(value, int) else float(max(-1e308, min(number, 1e308)))


@pytest.mark.parametrize("number", [-1, HUGE, -HUGE], ids=["minus", "huge", "-huge"])
def test_no_number_ends_the_dashboard_or_moves_a_column(play, boards, number):
    async def act(stage):
        for key in "1234567":
            await stage.press(key)
            assert set(stage.cells()) == {80}
            await stage.press("enter")
            assert set(stage.cells()) == {80}
            await stage.press("escape")

    play(act, wild(boards.small(), number), (80, 24))


@pytest.mark.parametrize(
    "time", ["", "soon", "2026-03-01T16:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z"]
)
def test_no_time_ends_the_dashboard_or_the_stream(play, boards, time):
    async def act(stage):
        board = boards.small()
        for number in (1, 2):
            later = EventItem(id=99 + number, time=time, type="pin.set")
            delta = Delta(sequence=board.sequence + number, time=time)
            await stage.tell(Happened(later), Changed(delta))
        assert stage.app.model.link.up
        await stage.press("5", "enter")
        assert "EVENT pin.set" in stage.text()

    play(act, replace(boards.small(), time=boards.moment(1)), (80, 24))


def test_a_dialog_in_a_terminal_of_one_cell_waits_for_a_larger_one(play, boards, fakes):
    async def act(stage):
        for key in ("d", "ctrl+p", "question_mark", "enter", "e"):
            await stage.resize(1, 1)
            await stage.press("escape", key)
            await stage.resize(3, 2)
            await stage.resize(80, 24)
            assert set(stage.cells()) == {80}
        assert "Evict globex/summarise?" in stage.text()

    play(act, boards.small(), (80, 24), daemon=fakes.FakeDaemon())


def test_keys_go_where_they_went_before_the_terminal_was_too_small(play, boards):
    async def act(stage):
        before = stage.app.target
        await stage.resize(20, 5)
        await stage.resize(80, 24)
        assert stage.app.target == before
        await stage.press("j")
        assert stage.app.target != before
        await stage.press("slash")
        await stage.resize(20, 5)
        await stage.resize(80, 24)
        await stage.type("jarvis", "enter")  # the line that was open has them still
        assert stage.app.target == "stark/jarvis"

    play(act, boards.small(), (80, 24))


def test_a_snapshot_that_has_no_room_leaves_nothing_half(play, boards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = save._write

    def full(file, content):
        real(file, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(save, "_write", full)

    async def act(stage):
        await stage.press("ctrl+s")
        assert "not saved: No space left on device" in stage.text()

    play(act, boards.small(), (80, 24))
    assert not list(tmp_path.iterdir())
