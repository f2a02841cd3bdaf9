"""Of several models each engine has its own series, and what is of the daemon stays one."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from msgspec import structs

from lorad.config_sections import Model
from lorad.metrics.metrics import Metrics
from lorad.metrics.table import GATEWAY, OF_ENGINES
from lorad.service.catalog import Entry
from lorad.service.meter import Meter
from lorad.service.pictures import together
from lorad.service.snapshot import Seen


class Two:
    """The world's model, and one that is called "vectors"."""

    def __init__(self, world):
        self.world, first = world, world.sources.models[0]
        self.pictures = {"tiny": SimpleNamespace(snapshot=None)}
        self.pictures["vectors"] = SimpleNamespace(snapshot=None)
        link = SimpleNamespace(state="loading_base", info=None, restarts=3, last_step_at=0.0)
        second = Model(base="/models/bert", name="vectors", dtype="float16")
        self.meter = Meter(models=("tiny", "vectors"))
        sources = dataclasses.replace(
            world.sources,
            models=(
                Seen(first.settings, first.link, self.pictures["tiny"]),
                Seen(second, link, self.pictures["vectors"]),
            ),
            meter=self.meter,
        )
        self.metrics = Metrics(sources, started=0.0)

    def take(self, model, snapshot):
        self.pictures[model].snapshot = snapshot
        every = [p.snapshot for p in self.pictures.values() if p.snapshot is not None]
        self.world.picture.snapshot = together(every)
        self.world.picture.by_rev = {s.rev: s for one in every for s in one.revisions}
        self.metrics.take_snapshot(snapshot, model)

    def lines(self):
        return asyncio.run(self.metrics.scrape(""))[0].decode().splitlines()

    def of(self, name):
        return [line for line in self.lines() if line.startswith((f"{name}{{", f"{name} "))]


@pytest.fixture
def two(world):
    return Two(world)


def test_what_is_of_one_engine_says_whose_it_is(two, told):
    two.take("tiny", told.snapshot(slots_used=5))
    two.take("vectors", told.snapshot(slots_used=2))
    assert two.of("lorad_slots_used") == [
        'lorad_slots_used{model="tiny"} 5.0',
        'lorad_slots_used{model="vectors"} 2.0',
    ]
    assert two.of("lorad_engine_restarts_total") == [
        'lorad_engine_restarts_total{model="tiny"} 0.0',
        'lorad_engine_restarts_total{model="vectors"} 3.0',
    ]
    assert 'lorad_engine_state{model="vectors",state="loading_base"} 1.0' in two.lines()
    assert 'lorad_base_model_info{dtype="float16",model="vectors"} 1.0' in two.lines()
    assert len(two.of("lorad_ready")) == 1


def test_adapters_and_bases_are_told_with_their_model(two, told):
    two.world.catalog.put(Entry("sql", "rev-sql", model="tiny"))
    two.world.catalog.put(Entry("topics", "rev-topics", model="vectors"))
    two.take("tiny", told.snapshot(told.status("sql", running=2)))
    base = structs.replace(told.snapshot().base, waiting=3)
    two.take("vectors", told.snapshot(told.status("topics"), base=base, waiting=3))
    for name, model in (("sql", "tiny"), (None, "vectors")):
        two.meter.pooled(
            "embeddings",
            name=name,
            model=model,
            tenant="",
            num_inputs=1,
            num_tokens=4,
            received=0.0,
        )
    assert sorted(two.of("lorad_prompt_tokens_total")) == [
        'lorad_prompt_tokens_total{adapter="__base__",model="tiny"} 0.0',
        'lorad_prompt_tokens_total{adapter="__base__",model="vectors"} 4.0',
        'lorad_prompt_tokens_total{adapter="sql",model="tiny"} 4.0',
    ]
    assert 'lorad_requests_running{adapter="sql",model="tiny"} 2.0' in two.lines()
    assert 'lorad_requests_waiting{adapter="__base__",model="vectors"} 3.0' in two.lines()
    assert 'lorad_requests_waiting{adapter="__base__",model="tiny"} 0.0' in two.lines()


def test_the_rest_of_each_models_adapters_are_told_apart(two, told):
    """An alert asks whether anybody runs on the engine that makes no step."""
    two.world.catalog.put(Entry("sql", "rev-sql", model="tiny"))
    two.world.catalog.put(Entry("topics", "rev-topics", model="vectors"))
    two.metrics._adapters._labelled._limit = 0
    base = structs.replace(told.snapshot().base, running=1)
    two.take("tiny", told.snapshot(told.status("sql", running=2), base=base, running=4))
    two.take("vectors", told.snapshot(told.status("topics", running=5), running=5))
    assert sorted(two.of("lorad_requests_running")) == [
        'lorad_requests_running{adapter="__base__",model="tiny"} 1.0',
        'lorad_requests_running{adapter="__base__",model="vectors"} 0.0',
        'lorad_requests_running{adapter="__other__",model="tiny"} 3.0',
        'lorad_requests_running{adapter="__other__",model="vectors"} 5.0',
    ]


def test_what_the_rest_of_each_models_adapters_count_is_told_apart(two, told):
    """And what an adapter counted without a label stays there when it gets one."""
    for name, model in (("sql", "tiny"), ("bash", "tiny"), ("topics", "vectors")):
        two.world.catalog.put(Entry(name, f"rev-{name}", model=model))
    two.take("tiny", told.snapshot(told.status("sql"), told.status("bash")))
    two.take("vectors", told.snapshot(told.status("topics")))
    labelled = two.metrics._adapters._labelled

    def count(name, tokens):
        asked = {"tenant": "", "num_inputs": 1, "num_tokens": tokens, "received": 0.0}
        model = two.world.catalog.get(name).model
        two.meter.pooled("embeddings", name=name, model=model, **asked)

    labelled._limit = 0
    for name, tokens in (("sql", 4), ("bash", 2), ("topics", 7)):
        count(name, tokens)
    rest = [
        'lorad_prompt_tokens_total{adapter="__other__",model="tiny"} 6.0',
        'lorad_prompt_tokens_total{adapter="__other__",model="vectors"} 7.0',
    ]

    def shown():
        return [line for line in two.of("lorad_prompt_tokens_total") if "__base__" not in line]

    assert sorted(shown()) == rest
    labelled._limit = 3
    count("topics", 1)
    assert sorted(shown()) == [
        *rest,
        'lorad_prompt_tokens_total{adapter="topics",model="vectors"} 1.0',
    ]


def test_requests_of_each_model_are_timed_apart(two):
    for model, times in (("tiny", 1), ("vectors", 2)):
        for _ in range(times):
            two.meter.pooled(
                "score",
                name=None,
                model=model,
                tenant="",
                num_inputs=1,
                num_tokens=1,
                received=0.0,
            )
    assert [
        line for line in two.of("lorad_request_duration_seconds_count") if '"score"' in line
    ] == [
        'lorad_request_duration_seconds_count{endpoint="score",kind="base",model="tiny"} 1.0',
        'lorad_request_duration_seconds_count{endpoint="score",kind="base",model="vectors"} 2.0',
    ]


def test_gateways_find_one_series_of_all_models(two, told):
    two.world.catalog.put(Entry("sql", "rev-sql", model="tiny"))
    two.world.catalog.put(Entry("topics", "rev-topics", model="vectors"))
    two.take("tiny", told.snapshot(told.status("sql")))
    two.take("vectors", told.snapshot(told.status("topics")))
    (line,) = two.of(GATEWAY)
    assert 'running_lora_adapters="sql,topics"' in line and 'max_lora="16"' in line
    assert "model=" not in line


def test_an_engine_that_is_replaced_lets_no_counter_of_either_fall(two, told):
    two.take("tiny", told.snapshot(pid=1, preemptions=5))
    two.take("vectors", told.snapshot(pid=2, preemptions=7))
    two.take("vectors", told.snapshot(pid=3, preemptions=1))
    assert two.of("lorad_preemptions_total") == [
        'lorad_preemptions_total{model="tiny"} 5.0',
        'lorad_preemptions_total{model="vectors"} 8.0',
    ]


def test_one_model_alone_has_no_label_for_it(world, told):
    world.take(told.snapshot())
    text = world.text()
    for name in OF_ENGINES:
        assert f"{name}{{model=" not in text
    assert 'adapter="__base__",model=' not in text
