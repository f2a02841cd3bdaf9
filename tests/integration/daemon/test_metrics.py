"""/metrics of a real daemon: every name of the table, with values that traffic explains."""

import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse

from lorad.metrics.metric import BY_BLOCKS
from lorad.metrics.table import GATEWAY, METRICS, NAMES


@pytest.fixture
def daemon(make_daemon):
    """One that is not started."""
    made = make_daemon()
    yield made
    made.stop()


def scrape(daemon):
    """Family -> {labels -> value}, as (name, sorted labels)."""
    with daemon.client() as client:
        return series(parse(client.metrics()))


def series(families):
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(found, name, **labels):
    return found.get((f"lorad_{name}", tuple(sorted(labels.items()))), 0.0)


def of(found, name, **labels):
    """Every value of a metric whose labels hold these."""
    wanted = set(labels.items())
    return {
        tuple(v for _, v in key): value
        for (n, key), value in found.items()
        if n == f"lorad_{name}" and wanted <= set(key)
    }


@pytest.fixture(scope="module")
def served(make_daemon):
    """A daemon after traffic: base and adapters, a refusal, a load and an evict."""
    daemon = make_daemon().start()
    with daemon.client() as client:
        daemon.untouched = client.status()
    for name, seed in (("sql", 1), ("acme/chat", 2)):
        daemon.upload(name, seed, pin=name == "sql")
    for model in ("tiny", "sql", "sql", "acme/chat"):
        assert daemon.ask(model, 6).status_code == 200
    assert daemon.ask("nobody").status_code == 404
    with daemon.client() as client:
        assert client.evict("acme/chat").items[0].ok
        assert client.load("acme/chat").items[0].ok
    return daemon


def test_the_first_forward_pass_is_nobodys_question_to_the_prefix_cache(served):
    assert served.untouched.forward_passes >= 1
    assert served.untouched.prefix.query_tokens == 0


def test_every_name_of_the_table_is_there_with_its_type(served):
    with served.client() as client:
        families = {f.name: f for f in parse(client.metrics())}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.type, metric.name
        assert family.documentation == metric.help
    ours = {f for f in families if not f.startswith("process_")}
    assert ours == {name.removesuffix("_total") for name in NAMES}


#: What a CPU without a driver, a quiet client and a sound disk give no value for.
ABSENT = {
    *("lorad_gpu_memory_used_bytes", "lorad_gpu_memory_total_bytes", "lorad_gpu_utilization_ratio"),
    *("lorad_adapters_quarantined", "lorad_adapter_thrash_total"),
    # Only with metrics.tenant_label.
    *("lorad_tenant_requests_total", "lorad_tenant_prompt_tokens_total"),
    "lorad_tenant_generation_tokens_total",
    # Only with models.speculation.
    *("lorad_speculation_draft_tokens_total", "lorad_speculation_accepted_tokens_total"),
    # Only with models.replicas.
    *("lorad_routed_requests_total", "lorad_adapter_replicas"),
}


def test_every_name_but_a_few_has_a_value_after_traffic(served):
    names = {name for name, _ in scrape(served)}
    for metric in METRICS:
        shown = f"{metric.name}_bucket" if metric.type == "histogram" else metric.name
        if metric.name not in ABSENT:
            assert shown in names, metric.name


def test_labels_are_those_of_the_table(served):
    for name, labels in scrape(served):
        base = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        metric = NAMES.get(name) or NAMES.get(base)
        if metric is not None:
            assert {label for label, _ in labels} - {"le"} == set(metric.labels), name


def test_requests_and_their_tokens_are_counted_by_adapter(served):
    found = scrape(served)
    assert value(found, "requests_total", adapter="sql", finish_reason="length") == 2
    assert value(found, "requests_total", adapter="__base__", finish_reason="length") == 1
    assert value(found, "generation_tokens_total", adapter="sql") == 12
    assert value(found, "prompt_tokens_total", adapter="sql") > 2 * 40
    assert value(found, "request_rejections_total", code="model_not_found") == 1
    assert value(found, "time_to_first_token_seconds_count", kind="lora") == 3
    assert value(found, "inter_token_latency_seconds_count", kind="lora") == 3 * 5
    labels = {"kind": "lora", "endpoint": "completions"}
    assert value(found, "request_duration_seconds_count", **labels) == 3
    labels = {"route": "/v1/completions", "method": "POST"}
    assert value(found, "http_requests_total", **labels, code="200") == 4
    assert value(found, "http_requests_total", **labels, code="404") == 1


def test_queue_prefill_and_decode_add_up_to_the_duration(served):
    found = scrape(served)
    parts = ("request_queue_seconds", "request_prefill_seconds", "request_decode_seconds")
    whole = sum(of(found, "request_duration_seconds_sum", kind="lora").values())
    pieces = sum(value(found, f"{part}_sum", kind="lora") for part in parts)
    assert pieces == pytest.approx(whole, abs=0.05)
    first = value(found, "time_to_first_token_seconds_sum", kind="lora")
    assert sum(value(found, f"{p}_sum", kind="lora") for p in parts[:2]) == pytest.approx(first)


def test_adapters_are_shown_where_they_are(served):
    found = scrape(served)
    for name, pinned in (("sql", 1.0), ("acme/chat", 0.0)):
        assert value(found, "adapter_resident", adapter=name, tier="gpu") == 1.0
        assert value(found, "adapter_pinned", adapter=name) == pinned
        assert value(found, "adapter_rank", adapter=name) == 4
        (rev,) = [key for key in of(found, "adapter_info", adapter=name)]
        assert served.adapter(name).rev in rev
    assert value(found, "slots_used") == 2
    assert value(found, "slots_pinned") == 1
    assert sum(of(found, "adapters").values()) == 2
    pool = of(found, "pool_blocks")
    with served.client() as client:
        assert sum(pool.values()) == client.status().pool.total


def test_loads_and_evictions_are_counted_with_their_cause(served):
    found = scrape(served)
    assert value(found, "adapter_loads_total", adapter="acme/chat", source="disk") == 1
    assert value(found, "adapter_loads_total", adapter="acme/chat", source="ram") == 1
    assert value(found, "adapter_evictions_total", adapter="acme/chat", reason="manual") == 1
    assert value(found, "adapter_load_seconds_count", source="ram") == 1
    assert value(found, "adapter_load_bytes_total") > 0


def test_the_prefix_cache_is_counted_by_adapter(served):
    found = scrape(served)
    asked = value(found, "prefix_cache_query_tokens_total", adapter="sql")
    hit = value(found, "prefix_cache_hit_tokens_total", adapter="sql")
    assert 0 < hit < asked
    assert sum(of(found, "prefix_reuse_distance_tokens_count").values()) > 0
    assert NAMES["lorad_prefix_reuse_distance_tokens"].bounds == BY_BLOCKS


def test_the_gateways_series_is_one_and_lists_who_is_resident(served):
    found = [(dict(labels), v) for (name, labels), v in scrape(served).items() if name == GATEWAY]
    ((labels, at),) = found
    assert labels["running_lora_adapters"] == "acme/chat,sql"
    assert labels["waiting_lora_adapters"] == ""
    assert labels["max_lora"] == "8"
    assert at == pytest.approx(value(scrape(served), "start_time_seconds"), abs=3600)


def test_openmetrics_is_given_to_who_asks_for_it(served):
    transport = httpx.HTTPTransport(uds=str(served.admin), verify=False)
    with httpx.Client(transport=transport, base_url="http://lorad") as http:
        answer = http.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")
        families = {f.name for f in parse_openmetrics(answer.text)}
        assert {name.removesuffix("_total") for name in NAMES} <= families
        plain = http.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_metrics_are_not_on_the_inference_socket(served):
    with served.http() as http:
        assert http.get("/metrics").status_code == 404


def test_counters_go_on_when_the_engine_is_replaced(served, poll):
    before = scrape(served)
    with served.client() as client:
        pid = client.status().engine_pid
        os.kill(pid, signal.SIGKILL)
        poll(lambda: client.status().engine_pid != pid, "another engine")
    served.wait_ready()
    served.wait_state("sql", "idle")
    assert served.ask("sql", 6).status_code == 200
    after = poll(
        lambda: (
            found
            if value(found := scrape(served), "step_seconds_count", kind="lora")
            > value(before, "step_seconds_count", kind="lora")
            else None
        ),
        "the new engine's steps",
    )
    grown = [name for name in NAMES if NAMES[name].type == "counter"]
    fallen = [
        (key, old, after.get(key))
        for key, old in before.items()
        if key[0] in grown and after.get(key, 0.0) < old
    ]
    assert not fallen
    assert value(after, "engine_restarts_total") == 1
    asked = [value(f, "prefix_cache_query_tokens_total", adapter="sql") for f in (before, after)]
    assert asked[1] > asked[0]


def test_the_series_of_a_removed_adapter_go_away(served):
    with served.client() as client:
        client.remove("acme/chat")
    assert not [key for key in scrape(served) if ("adapter", "acme/chat") in key[1]]


def test_over_tcp_only_the_metrics_are_there_and_not_for_web_pages(daemon, poll):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    daemon.configure(f'[metrics]\ntcp = "127.0.0.1:{port}"\n')
    daemon.start(ready=False)
    url = f"http://127.0.0.1:{port}"
    poll(lambda: daemon.admin.exists(), "the sockets")
    with httpx.Client(base_url=url, trust_env=False) as http:
        answer = poll(lambda: _try(http), "an answer over TCP")
        assert "lorad_ready 0.0" in answer.text
        assert http.get("/admin/v1/status").status_code == 404
        assert http.get("/v1/models").status_code == 404
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            assert http.get("/metrics", headers=headers).status_code == 403
        found = series(parse(http.get("/metrics").text))
        assert value(found, "auth_failures_total", listener="metrics") == 2


def _try(http):
    try:
        answer = http.get("/metrics")
    except httpx.TransportError:
        return None
    return answer if answer.status_code == 200 else None


def test_an_address_that_others_reach_has_to_be_wanted(daemon):
    daemon.configure('[metrics]\ntcp = "0.0.0.0:9411"\n')
    status, said = daemon.refused("--check")
    assert status == 2
    assert "metrics.tcp" in said and "beyond_loopback" in said


def test_loractl_prints_them_whole_or_in_part(served):
    def loractl(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "lorad.cli.app", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "LORAD_HOST": f"unix://{served.admin}"},
            timeout=60,
        )
        return done.returncode, done.stdout

    status, text = loractl("metrics", "--filter", "slots_used|resident.*sql")
    assert status == 0
    assert [line for line in text.splitlines() if line.startswith("lorad_")] == [
        'lorad_adapter_resident{adapter="sql",tier="gpu"} 1.0',
        'lorad_adapter_resident{adapter="sql",tier="ram"} 1.0',
        "lorad_slots_used 1.0",
    ]
    assert text.count("# HELP") == text.count("# TYPE") == 2
