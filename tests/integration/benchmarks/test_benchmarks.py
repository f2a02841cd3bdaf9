"""Each benchmark runs to its end on a tiny model, and its lines hang together."""

import json
import sys
from pathlib import Path

import pytest

QUICK = ["--prompt", "32", "--tokens", "8", "--seconds", "0.2", "--streams", "2", "--workers", "2"]
DECK = ["--device", "cpu", *QUICK]


def lines_of(capsys):
    """What a benchmark printed on stdout; each line is an object."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def by_case(lines):
    found = {}
    for line in lines:
        found.setdefault(line["case"], []).append(line)
    return found


def check_loads(lines, streams):
    """Each kind of newcomer came from where it was meant to come from."""
    kinds = {line["newcomers"]: line for line in lines if line["streams"] == streams}
    assert list(kinds) == [*(["none"] if streams else []), "resident", "host", "cold"]
    assert all(line["served"] > 0 for kind, line in kinds.items() if kind != "none")
    assert (kinds["resident"]["loads"], kinds["resident"]["reads"]) == (0, 0)
    assert kinds["host"]["loads"] >= kinds["host"]["served"]
    assert kinds["host"]["reads"] == 0
    assert kinds["cold"]["reads"] >= kinds["cold"]["loads"] >= kinds["cold"]["served"]
    assert "ttft_ms_over_resident" in kinds["cold"]["bars"]


@pytest.mark.late
def test_every_case_runs_on_the_engine_alone(tiny, capsys):
    from serve import main

    cases = [
        "--throughput",
        "1:0,3:2",
        "--steady",
        "3:2",
        "--mixed",
        "0,2",
        "--loads",
        "0,2",
        "--prefill",
        "48",
    ]
    cases += ["--long", "2:100", "--mix", "skew90:3,zipf:3,uniform:3,distinct:3"]
    status = main(["--model", str(tiny), "--mode", "offline", *DECK, *cases])
    lines = lines_of(capsys)
    assert not [line["error"] for line in lines if "error" in line]
    assert status == 0
    found = by_case(lines)
    named = ["start", "throughput", "steady", "mixed", "loads", "prefill", "long", "mix"]
    assert list(found) == named
    for line in found["throughput"]:
        assert line["tokens_per_s"] > 0
        assert 0 < line["itl_p50_ms"] <= line["itl_p99_ms"] <= line["itl_max_ms"]
    [steady] = found["steady"]
    assert steady["context"] > 32
    assert steady["step_ms"] == pytest.approx(3e3 / steady["tokens_per_s"], rel=0.01)
    assert [line["adapters"] for line in found["mixed"]] == [0, 2]
    assert all(line["served"] for line in found["mixed"])
    check_loads(found["loads"], 0)
    check_loads(found["loads"], 2)
    [prompts] = found["prefill"]
    assert prompts["base_tokens_per_s"] > 0
    assert prompts["adapter_queued_tokens_per_s"] > 0
    [far] = found["long"]
    assert far["context"] > 100
    assert far["step_ms"] > 0
    assert [line["mix"] for line in found["mix"]] == ["skew90", "zipf", "uniform", "distinct"]


@pytest.mark.slow  # what it measures takes longer than the phases that it is given on busy cores
@pytest.mark.late
def test_the_daemon_is_held_against_the_engine(tiny, tmp_path, capsys, monkeypatch):
    import adapter_loads
    from serve import main

    for name, fewer in {"RESIDENT": 1, "SHARED": 7, "IN_RAM": 4, "FLEET": 4}.items():
        monkeypatch.setattr(adapter_loads, name, fewer)  # each has to be registered
    asked = ["--model", str(tiny), *DECK, "--throughput", "2:1", "--steady", "2:1"]
    assert main([*asked, "--mode", "offline"]) == 0
    earlier = tmp_path / "offline.jsonl"
    earlier.write_text(capsys.readouterr().out)
    assert main([*asked, "--mode", "socket", "--against", str(earlier), "--loads", "2"]) == 0
    found = by_case(lines_of(capsys))
    check_loads(found["loads"], 2)
    [served] = found["throughput"]
    offline = by_case(map(json.loads, earlier.read_text().splitlines()))
    check_ratio(served, offline["throughput"])
    check_ratio(*found["steady"], offline["steady"])
    assert set(served["cpu"]) == {"daemon", "engine", "generator"}


@pytest.mark.slow
@pytest.mark.late
def test_both_modes_run_one_after_the_other(tiny, capsys):
    from serve import main

    assert main(["--model", str(tiny), *DECK, "--throughput", "2:0"]) == 0
    lines = lines_of(capsys)
    assert [line["mode"] for line in lines] == ["offline"] * 2 + ["socket"] * 2
    check_ratio(lines[-1], lines[1:2])


def check_ratio(served, offline):
    [alone] = offline
    ratio = served["tokens_per_s"] / alone["tokens_per_s"]
    assert served["of_offline"] == pytest.approx(ratio, abs=1e-3)


def test_adapters_come_from_the_tier_that_they_were_brought_to(tiny, tmp_path):
    from offline import OfflineDriver
    from streams import Request

    from engine.config import EngineConfig

    config = EngineConfig(model=str(tiny), device="cpu", max_model_len=64, slots=4)
    driver = OfflineDriver(config, tmp_path)
    found = {}
    for adapter, tier in enumerate(("gpu", "ram", "disk")):
        driver.settle([adapter], tier)
        run = driver.run([], [Request([1, 2, 3], 2, adapter)], None)
        found[tier] = run.loads, run.reads
    driver.close()
    assert found == {"gpu": (0, 0), "ram": (1, 0), "disk": (1, 1)}


def test_a_case_that_fails_is_told_and_the_others_go_on(tiny, capsys):
    from serve import main

    cases = ["--throughput", "1:0", "--prefill", "9000"]  # beyond the model's positions
    status = main(["--model", str(tiny), "--mode", "offline", *DECK, *cases])
    found = by_case(lines_of(capsys))
    assert status == 1
    assert "error" in found["prefill"][0]
    assert "tokens_per_s" in found["throughput"][0]


@pytest.mark.parametrize("wrong", [["--mix", "odd:3"], ["--throughput", "3"], ["--mixed", "1:2"]])
def test_a_case_that_is_not_understood_is_refused(wrong, capsys):
    from serve import main

    assert main(["--model", "/nowhere", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_decode_steps_are_timed(tiny, capsys):
    from decode import main

    asked = ["--prompt", "32", "--tokens", "12", "--cases", "1:2,3:0,3:2", "--device", "cpu"]
    assert main(["--model", str(tiny), *asked]) == 0
    start, *cases = lines_of(capsys)
    assert start["ready_s"] >= 0
    assert [(line["batch"], line["adapters"]) for line in cases] == [(1, 2), (3, 0), (3, 2)]
    assert all(line["step_ms"] > 0 and line["steps"] == 10 for line in cases)
    alone, base, more = cases
    assert "added_ms" not in alone
    assert more["added_ms"] == pytest.approx(more["step_ms"] - base["step_ms"], abs=2e-3)


def test_decode_figures_are_held_against_their_limits():
    from decode import bars

    base = bars({"batch": 64, "adapters": 0, "step_ms": 6.3, "idle_between_share": 0.02})
    assert {name: bar["met"] for name, bar in base.items()} == {
        "step_ms": False,
        "idle_between_share": True,
    }
    many = bars({"batch": 64, "adapters": 64, "step_ms": 8.0, "added_ms": 1.7})
    assert many["added_ms"] == {"value": 1.7, "limit": 1.7, "met": True}
    assert bars({"batch": 16, "adapters": 0, "step_ms": 5.0}) == {}


@pytest.mark.late
def test_budgets_of_mixed_steps_are_swept(tiny, capsys, monkeypatch):
    import mixed

    asked = ["--budgets", "0,40", "--adapters", "2", "--streams", "2", "--prompt", "32"]
    asked += ["--seconds", "0.2", "--every", "0.05", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["mixed.py", "--model", str(tiny), *asked])
    mixed.main()
    lines = lines_of(capsys)
    assert [line["mixed_tokens"] for line in lines] == [64, 40]
    assert all(line["p99_over_median"] >= 1 for line in lines)


@pytest.mark.late
def test_engine_steps_are_timed(tiny, capsys):
    from engine_steps import main

    main(["--model", str(tiny), "--batch", "1,2", "--adapters", "0,2", "--tokens", "4"])
    assert [(line["batch"], line["adapters"]) for line in lines_of(capsys)] == [
        (1, 0),
        (2, 0),
        (2, 2),
    ]


def test_benchmarks_find_the_checkout_by_themselves():
    import checkout

    assert Path(checkout.ROOT) == Path(__file__).parents[3]
    assert str(checkout.ROOT) in sys.path


@pytest.mark.late
def test_steps_with_drafts_are_held_against_plain_ones(tiny, capsys, monkeypatch):
    import draft_steps

    monkeypatch.setattr(draft_steps.speculation, "ROWS", 64)  # what it lifts is put back
    monkeypatch.setattr(draft_steps.speculation, "WORTH", 0.25)
    few = ["--cases", "1:0,3:2", "--drafts", "0,2", "--prompt", "9", "--tokens", "12"]
    assert draft_steps.main(["--model", str(tiny), "--device", "cpu", *few]) == 0
    lines = lines_of(capsys)
    assert [(one["batch"], one["drafts"], one["rows"]) for one in lines] == [
        *((1, 0, 1), (1, 2, 3), (3, 0, 3), (3, 2, 9))
    ]
    assert all(one["step_ms"] > 0 for one in lines)
    for plain, one in zip(lines[::2], lines[1::2], strict=True):
        assert one["break_even"] == pytest.approx(one["step_ms"] / plain["step_ms"] - 1, abs=0.01)


def test_the_share_that_breaks_even_gives_the_drafts_that_do():
    from draft_steps import share_of

    assert share_of(0.5, 1) == 0.5 and share_of(1.0, 1) is None and share_of(-0.1, 4) == 0.0
    share = share_of(1.5, 4)
    assert sum(share**n for n in range(1, 5)) == pytest.approx(1.5, abs=0.01)
