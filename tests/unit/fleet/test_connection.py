"""HTTP of a gateway to its daemons: any cut of the bytes, broken ends, readers that are slow."""

import asyncio
import random

import pytest

from lorad.fleet import connection as connections
from lorad.fleet.connection import Broken, Connection
from lorad.fleet.line import Line, Site
from lorad.fleet.members import Ask, Lost

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b: c\r\n\r\n"
PIECES = [b"data: one\n\n", b"x" * 300, b"\r\n\r\n", b"0\r\n\r\n", b""]


def chunks(pieces):
    body = b"".join(b"%x;q=1\r\n%s\r\n" % (len(p), p) for p in pieces if p)
    return body + b"0\r\n\r\n"


class Transport:
    """What a protocol sees of its socket."""

    def __init__(self):
        self.sent, self.calls = b"", []

    def write(self, data):
        self.sent += data

    def abort(self):
        self.calls.append("abort")

    def pause_reading(self):
        self.calls.append("pause")

    def resume_reading(self):
        self.calls.append("resume")


async def begun(*, bare=False):
    made, transport = Connection(), Transport()
    made.connection_made(transport)
    await made.send(b"GET / HTTP/1.1\r\n\r\n", b"", bare=bare)
    return made, transport


async def everything(made):
    body = b""
    while piece := await made.read():
        body += piece
    return body


@pytest.mark.parametrize("seed", range(30))
def test_an_answer_is_the_same_wherever_its_bytes_are_cut(seed):
    async def scenario():
        cut, made = random.Random(seed), (await begun())[0]
        for _ in range(3):  # one exchange after another
            raw = CHUNKED + chunks(PIECES)
            reading = asyncio.ensure_future(everything(made))
            while raw:
                size = cut.choice((1, 2, 5, 50, len(raw)))
                made.data_received(raw[:size])
                raw = raw[size:]
                if cut.random() < 0.3:
                    await asyncio.sleep(0)
            reply = await made.head()
            assert (reply.status, reply.headers[1]) == (200, ("x-a", "b: c"))
            assert await reading == b"".join(PIECES)
            assert made.reusable
            await made.send(b"", b"", bare=False)

    asyncio.run(scenario())


def test_what_has_come_meanwhile_is_read_at_once():
    async def scenario():
        made, _ = await begun()
        made.data_received(CHUNKED + chunks([b"a", b"b", b"c"])[:-5])
        assert await made.read() == b"abc"
        made.data_received(b"0\r\n\r\n")
        assert await made.read() == b"" and made.reusable

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("head", "body", "bare", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"abc", False, True),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n",
            b"abc",
            False,
            False,
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"", True, True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", False, True),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
            b"",
            False,
            True,
        ),
    ],
)
def test_an_answer_ends_where_its_head_says(head, body, bare, reusable):
    async def scenario():
        made, _ = await begun(bare=bare)
        made.data_received(head + body)
        await made.head()
        assert await everything(made) == body and made.reusable is reusable

    asyncio.run(scenario())


def test_without_a_length_an_answer_ends_with_its_connection():
    async def scenario():
        made, _ = await begun()
        made.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
        assert await made.read() == b"abc"
        made.connection_lost(None)
        assert await made.read() == b"" and not made.reusable

    asyncio.run(scenario())


@pytest.mark.parametrize("came", [b"", b"HTTP/1.1 200", CHUNKED, CHUNKED + b"5\r\nab"])
def test_an_answer_that_breaks_off_is_broken_after_what_there_was(came):
    async def scenario():
        made, _ = await begun()
        made.data_received(came) if came else None
        made.connection_lost(None)
        with pytest.raises(Broken, match="broke"):
            await made.head()
            assert await everything(made) == b"ab"
        assert made.answered is bool(came)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "came",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"0\r\nx: y\r\n\r\n",
        b"x" * (connections.HEAD_BYTES + 1),
    ],
)
def test_what_is_no_daemon_is_said_so(came):
    async def scenario():
        made, transport = await begun()
        made.data_received(came)
        with pytest.raises(Broken, match="no lorad"):
            await made.head()
            await everything(made)
        assert "abort" in transport.calls

    asyncio.run(scenario())


def test_a_daemon_waits_while_nobody_reads():
    async def scenario():
        made, transport = await begun()
        made.data_received(CHUNKED + chunks([b"x" * (connections.HELD_BYTES + 1)])[:-5])
        assert transport.calls == ["pause"]
        assert len(await made.read()) == connections.HELD_BYTES + 1
        assert transport.calls == ["pause", "resume"]

    asyncio.run(scenario())


def test_a_body_is_sent_as_fast_as_it_is_taken_and_no_longer_than_it_is_wanted():
    async def scenario():
        made, transport = await begun()
        sent = []

        async def pieces():
            for piece in (b"a", b"b", b"c"):
                sent.append(piece)
                yield piece

        made.pause_writing()
        sending = asyncio.ensure_future(made.send(b"PUT ", pieces(), bare=False))
        await asyncio.sleep(0.01)
        assert sent == [b"a"]
        made.data_received(b"HTTP/1.1 413 No\r\nContent-Length: 0\r\n\r\n")
        made.resume_writing()
        await sending
        assert (await made.head()).status == 413 and sent == [b"a"]
        assert transport.sent.endswith(b"PUT a")

    asyncio.run(scenario())


def test_an_idle_connection_that_its_daemon_closed_costs_nobody_a_request(tmp_path):
    async def scenario():
        served = []

        async def serve(reader, writer):
            served.append(asyncio.current_task())
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await reader.read(1)  # the next request, or the end
            writer.close()  # as a daemon that ends
            await writer.wait_closed()

        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        line = Line(Site("a", str(tmp_path / "s"), str(tmp_path / "s")))
        for number in (1, 2, 3):
            assert (await line.ask(Ask("GET", "/x"), 5.0)).body == b"ok"
            assert len(served) == number
        await line.close()
        server.close()
        await asyncio.gather(*served)

    asyncio.run(scenario())


def test_a_request_that_nobody_answers_in_time_is_lost_and_sent_once(tmp_path):
    async def scenario():
        served, tasks = [], []

        async def serve(reader, writer):
            tasks.append(asyncio.current_task())
            served.append(await reader.readuntil(b"\r\n\r\n"))
            await reader.read()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        line = Line(Site("a", str(tmp_path / "s"), str(tmp_path / "s")))
        with pytest.raises(Lost, match="does not answer") as lost:
            await line.ask(Ask("GET", "/x", query="a=b", headers=(("x-b", "c"),)), 0.05)
        assert not lost.value.began and len(served) == 1
        head = served[0].split(b"\r\n")
        assert head[0] == b"GET /x?a=b HTTP/1.1" and b"x-b: c" in head
        with pytest.raises(ValueError, match="line end"):
            await line.ask(Ask("GET", "/x", headers=(("x", "a\r\nb: c"),)), 1.0)
        await line.close()
        server.close()
        await asyncio.gather(*tasks)
        assert len(tasks) == 1, "what cannot be said is not begun"

    asyncio.run(scenario())
