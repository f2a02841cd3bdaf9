"""`churn.py` runs to its end on a tiny model, and every adapter came from where its line says."""

import json

import pytest

SMALL = ["--device", "cpu", "--adapters", "20", "--room", "6", "--ram", "18", "--files", "2"]
SMALL += ["--streams", "3", "--few", "2", "--residents", "6", "--prompt", "16", "--tokens", "6"]


@pytest.fixture
def churn(tiny, capsys):
    from churn import main

    def run(case, *, seconds="2", blocks="2000"):
        asked = ["--case", case, "--seconds", seconds, "--blocks", blocks]
        status = main(["--model", str(tiny), *SMALL, *asked])
        start, *lines = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert (start["case"], start["files"]) == ("start", 2)
        assert [line["error"] for line in lines if "error" in line] == []
        assert status == 0
        assert {line["case"] for line in lines} == set(case.split(","))
        return lines

    return run


def test_every_policy_serves_the_same_mix_on_room_for_some(churn):
    quiet, *policies = churn("zipf")
    assert [line["policy"] for line in policies] == ["cost", "lru", "fifo", "lfu"]
    assert (quiet["policy"], quiet["hit_rate"], quiet.get("h2ds")) == ("none", 1.0, None)
    for line in policies:
        assert line["requests"] == quiet["requests"]
        assert line["rate"] == pytest.approx(0.8 * line["capacity"], rel=0.01)
        found = {tier: line[f"found_{tier}"] for tier in ("gpu", "loading", "ram", "disk")}
        assert sum(found.values()) == line["requests"]
        assert line["hit_rate"] == pytest.approx(found["gpu"] / line["requests"], abs=1e-4)
        assert line["hit_rate"] < 1
        assert line["h2ds"] > 0 and found["ram"] > 0  # two may find one there, and share its copy
    # On a busy machine the rate is low, and so few requests may find nobody there by one policy.
    assert sum(line["found_gpu"] for line in policies) > 0


@pytest.mark.late
def test_twice_as_many_adapters_as_there_is_room_for_are_held_against_just_enough(churn):
    lines = churn("cliff")
    assert [(line["adapters"], line["share"]) for line in lines] == [
        (8, 0.25),
        (16, 0.25),
        (8, 0.8),
        (16, 0.8),
    ]
    for few, many in (lines[:2], lines[2:]):
        assert (few["hit_rate"], few.get("h2ds")) == (1.0, None)
        assert many["hit_rate"] < 1 and many["h2ds"] > 0
        ratio = many["ttft_p50_ms"] / few["ttft_p50_ms"]
        assert many["ttft_median_over_few"] == pytest.approx(ratio, rel=0.01)


@pytest.mark.slow
def test_newcomers_find_their_adapter_where_the_line_says(churn):
    lines = churn("idle,bystanders", seconds="4")
    kinds = {(line["case"], line["streams"], line["newcomers"]): line for line in lines}
    assert len(kinds) == len(lines) == 3 + 4 + 4 + 4
    for (_, streams, kind), line in kinds.items():
        if kind == "none":
            assert streams and line["itl_p50_ms"] > 0
            continue
        assert line["counted"] == line["served"] > 0, "one of them was elsewhere"
        loads, reads = line["loads"], line["reads"]
        if kind == "resident":
            assert (loads, reads) == (0, 0)
        if kind == "host":
            assert loads >= line["served"] and reads == 0
        if kind == "cold":
            assert reads >= loads >= line["served"]
        if kind != "resident":
            assert "ttft_ms_over_resident" in line["bars"]
            assert ("itl_p99_over_quiet" in line["bars"]) == (streams > 0)


def test_the_loop_s_own_time_for_a_load_is_told(churn):
    [line] = churn("host-time", seconds="0.2")
    assert line["resident"] == 6 and 1 < line["loads"] <= 18
    # With loads less without: other processes may make the wall time's difference anything.
    assert line["advance_cpu_ms"] > 0
    assert line["advance_ms"] <= line["advance_max_ms"]
    assert line["longest_over_median_max"] >= line["longest_over_median"] >= 1
    assert line["bars"]["host_ms"]["value"] == pytest.approx(line["advance_ms"], abs=1e-3)


def test_the_pool_fills_with_adapters_beside_running_requests(churn):
    [line] = churn("resident", blocks="500")
    per_adapter = line["adapter_blocks"] / line["resident"]
    assert line["running"] == 3 and line["told_tokens"] > 0
    assert line["loads"] > line["resident"], "it ended before the pool was full"
    room = line["blocks"] - line["adapter_blocks"] - line["kv_blocks"]
    assert room < per_adapter + 64, "another would have fitted"
    assert set(line["stored_over_true"]) == {"4", "8", "16", "32", "64"}
    assert all(ratio >= 1 for ratio in line["stored_over_true"].values())
    assert line["bars"]["resident"] == {"value": line["resident"], "limit": 1000, "met": False}


def test_a_case_that_nobody_knows_is_refused(capsys):
    from churn import main

    with pytest.raises(SystemExit):
        main(["--model", "/nowhere", "--case", "odd"])
    assert "zipf" in capsys.readouterr().err


def test_pauses_are_sorted_by_what_was_on_its_way():
    from churn_fleet import Spans
    from streams import Move, Stream

    moves = [Move("copy", 1.0, 2.0, 1), Move("read", 1.5, 2.5, 1), Move("copy", 5.0, 5.1, 1)]
    spans = Spans.of(moves)
    assert spans.spans == ((1.0, 2.5), (5.0, 5.1))
    stream = Stream(0.0, 0.0, times=[0.0, 1.0, 2.0, 2.5, 4.0, 6.0])
    within, beside = spans.split([stream, Stream(0.0, 0.0, times=[2.6, 2.9])])
    assert within == [1.0, 0.5, 2.0]
    assert beside == pytest.approx([1.0, 1.5, 0.3])
