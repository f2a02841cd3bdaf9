"""Events of pieces: the fast way says what the Structs say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import TokenLogprobs
from lorad.api import sse
from lorad.api.encode import MAX_TEXT, EventEncoder
from lorad.api.generate import _Facts
from lorad.api.shapes import ChatShape, CompletionShape
from lorad.errors import LoradError
from lorad.service.ask import Count, Piece

FACTS = _Facts("00ff" * 6, 1_740_000_000, "acme/sql", "lorad-0.1.0-ba5eba5e-a1a1a1a1")
SHAPES = [ChatShape, CompletionShape]
#: What JSON escapes, what line splitters take for a line's end, and the rest.
TEXTS = st.text(
    st.one_of(
        st.sampled_from('"\\\n\r\t\x00\u2028\u2029\u0085\ue000'), st.characters(codec="utf-8")
    ),
    min_size=1,
    max_size=20,
)


def make(shape_class, top=None, null_usage=False):
    return shape_class(FACTS, lambda token: b"t%d" % token, top, null_usage)


def slowly(shape, pieces):
    return b"".join(sse.event(chunk) for piece in pieces for chunk in shape.chunks(piece))


@pytest.mark.parametrize("null_usage", [False, True])
@pytest.mark.parametrize("top", [None, 1])
@pytest.mark.parametrize("shape_class", SHAPES)
@given(texts=st.lists(st.tuples(st.integers(0, 2), TEXTS), min_size=1, max_size=8))
def test_the_bytes_are_those_of_the_structs(shape_class, top, null_usage, texts):
    pieces = [Piece(index=index, text=text) for index, text in texts]
    encoder = EventEncoder(make(shape_class, top, null_usage), None)
    shape = make(shape_class, top, null_usage)
    assert [encoder.pieces([p]) for p in pieces] == [slowly(shape, [p]) for p in pieces]


@pytest.mark.parametrize("shape_class", SHAPES)
def test_log_probabilities_echo_and_finish_go_the_long_way(shape_class):
    scored = TokenLogprobs(7, -0.5, ((8, -1.0),))
    pieces = [
        Piece(index=0, text="hi", prompt=(1, 2), prompt_logprobs=(None, scored)),
        Piece(index=0, text="a"),
        Piece(index=0, text="b", tokens=(scored,)),
        Piece(index=0, text="c"),
        Piece(index=0, text="d", finish="stop"),
    ]
    encoder, shape = EventEncoder(make(shape_class, 1), None), make(shape_class, 1)
    assert encoder.pieces(pieces) == slowly(shape, pieces)


@pytest.mark.parametrize("shape_class", SHAPES)
@pytest.mark.parametrize("extra", [0, 1, MAX_TEXT])
def test_text_that_has_waited_comes_in_events_that_every_client_can_read(shape_class, extra):
    text = "\u0000é" * ((MAX_TEXT + extra) // 2) + "end"
    encoder = EventEncoder(make(shape_class), None)
    events = encoder.pieces([Piece(index=0, text=text, finish="length")]).split(b"\n\n")[:-1]
    assert max(map(len, events)) < 1 << 16
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    said = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in chunks]
    assert "".join(said) == text
    assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_the_end_is_usage_if_asked_for_and_done():
    shape = make(ChatShape)
    assert EventEncoder(shape, None).end(None) == sse.DONE
    used = Count(3, 4, 2)
    whole = sse.event(shape.usage_chunk(used)) + sse.DONE
    assert EventEncoder(shape, lambda: used).end(None) == whole


def test_an_error_is_the_last_event():
    last = EventEncoder(make(ChatShape), None).end(LoradError("no_room", "nothing can go"))
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "no_room"
    assert b"[DONE]" not in last
