"""Several [[models]]: each checked by itself, all of them together, each value with its origin."""

import json
import re
from types import SimpleNamespace

import pytest

from lorad import checks
from lorad.checks import described
from lorad.config_sources import dump, load
from lorad.errors import BadConfig
from tests.fakes.tiny_bert import write_bert


@pytest.fixture
def bases(tmp_path):
    made = {}
    for name in ("a", "b"):
        folder = made[name] = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    made["bert"] = write_bert(tmp_path / "bert")
    return made


@pytest.fixture
def configure(tmp_path, bases):
    """configure("a", "b", ..., env): the settings of a lorad.toml with an entry for each; what
    stands behind a base's name are lines of its entry."""

    def configure(*entries, rest="", env=None):
        lines = []
        for entry in entries:
            name, _, more = entry.partition(" ")
            lines += ["[[models]]", f'base = "{bases[name]}"', *filter(None, more.split("; "))]
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc" / "lorad.toml").write_text("\n".join([*lines, rest]))
        kinds = ("STATE", "RUNTIME", "CACHE")
        places = {f"{kind}_DIRECTORY": str(tmp_path / kind.lower()) for kind in kinds}
        places["CONFIGURATION_DIRECTORY"] = str(tmp_path / "etc")
        return load(None, {**places, **(env or {})})[0]

    return configure


CPU = ' device = "cpu"'


def test_each_model_has_a_name_a_purpose_and_origins_of_its_own(configure, bases):
    settings = configure(f"a{CPU}; threads = 2", f"bert{CPU}; truncate = true")
    assert [(m.name, m.tasks) for m in settings.models] == [
        ("a", ("generate",)),
        ("bert", ("embed",)),
    ]
    assert settings.origins["models.threads"].endswith("lorad.toml:4")
    assert settings.origins["models.1.truncate"].endswith("lorad.toml:8")
    assert "models.truncate" not in settings.origins
    assert settings.process_config(0).model == str(bases["a"])
    assert settings.process_config(1).truncate
    told = dump(settings)
    assert told.count("[[models]]") == 2
    assert [line for line in told.splitlines() if line.startswith("truncate = true")]


def test_a_check_says_of_several_what_each_is_for(configure, bases):
    assert described(configure(f"a{CPU}", f"bert{CPU}")) == (
        f"a: generate, {bases['a']}",
        f"bert: embed, {bases['bert']}",
    )
    assert described(configure(f"a{CPU}")) == ()


def test_variables_change_a_model_by_its_place_and_add_one_behind_the_last(configure, bases):
    env = {
        "LORAD_MODELS__1__NAME": "second",
        "LORAD_MODELS__THREADS": "3",
        "LORAD_MODELS__2__BASE": str(bases["bert"]),
    }
    settings = configure(f"a{CPU}", f"b{CPU}", env=env)
    assert [m.name for m in settings.models] == ["a", "second", "bert"]
    assert settings.models[0].threads == 3
    assert settings.origins["models.1.name"] == "LORAD_MODELS__1__NAME"
    with pytest.raises(BadConfig, match=r"LORAD_MODELS__7__NAME: .*none may be left out"):
        configure("a", env={"LORAD_MODELS__7__NAME": "x"})


@pytest.mark.parametrize(
    ("entries", "rest", "message"),
    [
        (("a", 'b name = "a"'), "", r"models\.1\.name: two models are called a \(.*:5\)"),
        (("a replicas = 0",), "", r"models\.replicas: 1 to 64: engines of this model \(.*:3\)"),
        (("a", "b replicas = 65"), "", r"models\.1\.replicas: 1 to 64"),
        ((f"a{CPU}", "b threads = -1"), "", r"models\.1\.threads.*lorad\.toml:6"),
        ((f"a{CPU}", 'b tasks = ["sing"]'), "", r"models\.1\.tasks: 'sing' is none of"),
        ((f"a{CPU}", "bert cpu_pool = 1024"), "", r"models\.1\.cpu_pool: only a model that gen"),
        ((f"a{CPU}; truncate = true", "bert"), "", r"models\.truncate: only a model that pools"),
        ((f"a{CPU}", f"b{CPU}"), "[lora]\nadapter_pool = 1024", r"lora\.adapter_pool: only a mod"),
        (("a nane = 1", "b"), "", r"lorad\.toml:3: unknown key models\.nane"),
        (("a", "b nane = 1"), "", r"lorad\.toml:5: unknown key models\.nane"),
    ],
)
def test_what_is_wrong_is_told_by_the_model_that_has_it(configure, entries, rest, message):
    with pytest.raises(BadConfig) as refused:
        configure(*entries, rest=rest)
    assert re.search(message, refused.value.message), refused.value.message


@pytest.fixture
def together(monkeypatch):
    """together(settings, card=...): whether a start takes all of them on a machine with a card, or
    without one, and of so much memory."""

    def look(settings, *, card, memory=64 << 30):
        monkeypatch.setattr(checks, "has_card", lambda: card)
        told = SimpleNamespace(total=memory)
        monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: told)
        checks._check_together(settings)

    return look


def test_shares_of_one_gpu_may_be_all_of_it_together(configure, together):
    share = "gpu_memory_utilization"
    settings = configure(f"a {share} = 0.6", f"b {share} = 0.4", "bert")
    assert len(settings.models) == 3
    together(settings, card=True)
    # What is on the CPU, and what pools, has no share.
    together(configure("a", f"b{CPU}", "bert"), card=True)


def test_shares_are_more_than_a_card_only_where_there_is_one(configure, together):
    settings = configure("a", "b")
    with pytest.raises(BadConfig) as refused:
        together(settings, card=True)
    message = r"models\.gpu_memory_utilization: 0\.9 \+ 0\.9 = 1\.8 of one GPU"
    assert re.search(message, refused.value.message), refused.value.message
    together(settings, card=False)
    with pytest.raises(BadConfig):  # which has to be there then
        together(configure('a device = "cuda"', 'b device = "cuda"'), card=False)


def test_without_a_card_auto_takes_its_pool_of_the_hosts_memory(configure, together):
    settings = configure('a cpu_pool = "4GiB"', f'b{CPU}; cpu_pool = "4GiB"', "bert")
    together(settings, card=True, memory=6 << 30)
    together(settings, card=False, memory=8 << 30)
    with pytest.raises(BadConfig, match=r"models\.cpu_pool: 8\.0 GiB for 2 engines"):
        together(settings, card=False, memory=6 << 30)


def test_what_one_kind_of_model_has_is_allowed_where_one_of_them_is(configure):
    rest = '[lora]\nadapter_pool = "2MiB"\nkv_floor = "1MiB"'
    settings = configure(f"a{CPU}", f"bert{CPU}", rest=rest)
    assert settings.process_config(0).kv_floor == 1 << 20
    assert settings.process_config(1).adapter_pool == 2 << 20
