"""Of a model with several engines each has its own series, and adapters stay one."""

import asyncio
import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest

from lorad.metrics.metrics import Metrics
from lorad.metrics.table import GATEWAY, OF_REPLICAS
from lorad.service.pictures import Pictures
from lorad.service.snapshot import Seen


class Double:
    """The world's one model on two engines."""

    def __init__(self, world):
        self.world, first = world, world.sources.models[0]
        self.each = {name: SimpleNamespace(snapshot=None, by_rev={}) for name in ("0", "1")}
        self.picture = Pictures(self.each, replicas=True)
        self.routed = {"0": Counter(home=3), "1": Counter(base=1)}
        replicas = tuple(
            Seen(first.settings, first.link, one, replica=name, routed=self.routed[name])
            for name, one in self.each.items()
        )
        sources = dataclasses.replace(
            world.sources,
            models=(Seen(first.settings, first.link, self.picture, replicas),),
            picture=Pictures({"tiny": self.picture}),
        )
        self.metrics = Metrics(sources, started=0.0)

    def take(self, name, snapshot):
        one = self.each[name]
        one.snapshot, one.by_rev = snapshot, {s.rev: s for s in snapshot.revisions}
        self.metrics.take_snapshot(snapshot, "tiny", name)

    def lines(self):
        return asyncio.run(self.metrics.scrape(""))[0].decode().splitlines()

    def of(self, name):
        return [line for line in self.lines() if line.startswith((f"{name}{{", f"{name} "))]


@pytest.fixture
def double(world, told):
    double = Double(world)
    world.add("sql", "chat", model="tiny")
    double.take("0", told.snapshot(told.status("sql", running=2), pid=1, slots_used=1))
    double.take("1", told.snapshot(told.status("sql"), told.status("chat"), pid=2, slots_used=2))
    yield double
    double.metrics.close()


def test_what_is_of_one_engine_says_which(double):
    assert double.of("lorad_slots_used") == [
        'lorad_slots_used{replica="0"} 1.0',
        'lorad_slots_used{replica="1"} 2.0',
    ]
    lines = double.lines()
    for name in OF_REPLICAS - {"lorad_routed_requests_total"}:
        assert any(line.startswith(name) and 'replica="1"' in line for line in lines), name
    assert len(double.of("lorad_base_model_info")) == 1


def test_an_adapter_is_one_series_however_many_engines_hold_it(double):
    assert double.of("lorad_requests_running") == [
        'lorad_requests_running{adapter="__base__"} 0.0',
        'lorad_requests_running{adapter="__other__"} 0.0',
        'lorad_requests_running{adapter="chat"} 0.0',
        'lorad_requests_running{adapter="sql"} 2.0',
    ]
    assert double.of("lorad_adapter_replicas") == [
        'lorad_adapter_replicas{adapter="chat"} 1.0',
        'lorad_adapter_replicas{adapter="sql"} 2.0',
    ]
    assert not [line for line in double.lines() if "adapter=" in line and "replica=" in line]


def test_why_each_engine_was_chosen_is_counted(double):
    found = double.of("lorad_routed_requests_total")
    assert 'lorad_routed_requests_total{reason="home",replica="0"} 3.0' in found
    assert 'lorad_routed_requests_total{reason="base",replica="1"} 1.0' in found
    assert len(found) == 2 * 5  # every reason of every replica: no series comes out of nothing


def test_a_gateway_finds_one_series_of_the_whole_model(double):
    (line,) = double.of(GATEWAY)
    assert 'running_lora_adapters="chat,sql"' in line and 'max_lora="16"' in line
    assert double.of("vllm:num_requests_running") == ["vllm:num_requests_running 2.0"]


def test_a_replica_that_is_replaced_lets_no_counter_fall(double, told):
    double.take("1", told.snapshot(pid=2, preemptions=5))
    double.take("1", told.snapshot(pid=3, preemptions=1))
    assert double.of("lorad_preemptions_total") == [
        'lorad_preemptions_total{replica="0"} 0.0',
        'lorad_preemptions_total{replica="1"} 6.0',
    ]
