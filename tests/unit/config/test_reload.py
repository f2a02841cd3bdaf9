"""Which keys a reload brings into effect, and what it says of the others."""

import asyncio
import json

import pytest

from lorad import config_sources
from lorad.errors import LoradError
from lorad.reload import LIVE, Reload, is_live
from lorad.service.events import EventRing


@pytest.fixture
def setup(tmp_path):
    """setup(text) writes lorad.toml; the Reload read it once."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({}))
    file = tmp_path / "lorad.toml"
    env = {"STATE_DIRECTORY": str(tmp_path), "RUNTIME_DIRECTORY": str(tmp_path)}
    env["CONFIGURATION_DIRECTORY"] = str(tmp_path / "etc")

    def write(text):
        file.write_text(f'[[models]]\nbase = "{base}"\n{text}')

    def read():
        return config_sources.load(file, env)[0]

    write("")
    events = EventRing()
    reload = Reload(read(), read(), read, events)
    applied = []
    reload.apply = applied.append
    return write, reload, applied, events


def test_a_live_key_changes_and_another_waits_for_a_restart(setup):
    write, reload, applied, events = setup
    write('[lora]\nslots = 9\n[limits]\nqueue = 7\n[log]\nlevel = "debug"\n')
    done = asyncio.run(reload())
    assert done.changed == ("limits.queue", "log.level")
    assert done.needs_restart == ("lora.slots",)
    (now,) = applied
    assert (now.limits.queue, now.log.level, now.lora.slots) == (7, "debug", 1024)
    assert now.origins["limits.queue"].endswith("lorad.toml:6")
    assert "lora.slots" not in now.origins
    (event,) = events.newest(9)
    assert (event.type, event.level) == ("config.reloaded", "warn")
    assert event.message == "needs a restart: lora.slots; changed: limits.queue, log.level"


def test_what_waits_is_named_again_until_the_restart_and_what_changed_is_not(setup):
    write, reload, _, _ = setup
    write("[lora]\nslots = 9\n[limits]\nqueue = 7\n")
    asyncio.run(reload())
    again = asyncio.run(reload())
    assert (again.changed, again.needs_restart) == ((), ("lora.slots",))
    write("")
    back = asyncio.run(reload())
    assert (back.changed, back.needs_restart) == (("limits.queue",), ())


def test_what_is_in_effect_is_described_with_what_waits_for_a_restart(setup):
    write, reload, _, _ = setup
    assert reload.describe().needs_restart == {}
    write('[lora]\nslots = 9\nkv_floor = "1MiB"\n[limits]\nqueue = 7\n')
    asyncio.run(reload())
    told = reload.describe()
    assert told.settings["limits"]["queue"] == 7 and told.settings["lora"]["slots"] == 1024
    assert told.origins["limits.queue"].endswith("lorad.toml:7")
    assert told.needs_restart == {"lora.slots": 9, "lora.kv_floor": 1 << 20}
    assert "origins" not in told.settings
    write("")
    asyncio.run(reload())
    assert reload.describe().needs_restart == {}


def test_models_wait_for_a_restart_each_key_by_the_model_that_has_it(setup, tmp_path):
    write, reload, applied, _ = setup
    second = f'[[models]]\nbase = "{tmp_path / "base"}"\nname = "second"\ndevice = "cpu"\n'
    write(second)
    assert asyncio.run(reload()).needs_restart == ("models",)
    assert reload.describe().needs_restart == {"models": 2}
    assert len(applied[-1].models) == 1, "nobody is told of a model that has no engine"
    write("threads = 3\n")
    assert asyncio.run(reload()).needs_restart == ("models.threads",)


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("[limits]\nquue = 7\n", "limits.quue", "did you mean queue?"),
        ('[limits]\nqueue = "many"\n', "limits.queue", ""),
        ("[limits]\nqueue = 0\n", "limits.queue", ""),
        ("[lora]\nslots = -1\n", "slots", ""),
        ("[limits\n", "line 3", ""),
    ],
)
def test_a_refused_configuration_changes_nothing_and_names_the_key(setup, text, key, hint):
    write, reload, applied, events = setup
    outcomes = []
    reload.on_outcome = outcomes.append
    write(text)
    before = reload.now
    with pytest.raises(LoradError) as caught:
        asyncio.run(reload())
    assert caught.value.code == "invalid_config"
    assert key in caught.value.message
    assert hint in caught.value.hint
    assert (reload.now, applied) == (before, [])
    (event,) = events.newest(9)
    assert event.type == "config.rejected" and key in event.message
    assert outcomes == [caught.value]


def test_every_live_key_exists():
    for pattern in LIVE:
        section, _, key = pattern.partition(".")
        names = config_sources.hints(config_sources.SECTIONS[section])
        assert key == "*" or key in names, pattern
    assert is_live("limits.body") and not is_live("models.base")
