"""A running request between the engine, which does not wait, and a reader who may."""

import asyncio

import pytest

from engine.messages import SamplingParams, SequenceDelta, TokenLogprobs
from lorad.errors import LoradError
from lorad.service.ask import Ask
from lorad.service.choice import Choice
from lorad.service.generation import Generation, Owner
from lorad.text.detok import Piece as Decoded

END = 0


class Letters:
    """A token is a letter; `bad` cannot be decoded; `stop` is a stop string of one letter."""

    def __init__(self, bad=-1, stop=-1):
        self.bad, self.stop = bad, stop

    def push(self, ids):
        if self.bad in ids:
            raise ValueError("no such letter")
        if self.stop in ids:
            ids = ids[: ids.index(self.stop) + 1]
            return Decoded("".join(map(chr, ids[:-1])), True, len(ids))
        return Decoded("".join(map(chr, ids)), False, len(ids))

    def finish(self):
        return ""


class Scene:
    """`n` answers, and all that the owner was told."""

    def __init__(self, n=1, seconds=60.0, **letters):
        self.aborted, self.answered, self.closed = [], 0, 0
        self.choices = [
            Choice(
                i,
                f"r{i}",
                Letters(**letters),
                silent=frozenset({END}),
                new_decoder=lambda: Letters(**letters),
            )
            for i in range(n)
        ]
        self.generation = Generation(
            Owner(self.aborted.append, self._answer, self._close),
            Ask(model="m", sampling=SamplingParams(), prompts=("p",), n=n),
            rev=None,
            fingerprint="f",
            text=None,
            prompts=[(1, 2, 3)],
            choices=self.choices,
            seconds_left=seconds,
        )

    def _answer(self, count):
        self.answered += count

    def _close(self, generation):
        self.closed += 1

    def say(self, text, index=0, **more):
        delta = SequenceDelta(
            request_id=f"r{index}", tokens=tuple(map(ord, text)), cached_tokens=0, **more
        )
        self.generation.deliver(self.choices[index], delta)

    def pulled(self):
        return [(p.index, p.text, p.finish) for p in self.generation.pull()]


@pytest.fixture
def scene():
    """Run `scenario(make)` in a loop, where `make(...)` is a Scene that is closed at the end."""

    def run(scenario):
        async def whole():
            made = []

            def make(*args, **options):
                made.append(Scene(*args, **options))
                return made[-1]

            try:
                return await scenario(make)
            finally:
                for scene in made:
                    scene.generation.close()
                    assert (scene.answered, scene.closed) == (len(scene.choices), 1)

        return asyncio.run(whole())

    return run


def test_a_reader_who_comes_late_gets_everything_as_one_piece(scene):
    async def scenario(make):
        s = make()
        for letter in "hello":
            s.say(letter)
        assert s.pulled() == [(0, "hello", None)]
        assert s.pulled() == []
        s.say("!", finish_reason="length")
        assert s.pulled() == [(0, "!", "length")]
        assert s.generation.over
        assert s.generation.usage().completion == 6

    scene(scenario)


def test_what_nobody_has_pulled_can_begin_anew_and_what_was_seen_cannot(scene):
    async def scenario(make):
        s = make(2)
        s.say("lost")
        assert s.choices[0].begin_anew()
        s.say("whole", finish_reason="stop")
        s.say("seen", 1)
        assert s.pulled() == [(0, "whole", "stop"), (1, "seen", None)]
        assert not s.choices[1].begin_anew() and not s.choices[0].begin_anew()
        s.say("!", 1, finish_reason="length")
        assert s.pulled() == [(1, "!", "length")]
        assert s.generation.usage().completion == len("whole" + "seen!")

    scene(scenario)


def test_log_probabilities_stay_with_their_text_however_late(scene):
    async def scenario(make):
        s = make()
        for letter in "ab":
            s.say(letter, logprobs=(TokenLogprobs(ord(letter), -0.5),))
        pieces = s.generation.pull()
        assert [(p.text, p.tokens[0].token) for p in pieces] == [("a", 97), ("b", 98)]

    scene(scenario)


@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_the_probabilities_of_a_long_prompt_are_told_in_pieces_with_its_text_in_the_first(length):
    prompt = tuple(range(65, 65 + length))
    scores = (None, *(TokenLogprobs(token, -1.0) for token in prompt[1:]))
    first, text = TokenLogprobs(97, -2.0), "".join(map(chr, prompt))
    choice = Choice(0, "r", Letters(), silent=frozenset(), echo_ids=prompt, echo_text=text)
    choice.take(
        SequenceDelta(
            request_id="r",
            tokens=(97,),
            logprobs=(first,),
            prompt_logprobs=scores,
            finish_reason="length",
        )
    )
    pieces = choice.pull()
    assert pieces[0].text == text + "a" and len(pieces) == -(-length // 4)
    assert max(len(piece.prompt) for piece in pieces) <= 4
    assert sum((piece.prompt for piece in pieces), ()) == prompt
    assert sum((piece.prompt_logprobs for piece in pieces), ()) == scores
    assert not any(piece.text for piece in pieces[1:])
    assert not any(piece.tokens or piece.finish for piece in pieces[:-1])
    assert (pieces[-1].tokens, pieces[-1].finish) == ((first,), "length")


def test_whoever_listens_hears_at_once_and_of_what_was_there_before(scene):
    async def scenario(make):
        s, heard = make(), []
        s.say("a")
        s.generation.listen(lambda: heard.append("news"))
        assert len(heard) == 1
        s.say("b")
        assert len(heard) == 2
        s.say("", index=0)
        assert s.pulled() == [(0, "ab", None)]
        s.say("", index=0)  # the engine told of cached tokens, or half a character came
        assert len(heard) == 3  # not of nothing
        s.generation.close()
        s.say("c")
        assert len(heard) == 3

    scene(scenario)


def test_it_is_over_when_the_last_answer_is(scene):
    async def scenario(make):
        s = make(2)
        s.say("a", 0, finish_reason="length")
        assert not s.generation.over
        waiting = asyncio.ensure_future(s.generation.wait())
        s.say("b", 1, finish_reason="length")
        await waiting
        assert s.aborted == []
        assert s.pulled() == [(0, "a", "length"), (1, "b", "length")]

    scene(scenario)


def test_a_stop_string_aborts_at_once_and_what_follows_is_nobodys(scene):
    async def scenario(make):
        s = make(2, stop=ord("S"))
        s.say("abSd")
        assert s.aborted == ["r0"]
        s.say("e")
        s.say("", finish_reason="abort")
        assert not s.generation.over  # the other one runs
        assert s.pulled() == [(0, "ab", "stop")]
        assert s.generation.usage().completion == 3
        s.say("x", 1, finish_reason="length")
        assert s.generation.over and s.generation.error is None

    scene(scenario)


def test_the_first_failure_ends_the_others_and_comes_after_what_was_said(scene):
    async def scenario(make):
        s = make(3)
        s.say("a", 1)
        s.say("", 0, finish_reason="error", code="no_room", message="nothing can go")
        assert s.generation.over
        assert s.generation.error.code == "no_room"
        assert s.aborted == ["r1", "r2"]
        s.say("b", 1, finish_reason="abort")
        assert s.pulled() == [(1, "a", None)]

    scene(scenario)


def test_whoever_does_not_invoke_an_adapter_is_told_which_one(scene):
    async def scenario(make):
        s = make()
        s.say("", finish_reason="error", code="invocation_missing", message="it lacks [7]")
        error = s.generation.error
        assert (error.status, error.code, error.param) == (400, "invocation_missing", "prompt")
        assert error.message == "m: it lacks [7]"

    scene(scenario)


def test_text_that_cannot_be_decoded_is_one_requests_trouble(scene):
    async def scenario(make):
        s = make(bad=ord("?"))
        s.say("?")  # must not reach the engine's reader
        assert isinstance(s.generation.error, ValueError)
        assert s.aborted == ["r0"]

    scene(scenario)


def test_a_deadline_is_a_failure_and_none_that_comes_after_the_end(scene):
    async def scenario(make):
        late, done = make(seconds=-1.0), make(seconds=0.0)
        done.say("x", finish_reason="length")
        await late.generation.wait()
        assert late.generation.error.code == "deadline_exceeded"
        await asyncio.sleep(0.01)
        assert done.generation.error is None

    scene(scenario)


def test_closing_aborts_what_runs_and_counts_what_was_never_answered(scene):
    async def scenario(make):
        s = make(3)
        s.say("a", 0)
        s.say("b", 1, finish_reason="length")
        s.generation.close()
        s.generation.close()
        assert s.aborted == ["r0", "r2"]
        s.generation.fail(LoradError("draining", "too late"))
        assert s.generation.error is None

    scene(scenario)
