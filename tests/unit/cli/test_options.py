"""Global options before and after the command, output forms, durations."""

import pytest

from lorad.cli.options import asks_json, hoist, output_format, seconds


@pytest.mark.parametrize(
    ("argv", "front", "rest"),
    [
        (["ls", "--json"], ["--json"], ["ls"]),
        (["-q", "ls"], ["-q"], ["ls"]),
        (["ls", "-o", "json", "--state", "idle"], ["-o", "json"], ["ls", "--state", "idle"]),
        (["ls", "--output=json"], ["--output=json"], ["ls"]),
        (["ls", "-ojson"], ["-ojson"], ["ls"]),
        (["rm", "a", "-qy"], ["-qy"], ["rm", "a"]),
        (["ls", "-Hunix:///x"], ["-Hunix:///x"], ["ls"]),
        (["load", "a", "--timeout", "5s"], ["--timeout", "5s"], ["load", "a"]),
        (["ls", "-V"], ["-V"], ["ls"]),
        (["ls", "-o"], ["-o"], ["ls"]),
        (["events", "-f", "-h"], [], ["events", "-f", "-h"]),
    ],
)
def test_global_options_are_found_wherever_they_stand(argv, front, rest):
    assert hoist(argv) == (front, rest)


def test_what_follows_two_dashes_is_never_an_option():
    assert hoist(["run", "a", "--", "--json"]) == ([], ["run", "a", "--", "--json"])


def test_the_value_of_a_commands_option_is_left_alone_whatever_it_looks_like():
    argv = ["run", "a", "--system", "-y", "hi"]
    assert hoist(argv, {"--system"}) == ([], argv)


@pytest.mark.parametrize(
    ("front", "env", "wanted"),
    [
        (["--json"], {}, True),
        (["-o", "jsonl"], {}, True),
        (["-ojson"], {}, True),
        (["--output=json"], {}, True),
        (["-o", "json", "-o", "table"], {}, False),
        (["-o"], {}, False),
        (["-o", "wide"], {"LORAD_OUTPUT": "json"}, False),
        ([], {"LORAD_OUTPUT": "json"}, True),
        ([], {}, False),
    ],
)
def test_errors_are_json_when_results_would_be(front, env, wanted):
    assert asks_json(front, env) is wanted


def test_the_output_form_comes_from_the_flag_the_option_or_the_environment(monkeypatch):
    monkeypatch.delenv("LORAD_OUTPUT", raising=False)
    assert output_format(None, False) == "table"
    assert output_format("wide", False) == "wide"
    assert output_format("wide", True) == "json"
    monkeypatch.setenv("LORAD_OUTPUT", "name")
    assert output_format(None, False) == "name"
    with pytest.raises(ValueError, match="choose one of table, wide, json, jsonl, name"):
        output_format("yaml", False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("30", 30), ("30s", 30), ("1.5m", 90), ("2h", 7200), ("250ms", 0.25), ("1d", 86400), ("0", 0)],
)
def test_durations(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "-1", "1 s", "1e3", "nan", "inf", "1y", "٣s", "9" * 30])
def test_what_is_no_duration_says_what_to_write(text):
    with pytest.raises(ValueError, match="is not a duration; write 30s, 2m or 1h"):
        seconds(text)
