"""config: what the daemon goes by, and what a start here and now would read or refuse."""

import json
import tomllib

import pytest

from lorad import config_sources
from lorad.config import Settings
from lorad.config_sources import load
from lorad.wire_operate import RunningConfig


@pytest.fixture
def etc(tmp_path, monkeypatch):
    """The configuration directory, with a base that has a config.json and no more."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "lorad.toml").write_text(f'[[models]]\nbase = "{folder}"\n[lora]\nslots = 9\n')
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("LORAD_LIMITS__BODY", "8MiB")
    return tmp_path


def cells(text):
    return {line.split()[0]: line.split(None, 1)[1] for line in text.splitlines()}


def test_show_says_every_setting_and_with_origin_where_it_is_from(loractl, etc):
    shown = cells(loractl("config", "show", "--here").out)
    assert shown["lora.slots"] == "9" and shown["limits.body"] == '"8MiB"'
    assert shown["lora.kv_floor"] == '"auto"' and shown["limits.idle"] == '"75s"'
    told = cells(loractl("config", "show", "--here", "--origin").out)
    assert told["lora.slots"].split() == ["9", f"{etc}/lorad.toml:4"]
    assert told["limits.body"].split() == ['"8MiB"', "LORAD_LIMITS__BODY"]
    assert told["limits.n"].split() == ["16", "default"]


def test_a_file_that_is_named_is_read_last(loractl, etc, tmp_path):
    (tmp_path / "more.toml").write_text("[lora]\nslots = 10\n")
    done = loractl("config", "show", "--config", str(tmp_path / "more.toml"), "--json")
    document = done.json
    assert document["schema"] == "lorad/config.v1"
    assert document["settings"]["lora"]["slots"] == 10
    assert document["origins"]["lora.slots"] == f"{tmp_path}/more.toml:2"


def test_names_are_keys(loractl, etc):
    assert "lora.slots" in loractl("config", "show", "--here", "-o", "name").out.splitlines()


def test_what_is_wrong_is_one_line_with_place_and_nearest_key(loractl, etc):
    (etc / "lorad.toml").write_text("[lora]\nslotz = 9\n")
    for words in (("show", "--here"), ("check",), ("check", str(etc / "lorad.toml"))):
        done = loractl("config", *words)
        assert done.exit == 2, words
        assert f"{etc}/lorad.toml:2: unknown key lora.slotz" in done.err
        assert "did you mean slots?" in done.err
    done = loractl("config", "check", "--json")
    assert done.error["code"] == "invalid_config" and not done.out


def test_check_looks_at_the_bases_files_too(loractl, etc):
    done = loractl("config", "check")
    assert done.exit == 2 and "models.base" in done.err


def test_path_lists_what_is_read_in_order(loractl, etc, tmp_path):
    (etc / "conf.d").mkdir()
    (etc / "conf.d" / "20-b.toml").write_text("")
    (etc / "conf.d" / "10-a.toml").write_text("")
    done = loractl("config", "path", "--config", str(tmp_path / "absent.toml"))
    assert [line.split() for line in done.out.splitlines()[1:]] == [
        ["yes", f"{etc}/lorad.toml"],
        ["yes", f"{etc}/conf.d/10-a.toml"],
        ["yes", f"{etc}/conf.d/20-b.toml"],
        ["no", f"{tmp_path}/absent.toml"],
    ]
    assert "over them: LORAD_LIMITS__BODY" in done.err
    items = loractl("config", "path", "--json").json["items"]
    assert items[0] == {"path": f"{etc}/lorad.toml", "read": True}


def test_default_is_a_file_that_changes_nothing_once_the_base_is_named(loractl, etc):
    text = loractl("config", "default").out
    base = etc / "base"
    alone = etc / "alone"
    alone.mkdir()
    env = {"CONFIGURATION_DIRECTORY": str(alone), "STATE_DIRECTORY": str(etc / "state")}
    file = alone / "lorad.toml"
    file.write_text(text.replace("/path/to/model", str(base)))
    plain = load(None, env)[0]
    assert plain.origins.keys() == {"models.base"}
    file.write_text(text.replace("/path/to/model", str(base)).replace("\n# ", "\n"))
    written, _ = load(None, env)
    assert all(getattr(written, k) == getattr(plain, k) for k in plain.__struct_fields__[:-1])
    keys = {
        f"{section}.{key}"
        for section, values in tomllib.loads(file.read_text()).items()
        for key in (values[0] if section == "models" else values)
    }
    assert keys == {f"{s}.{k}" for s, k, _ in config_sources.each(written)}


def test_default_as_json_has_no_origin(loractl):
    document = json.loads(loractl("config", "default", "--json").out)
    assert document["origins"] == {}
    assert document["settings"].keys() == set(Settings.__struct_fields__) - {"origins"}


@pytest.fixture
def running(server):
    """A daemon with one more section than this loractl knows, and a key that waits."""
    server.api.operator.config = RunningConfig(
        settings={
            "models": [{"base": "/models/tiny", "cpu_pool": 2 << 30}],
            "lora": {"slots": 9, "kv_floor": 0, "starve_after": 2.0},
            "newer": {"key": ["a"]},
        },
        origins={"lora.slots": "/etc/lorad/lorad.toml:4"},
        needs_restart={"lora.kv_floor": 3 << 20},
    )


def test_show_asks_the_daemon_for_its_settings_and_what_waits_for_a_restart(loractl, running):
    done = loractl("config", "show")
    assert cells(done.out)["lora.kv_floor"] == '"auto"'
    assert cells(done.out)["models.cpu_pool"] == '"2GiB"'
    assert cells(done.out)["newer.key"] == '["a"]'
    assert done.err == 'needs a restart: lora.kv_floor = "3MiB"\n'
    told = cells(loractl("config", "show", "--origin").out)
    assert told["lora.slots"].split() == ["9", "/etc/lorad/lorad.toml:4"]
    assert told["lora.starve_after"].split() == ['"2s"', "default"]
    document = loractl("config", "show", "--json").json
    assert document["schema"] == "lorad/config.v1"
    assert document["settings"]["lora"]["slots"] == 9
    assert document["needs_restart"] == {"lora.kv_floor": 3 << 20}


def test_show_without_a_daemon_says_so_and_does_not_guess(loractl, etc, tmp_path):
    done = loractl("-H", f"unix://{tmp_path}/none.sock", "config", "show")
    assert (done.exit, done.out) == (3, "")
    assert loractl("-H", f"unix://{tmp_path}/none.sock", "config", "show", "--here").exit == 0
