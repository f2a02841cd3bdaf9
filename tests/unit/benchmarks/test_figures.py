"""What the benchmarks make of times: percentiles, rates, tables of kernels, parsed streams."""

import json

import pytest
from generator import events, never_sent, parse
from kernel_table import show, tabulate
from report import table
from streams import Failed, Stream, check, decode_rate, percentile, spread, token_gaps
from through_socket import gather


def stream(*times, tokens=None, error=""):
    return Stream(0.0, 0.0, list(times), times[-1], tokens or len(times), error)


def test_a_percentile_is_a_value_that_was_there():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([7.0], 0.99) == 7.0
    assert spread([], "itl") == {}
    assert spread([0.001, 0.002], "itl", most=True)["itl_max_ms"] == 2.0


def test_gaps_are_within_a_stream_and_within_the_window():
    streams = [stream(1.0, 2.0, 4.0), stream(1.5, 3.0)]
    assert sorted(token_gaps(streams)) == [1.0, 1.5, 2.0]
    assert token_gaps(streams, 1.2, 3.5) == [1.5]
    assert token_gaps(streams, start=2.0) == [2.0]


def test_the_decode_rate_is_taken_while_all_streams_run():
    early, late = stream(0.0, 1.0, 2.0, 3.0, 4.0), stream(2.0, 3.0, 4.0, 5.0)
    assert decode_rate([early, late]) == pytest.approx(2.0)
    twice = stream(0.0, 1.0, 2.0, tokens=6)  # two tokens an event
    assert decode_rate([twice]) == pytest.approx(2.0)
    assert decode_rate([stream(0.0, 1.0), stream(2.0, 3.0)]) is None


def test_a_stream_that_failed_fails_the_run():
    with pytest.raises(Failed, match="no room"):
        check([stream(1.0), stream(1.0, error="no room")])


# ----------------------------------------------------------------- kernels
def test_kernels_and_gaps_add_up_to_the_step():
    us = 1e-6
    kernels = [
        ("gemm", 0 * us, 10 * us),
        ("norm", 12 * us, 13 * us),  # 2 us after
        ("gemm", 12.5 * us, 20 * us),  # launched beside the one before
        ("draw", 40 * us, 41 * us),  # a gap between steps
    ]
    found = tabulate(kernels)
    told = found.a_step(1)
    assert told["step_us"] == pytest.approx(41)
    assert told["idle_us"] == pytest.approx(22)
    assert found.between == pytest.approx(20 * us)
    rows = {row["name"]: row for row in told["kernels"]}
    assert rows["gemm"] == {
        "name": "gemm",
        "launches": 2,
        "us": 17.5,
        "alone_us": 17.0,
        "gap_us": 0.0,
    }
    assert rows["norm"]["gap_us"] == pytest.approx(2)
    total = sum(row["alone_us"] + row["launches"] * row["gap_us"] for row in rows.values())
    assert total == pytest.approx(told["step_us"])
    shown = show({"batch": 1, "adapters": 0} | told).splitlines()
    assert len(shown) == 2 + len(rows)
    assert shown[2].endswith("draw")  # with its gap it takes most
    halved = found.a_step(2)
    assert halved["step_us"] == pytest.approx(20.5)
    assert halved["launches"] == 2


def test_a_kernel_hides_those_that_run_beside_it():
    found = tabulate([("long", 0.0, 10.0), ("short", 2.0, 3.0), ("last", 11.0, 12.0)])
    assert found.idle == 1.0
    assert found.rows["short"].alone == 0.0
    assert found.rows["last"].gaps == 1.0


# ----------------------------------------------------------------- the generator's parser
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*datas):
    sized = b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in datas)
    return HEAD + sized + b"0\r\n\r\n"


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


ANSWER = chunked(
    event(choices=[{"text": " one"}])[:25],  # a chunk may end within a word
    event(choices=[{"text": " one"}])[25:],
    b": ping\n\n",
    event(choices=[{"text": " two"}]) + event(choices=[{"text": "", "finish_reason": "length"}]),
    event(choices=[], usage={"completion_tokens": 2}),
    b"data: [DONE]\n\n",
)


class Received:
    """A connection that has ended, whose answer came in `pieces`, one a second."""

    due = sent = 0.0

    def __init__(self, *pieces, ended=9.0):
        self.pieces = [(float(n), piece) for n, piece in enumerate(pieces)]
        self.ended = ended


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_an_answer_is_read_however_it_is_cut(size):
    pieces = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    told = parse(Received(*pieces))
    assert (told["error"], told["tokens"], len(told["times"])) == ("", 2, 2)
    assert told["times"][0] <= told["times"][1]
    if size == 1:  # an event has come when its last byte has
        assert told["times"][0] == ANSWER.index(b"one") + len('one"}]}\n\n') - 1


def test_events_are_whole_lines_of_data():
    assert [data for _, data in events([(0.0, ANSWER)], len(HEAD))][-1] == b"[DONE]"


def test_what_went_wrong_is_told():
    refused = b'HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{"error": {"message": "no"}}'
    assert "404" in parse(Received(refused))["error"]
    failed = chunked(event(choices=[{"text": "a"}]), event(error={"message": "the engine ended"}))
    assert parse(Received(failed))["error"] == "the engine ended"
    assert "[DONE]" in parse(Received(chunked(event(choices=[{"text": "a"}]))))["error"]
    assert parse(Received())["error"]


def test_a_stream_that_was_cut_off_is_no_failure():
    told = parse(Received(ANSWER[: len(HEAD) + 50], ended=None))
    assert (told["error"], told["ended"]) == ("", None)


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_answers_come_back_in_the_order_in_which_requests_were_dealt_out(count):
    dealt = [[never_sent(float(n)) for n in range(count)][worker::3] for worker in range(3)]
    assert [stream.due for stream in gather(dealt)] == list(range(count))


# ----------------------------------------------------------------- the table
def test_the_table_shows_missed_bars_and_failures():
    bars = {"of_offline": {"value": 0.9, "limit": 0.95, "met": False}}
    shown = table(
        [
            {"mode": "socket", "case": "start"},
            {"mode": "socket", "case": "throughput", "batch": 64, "bars": bars},
            {"mode": "socket", "case": "long", "given": [1, 2], "error": "Failed: no"},
        ]
    ).splitlines()
    assert len(shown) == 3
    assert "of_offline 0.9 of 0.95 MISSED" in shown[1]
    assert "FAILED Failed: no" in shown[2]
