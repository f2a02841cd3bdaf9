"""A campaign runs what it was given in order, and nothing in it can keep the rest from running."""

import json
import time
from pathlib import Path

import campaign
import pytest
from campaign import PLAN, Measurement, missed, run


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """measure({name: (script, seconds)}, within): what was told, and the folder of the results."""

    def go(scripts: dict[str, tuple[str, float]], within: float = 600.0):
        plan = []
        for name, (text, seconds) in scripts.items():
            (tmp_path / f"{name}.py").write_text(text)
            plan.append(Measurement(name, (f"{name}.py", "MODEL"), seconds))
        monkeypatch.setattr(campaign, "HERE", tmp_path)
        ends = time.monotonic() + within
        return list(run(plan, tmp_path / "model", tmp_path, ends)), plan, tmp_path

    return go


def test_one_that_fails_and_one_that_hangs_keep_nobody_from_the_card(measure) -> None:
    told, _, out = measure(
        {
            "breaks": ("raise SystemExit('no card')", 60),
            "hangs": ("import time\nprint('{}', flush=True)\ntime.sleep(600)", 3),
            "works": ('import sys\nprint(\'{"model": "%s"}\' % sys.argv[1])', 60),
        }
    )
    assert [(one["name"], bool(one["status"]), one["results"]) for one in told] == [
        ("breaks", True, 0),
        ("hangs", True, 1),
        ("works", False, 1),
    ]
    assert "timed_out" in told[1] and "timed_out" not in told[2]
    assert "no card" in (out / "breaks.log").read_text()
    assert "line 3" in (out / "hangs.log").read_text(), "it says where"
    assert json.loads((out / "works.jsonl").read_text())["model"].endswith("/model")


def test_what_no_longer_fits_is_left_out_and_told(measure) -> None:
    told, _, out = measure({"long": ("", 600), "short": ("", 20)}, within=60)
    assert told[0] == {"name": "long", "left_out": True}
    assert told[1]["status"] == 0
    assert not (out / "long.jsonl").exists()


def test_bars_that_were_not_met_are_told_with_their_figures(measure) -> None:
    line = {"case": "b64", "bars": {"a": {"value": 2, "limit": 1, "met": False}}}
    line["bars"]["b"] = {"value": 1, "limit": 2, "met": True}
    _, plan, out = measure({"one": (f"print('''{json.dumps(line)}''')\nprint('{{half')", 60)})
    assert list(missed(plan[0], out)) == ["one b64: a 2 of 1"]


def test_every_measurement_of_the_plan_is_a_benchmark_of_this_folder() -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    assert all((folder / one.words[0]).is_file() for one in PLAN)
    assert len({one.name for one in PLAN}) == len(PLAN)
