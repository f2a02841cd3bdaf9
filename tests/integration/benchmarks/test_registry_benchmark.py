"""The registry's benchmark runs to its end on a handful of adapters, and what it filled is real."""

import json
import tempfile

import pytest


@pytest.mark.slow
def test_every_case_runs_and_a_filled_daemon_serves_what_it_was_filled_with(capsys):
    from registry import main

    with tempfile.TemporaryDirectory(prefix="lorad-") as folder:  # pytest's is long for a socket
        main(["--adapters", "40", "--dir", folder, "--pause", "0.5", "--rates", "20"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {}
    for line in lines:
        found.setdefault(line["case"], []).append(line)
    (start,) = found["start"]
    assert start["adapters"] == 40 and start["bars"]["start_s"]["limit"] == 10.0
    assert {page["total"] for page in found["page"]} == {40, 4}
    assert all(page["bars"]["page_ms"]["value"] > 0 for page in found["page"])
    (traffic,) = found["traffic"]
    assert traffic["answered"] == traffic["due"] > 5, traffic
    assert 1 < traffic["names"] <= traffic["due"] and not traffic["refusals"]
    assert traffic["page_max_ms"] > 0 and traffic["metrics_kib"] > 10
    (garbage,) = found["collection"]
    assert garbage["pieces"] == 0  # the daemon calls nothing stale that was filled in
    assert {change["what"] for change in found["change"]} == {"set", "load", "rm"}
    watched = [(line["mode"], line["what"], line["folders"]) for line in found["watcher"]]
    assert watched == [(m, w, 40) for m in ("inotify", "polling") for w in ("new", "known")]
