"""The dashboard and the alert rules name nothing that /metrics lacks."""

import json
import re
from pathlib import Path

import promql_parser
import pytest

from lorad.metrics.table import NAMES, OF_ENGINES

CONTRIB = Path(__file__).parents[3] / "docs/contrib"
DASHBOARD = json.loads((CONTRIB / "grafana/lorad.json").read_text(encoding="utf-8"))
ALERTS = (CONTRIB / "prometheus/alerts.yml").read_text(encoding="utf-8")
#: What the issue of operators asks for, and what was added to it.
WANTED = {
    *("Down", "EngineStalled", "QueueHigh", "SlotThrash", "AllSlotsPinned", "DrainStuck"),
    *("RegistryErrors", "Quarantined", "DiskLow"),
}
#: A metric, what is selected of it, and the labels that a function groups by behind it.
SELECTOR = re.compile(r"\b(lorad_\w+)(?:\{([^}]*)\})?")
#: What Grafana puts in, and Prometheus never sees.
GRAFANAS = {"$__rate_interval": "1m", "$__range": "1h", "$instance": "i", "$adapter": "a"}
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def panels():
    return [p for p in DASHBOARD["panels"] if p["type"] != "row"]


def expressions():
    """(where, PromQL) of both files."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']!r}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["definition"]
    for name, expression in rules().items():
        yield f"alert {name}", expression


def rules():
    """Alert -> its expression.  The file is YAML of one shape, so no parser for all of it."""
    found = re.findall(r"- alert: (\w+)\n((?: {8}.*\n)+)", ALERTS)
    out = {}
    for name, body in found:
        (folded,) = re.findall(r" {8}expr: (?:>-\n)?((?:.*\n)(?: {10}.*\n)*)", body)
        out[name] = " ".join(folded.split())
    return out


def metric_of(series):
    for suffix in ("", "_bucket", "_sum", "_count"):
        metric = NAMES.get(series.removesuffix(suffix)) if series.endswith(suffix) else None
        if metric is not None and (not suffix or metric.type == "histogram"):
            return metric
    return None


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_and_label_that_is_named_exists(where, expression):
    labels = {"le", "instance", "job"}
    for series, selected in SELECTOR.findall(expression):
        metric = metric_of(series)
        assert metric is not None, f"{where} names {series}, which /metrics lacks"
        assert (metric.type == "histogram") == (series != metric.name), f"{where}: {series}"
        labels |= set(metric.labels)
        # It is there where several models are; without it a group is as if it were not named.
        labels |= {"model"} if metric.name in OF_ENGINES or "adapter" in metric.labels else set()
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected))
        assert used <= {*metric.labels, "le", "instance"}, f"{where}: {series} has no {used}"
    for group in GROUPED.findall(expression):
        assert {label.strip() for label in group.split(",")} <= labels, where


def test_an_engine_that_idles_is_not_taken_for_stalled_while_another_runs():
    stalled = rules()["LoradEngineStalled"]
    assert "and on (instance, model) sum by (instance, model) (lorad_requests_running)" in stalled
    # Nor a replica that idles while another one runs.
    assert "max by (instance, model) (lorad_engine_last_step_timestamp_seconds) > 30" in stalled


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_counters_are_only_asked_for_how_fast_they_grow(where, expression):
    for series, _ in SELECTOR.findall(expression):
        metric = metric_of(series)
        if metric.type != "gauge" and not where.startswith("variable"):
            assert re.search(rf"(?:rate|increase)\({series}", expression), f"{where}: {series}"


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_expression_is_promql(where, expression):
    if where.startswith("variable"):  # Grafana's own function, of a selector and a label
        expression = re.fullmatch(r"label_values\((.+), \w+\)", expression)[1]
    for variable, text in GRAFANAS.items():
        expression = expression.replace(variable, text)
    assert "$" not in expression, where
    promql_parser.parse(expression)


@pytest.mark.parametrize("wrong", ["sum(rate(a[5m])", "rate(a)", "a by (b)", "a > > 1"])
def test_what_is_no_promql_is_noticed(wrong):
    with pytest.raises(ValueError):
        promql_parser.parse(wrong)


def test_every_alert_that_operators_expect_is_there():
    names = {name.removeprefix("Lorad") for name in rules()}
    assert names >= WANTED
    assert ALERTS.count("- alert:") == len(rules())
    for part in ("summary:", "description:", "severity:"):
        assert ALERTS.count(part) == len(rules())


def test_the_dashboard_picks_data_source_instance_and_adapter():
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["adapter"]["definition"].startswith("label_values(")
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
    rows = [p["title"] for p in DASHBOARD["panels"] if p["type"] == "row"]
    assert rows == [
        *("Traffic", "Latency", "Adapters and churn", "Loads", "Steps", "Pool"),
        *("Prefix cache", "Health"),
    ]


def test_no_two_panels_lie_on_each_other():
    taken = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24 and (x, y) not in taken, (panel["title"], taken.get((x, y)))
                taken[x, y] = panel["title"]
    ids = [p["id"] for p in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_a_name_that_is_wrong_is_noticed():
    assert metric_of("lorad_requests_running_total") is None
    assert metric_of("lorad_slots_bucket") is None
    assert metric_of("lorad_step_seconds_bucket").name == "lorad_step_seconds"
