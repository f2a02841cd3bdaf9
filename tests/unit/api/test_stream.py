"""How often a stream writes, on a connection that only notes it."""

import asyncio

import pytest

from engine.messages import SamplingParams, SequenceDelta
from lorad.api.sse import PING, ClientGone
from lorad.api.stream import TokenStream
from lorad.service.ask import Ask
from lorad.service.choice import Choice
from lorad.service.generation import Generation, Owner
from lorad.text.detok import Piece as Decoded


class Letters:
    def push(self, ids):
        return Decoded("".join(map(chr, ids)), False, len(ids))

    def finish(self):
        return ""


class Plain:
    """`0:text` of each piece, then the end."""

    def pieces(self, pieces):
        return b" ".join(b"%d:%s" % (p.index, p.text.encode()) for p in pieces)

    def end(self, error):
        return b"." if error is None else repr(error).encode()


class Connection:
    """Notes what is written; a test says when the client reads."""

    def __init__(self):
        self.writes, self.blocked = [], False

    def body_writer(self, on_writable):
        self.on_writable = on_writable
        return self

    def write(self, data):
        self.writes.append(data)

    def close(self):
        self.on_writable = None


class Scene:
    def __init__(self, n=1, ping=60.0, stall=60.0):
        self.choices = [Choice(i, f"r{i}", Letters(), silent=frozenset()) for i in range(n)]
        self.generation = Generation(
            Owner(lambda _: None, lambda _: None, lambda _: None),
            Ask(model="m", sampling=SamplingParams(), prompts=("p",), n=n),
            rev=None,
            fingerprint="f",
            text=None,
            prompts=[(1,)],
            choices=self.choices,
            seconds_left=60.0,
        )
        self.lost = []
        self.stream = TokenStream(
            self.generation,
            Plain(),
            headers={},
            ping_seconds=ping,
            stall_seconds=stall,
            on_gone=self.lost.append,
        )
        self.connection = Connection()
        self.sent = []

    def say(self, text, index=0, **more):
        tokens = tuple(map(ord, text))
        delta = SequenceDelta(request_id=f"r{index}", tokens=tokens, **more)
        self.generation.deliver(self.choices[index], delta)

    async def send(self, message):
        self.sent.append(message["type"])


@pytest.fixture
def scene():
    """Run `scenario(scene, sending)`, where the task `sending` is the whole response."""

    def run(scenario, **options):
        async def whole():
            scene = Scene(**options)
            sending = asyncio.ensure_future(scene.stream._send_all(scene.connection, scene.send))
            await turns()
            try:
                await scenario(scene, sending)
            finally:
                scene.generation.close()
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

        asyncio.run(whole())

    return run


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_step_is_one_write_however_many_answers_it_has_a_token_for(scene):
    async def scenario(s, sending):
        for letter in "ab":
            for index in range(3):
                s.say(letter, index)
            await turns()
        assert s.connection.writes == [b"0:a 1:a 2:a", b"0:b 1:b 2:b"]

    scene(scenario, n=3)


def test_steps_that_came_together_are_one_write(scene):
    async def scenario(s, sending):
        for letter in "hello":
            s.say(letter)
        await turns()
        assert s.connection.writes == [b"0:hello"]

    scene(scenario)


def test_others_have_their_turn_between_the_writes_of_who_has_much(scene, monkeypatch):
    monkeypatch.setattr("lorad.api.stream.AT_ONCE", 2)

    async def scenario(s, sending):
        for index, letter in enumerate("abcde"):
            s.say(letter, index, finish_reason="stop")
        heard = []
        while not sending.done():
            await turns(1)
            heard.append(len(s.connection.writes))
        assert s.connection.writes == [b"0:a 1:b", b"2:c 3:d", b"4:e."]
        assert {1, 2, 3} <= set(heard)

    scene(scenario, n=5)


def test_the_end_comes_with_the_last_text(scene):
    async def scenario(s, sending):
        s.say("x", finish_reason="stop")
        await sending
        assert s.connection.writes == [b"0:x."]
        assert s.sent == ["http.response.start", "http.response.body"]

    scene(scenario)


def test_nothing_is_written_while_the_client_does_not_read(scene):
    async def scenario(s, sending):
        s.connection.blocked = True
        s.say("a")
        await turns()
        s.say("b", finish_reason="stop")
        await turns()
        assert s.connection.writes == [] and not sending.done()
        s.connection.blocked = False
        s.connection.on_writable()
        await sending
        assert s.connection.writes == [b"0:ab."]

    scene(scenario)


def test_a_client_that_reads_nothing_for_long_is_given_up(scene):
    async def scenario(s, sending):
        write = s.connection.write

        def fill(data):
            write(data)
            s.connection.blocked = True

        s.connection.write = fill
        s.say("a")
        with pytest.raises(ClientGone) as caught:
            await sending
        assert caught.value.reason == "slow_client"
        assert s.connection.on_writable is None

    scene(scenario, stall=0.01)


def test_silence_is_filled_and_only_silence(scene):
    async def scenario(s, sending):
        while s.connection.writes.count(PING) < 2:
            await asyncio.sleep(0.005)
        s.say("a")
        await turns()
        assert [one for one in s.connection.writes if one != PING] == [b"0:a"]
        s.connection.blocked = True
        count = len(s.connection.writes)
        await asyncio.sleep(0.05)
        assert len(s.connection.writes) == count

    scene(scenario, ping=0.01)


def test_an_encoder_that_fails_ends_the_response(scene):
    async def scenario(s, sending):
        def broken(pieces):
            raise RuntimeError("cannot say that")

        s.stream._encoder.pieces = broken
        s.say("a")
        with pytest.raises(RuntimeError):
            await sending

    scene(scenario)
