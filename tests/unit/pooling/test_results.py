"""Results on their way through a frame: numbers as they were, in frames of a bounded size."""

import msgspec
import numpy as np
import pytest

from engine import framing
from engine.framing import encode_frame, event_reader, in_parts
from engine.messages import Answer, Event, StepFrame
from engine.pooling import requests
from engine.pooling.requests import PoolResult, packed, unpacked
from engine.pooling_messages import Pooled


def through(result: PoolResult) -> PoolResult:
    frame = StepFrame(step=1, pooled=(packed(result),))
    (read,) = event_reader().feed(encode_frame(frame))
    assert isinstance(read, StepFrame)
    return unpacked(read.pooled[0])


@pytest.mark.parametrize("shape", [(3,), (2, 5), (0,), (1, 1)])
def test_numbers_arrive_as_they_were_with_their_shape(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).standard_normal(shape, np.float32)
    read = through(PoolResult("a", num_tokens=7, num_cut=2, values=values))
    assert read.values is not None and read.values.shape == shape
    assert read.values.tobytes() == values.tobytes()
    assert (read.request_id, read.num_tokens, read.num_cut, read.logits) == ("a", 7, 2, None)


def test_scores_arrive_beside_what_they_were_made_of() -> None:
    scores, logits = np.float32([0.25, 0.75]), np.float32([-1, 2])
    read = through(PoolResult("a", values=scores, logits=logits))
    assert read.values is not None and read.values.tolist() == [0.25, 0.75]
    assert read.logits is not None and read.logits.tolist() == [-1, 2]


def test_an_error_has_no_values() -> None:
    read = through(PoolResult("a", code="no_room", message="full"))
    assert (read.values, read.logits, read.code, read.message) == (None, None, "no_room", "full")


def test_columns_of_a_wider_matrix_travel_as_they_read() -> None:
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)
    read = through(PoolResult("a", values=wide[:, 1:3]))
    assert read.values is not None and read.values.tolist() == wide[:, 1:3].tolist()


def test_a_result_that_no_frame_can_hold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_VALUE_BYTES", 15)
    assert packed(PoolResult("a", values=np.zeros(4, np.float32))).code == "invalid_value"
    assert packed(PoolResult("a", values=np.zeros(3, np.float32))).code == ""


def test_a_large_step_is_told_in_several_frames_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "FRAME_VALUE_BYTES", 100)
    sizes = [40, 40, 40, 250, 10, 99]
    whole = StepFrame(
        step=4,
        pooled=tuple(Pooled(request_id=str(n), values=bytes(s)) for n, s in enumerate(sizes)),
        answers=(Answer(command_id=9),),
    )
    parts = list(in_parts(whole))
    told = [one for part in parts for one in part.pooled]
    assert tuple(told) == whole.pooled
    assert [len(part.pooled) for part in parts] == [2, 1, 1, 1, 1]
    assert [part.answers for part in parts] == [(), (), (), (), whole.answers]
    assert {part.step for part in parts} == {4}


def test_a_step_without_results_is_one_frame_as_it_is() -> None:
    frame = StepFrame(step=1, answers=(Answer(command_id=1),))
    assert list(in_parts(frame)) == [frame]
    assert not frame.silent and StepFrame(step=1).silent
    assert not StepFrame(step=1, pooled=(Pooled(request_id="a"),)).silent


def test_a_frame_of_a_generating_engine_says_nothing_of_pooling_but_that_there_is_none() -> None:
    assert msgspec.msgpack.decode(encode_frame(StepFrame(step=1))[4:], type=Event) == StepFrame(
        step=1
    )
