"""`loractl metrics`: whole, filtered, and for programs."""

import json

import pytest

TEXT = """# HELP lorad_slots Slots.
# TYPE lorad_slots gauge
lorad_slots 8.0
# HELP lorad_adapter_info The revision.
# TYPE lorad_adapter_info gauge
lorad_adapter_info{adapter="acme/sql",rev="ab"} 1.0
lorad_adapter_info{adapter="x \\"y\\" \x1b]0;z",rev="cd"} 1.0
# HELP lorad_odd Odd.
# TYPE lorad_odd gauge
lorad_odd NaN
"""


@pytest.fixture
def told(server):
    api = server.api
    before, api.metrics.text = api.metrics.text, TEXT
    yield server
    api.metrics.text = before


def test_all_are_printed_and_nothing_drives_the_terminal(told, loractl):
    done = loractl("metrics")
    assert done.exit == 0
    assert done.out == TEXT.replace("\x1b", "?")


def test_a_filter_keeps_series_with_their_heads(told, loractl):
    assert loractl("metrics", "--filter", "acme/").out.splitlines() == [
        "# HELP lorad_adapter_info The revision.",
        "# TYPE lorad_adapter_info gauge",
        'lorad_adapter_info{adapter="acme/sql",rev="ab"} 1.0',
    ]
    assert loractl("metrics", "--filter", "^lorad_slots$").out.splitlines()[-1] == "lorad_slots 8.0"
    none = loractl("metrics", "--filter", "nothing")
    said = "no series has 'nothing' in its name or labels\n"
    assert (none.exit, none.out, none.err) == (0, "", said)


def test_programs_get_each_sample_with_its_labels(told, loractl):
    document = json.loads(loractl("metrics", "--json").out)
    assert document["schema"] == "lorad/metrics.v1"
    slots, sql, hostile, odd = document["items"]
    assert slots == {"name": "lorad_slots", "labels": {}, "value": 8}
    assert sql["labels"] == {"adapter": "acme/sql", "rev": "ab"}
    assert hostile["labels"]["adapter"] == 'x "y" \x1b]0;z'
    assert odd["value"] == "nan"


def test_a_filter_that_is_no_expression_is_usage(told, loractl):
    done = loractl("metrics", "--filter", "a(")
    assert done.exit == 2
    assert "--filter" in done.err
