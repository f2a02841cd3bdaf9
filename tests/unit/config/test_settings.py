"""What the configuration accepts, where each value came from, and how it refuses."""

import os
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.errors import ConfigError
from lorad.config import doubts
from lorad.config_sources import dump, load
from lorad.config_values import parse_duration, parse_size
from lorad.errors import BadConfig
from lorad.paths import find


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def env(tmp_path):
    return {"CONFIGURATION_DIRECTORY": str(tmp_path / "etc"), "STATE_DIRECTORY": str(tmp_path)} | {
        "RUNTIME_DIRECTORY": str(tmp_path / "run"),
        "CACHE_DIRECTORY": str(tmp_path / "cache"),
    }


@pytest.fixture
def write(tmp_path, base):
    def write(text, name="lorad.toml", models=True):
        path = tmp_path / "etc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((f'[[models]]\nbase = "{base}"\n' if models else "") + text)
        return path

    return write


def test_defaults_need_nothing_but_a_base(write, env, base, tmp_path):
    write("")
    settings, _ = load(None, env)
    assert settings.models[0].name == "tiny-llama"
    assert settings.watch.dir == str(tmp_path / "inbox")
    assert settings.inference.socket == str(tmp_path / "run" / "inference.sock")
    assert settings.engine_config().model == str(base)
    assert settings.origins == {"models.base": f"{tmp_path}/etc/lorad.toml:2"}


def test_token_ids_of_adapters_own_are_a_setting_with_bounds(write, env):
    write("")
    assert load(None, env)[0].engine_config().extra_vocab == 256
    write("[lora]\nextra_vocab = 0\n")
    assert load(None, env)[0].engine_config().extra_vocab == 0
    write("[lora]\nextra_vocab = 65537\n")
    with pytest.raises(BadConfig, match=r"^lora\.extra_vocab .*65536.*lorad\.toml"):
        load(None, env)


def test_sizes_and_durations_are_read_in_their_units(write, env):
    write('[lora]\nram_cache = "16GiB"\nstarve_after = "1500ms"\nkv_floor = "auto"\n')
    settings, _ = load(None, env)
    assert settings.lora.ram_cache == 16 << 30
    assert settings.lora.starve_after == 1.5
    assert settings.lora.kv_floor == 0
    assert parse_size("4 MB") == 4_000_000
    assert parse_duration("10m") == 600


def test_a_flag_beats_the_environment_beats_the_file_beats_conf_d_beats_main(write, env, tmp_path):
    write("[lora]\nslots = 1\n[limits]\nn = 1\nstop = 1\nqueue = 1\n[log]\nlevel = 'error'\n")
    write("[lora]\nslots = 2\n[limits]\nn = 2\nstop = 2\nqueue = 2\n", "conf.d/10.toml", False)
    named = write("[lora]\nslots = 3\n[limits]\nn = 3\nstop = 3\n", "named.toml", False)
    env |= {"LORAD_LORA__SLOTS": "4", "LORAD_LIMITS__N": "4", "LORAD_CONFIG": str(named)}
    settings, _ = load(None, env, {"lora.slots": "5"})
    assert settings.lora.slots == 5
    assert settings.limits.n == 4
    assert settings.limits.stop == 3
    assert settings.limits.queue == 2
    assert settings.log.level == "error"
    assert settings.origins["lora.slots"] == "flag"
    assert settings.origins["limits.n"] == "LORAD_LIMITS__N"
    assert settings.origins["limits.stop"] == f"{named}:5"
    assert "slots = 5  # flag" in dump(settings)


def test_what_is_printed_may_be_read_again_and_says_auto_where_it_is(write, env):
    write('[limits]\nidle = "90s"\n[watch]\nsettle = "250ms"\n[lora]\nkv_floor = "3MiB"\n')
    settings, _ = load(None, env)
    printed = dump(settings)
    for line in ('max_model_len = "auto"  # default', 'beside_generators = "auto"  # default'):
        assert line in printed.splitlines()
    assert 'pin_limit = "auto"  # default' in printed and 'cpu_pool = "2GiB"' in printed
    write(printed, models=False)
    again, _ = load(None, env)
    assert replace(again, origins={}) == replace(settings, origins={})


def test_the_environment_changes_the_first_model(write, env):
    write("")
    env |= {"LORAD_MODELS__0__NAME": "other", "LORAD_MODELS__DETERMINISTIC": "yes"}
    model = load(None, env)[0].models[0]
    assert (model.name, model.deterministic) == ("other", True)


def test_a_draft_model_is_a_folder_like_the_base(write, env):
    write("speculation = 'draft'\ndraft_model = '~/small'\n")
    settings, _ = load(None, env)
    assert settings.models[0].draft_model == str(Path("~/small").expanduser())
    assert settings.engine_config().draft_model == settings.models[0].draft_model


def test_lists_in_the_environment_are_split_at_commas(write, env):
    write("")
    settings, _ = load(None, env | {"LORAD_ADMIN__ALLOW_UIDS": "0, 1000"})
    assert settings.admin.allow_uids == (0, 1000)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[lora]\nslotz = 3\n", "lorad.toml:4: unknown key lora.slotz", "did you mean slots?"),
        ("[lorra]\nslots = 3\n", "lorad.toml:3: unknown section [lorra]", "did you mean lora?"),
        ("[lora]\nslots = 'many'\n", "lora.slots = many: expected `int`, got `str`", ""),
        ("[watch]\nsettle = 'soon'\n", 'expected a duration such as "2s"', ""),
        ("[lora]\nram_cache = '1 parsec'\n", 'expected a size such as "16GiB"', ""),
        ("[lora]\nram_cache = -1\n", "expected 0 or more", ""),
        ("[lora]\nram_cache = 'auto'\n", "expected a size", ""),
        ("[lora]\nslots = 0\n", "lora.slots = 0: must be 1 to 65536 (", ""),
        (
            "speculation = 'draft'\n",
            "models.speculation = 'draft': draft_model names no model that drafts (",
            "a smaller model of the same vocabulary",
        ),
        (
            "speculation = 'ngram'\nmixed_tokens = 1\n",
            "models.mixed_tokens = 1 leaves no row for a draft beside the token itself (",
            "2 or more",
        ),
        (
            '[tcp]\nenabled = true\nbind = "0.0.0.0:1"\n',
            "tcp.bind: 0.0.0.0:1 can be reached from other machines, and there are no keys",
            "tcp.api_keys_file",
        ),
        ('[tcp]\nenabled = true\nbind = "host:1"\n', "tcp.bind: an IP address and a port", ""),
        (
            '[tcp]\nenabled = true\nadmin_bind = "127.0.0.1:1"\n',
            "tcp.admin_bind: over TCP everybody would be an operator",
            "tcp.admin_keys_file",
        ),
        ("[inference]\nauth = 'password'\n", "expected one of peer, key, peer+key", ""),
        ("[log]\nlevel = 'loud'\n", "expected one of debug, info, warning, error", ""),
        ("[admin]\nmode = '0666'\n", "admin.mode: a socket that everybody", ""),
        ("[admin]\nmode = 'rw'\n", "admin.mode: an octal mode", ""),
        ("[admin]\nallow_uids = [0, -1]\n", "admin.allow_uids: user ids", ""),
        ("[[models]]\nbase = '/x'\n", "models.1.base: no config.json in /x", "is not fetched"),
        ("not toml", "lorad.toml", ""),
        ("[limits]\nbody = 0\n", "limits.body: 4KiB or more", ""),
        ("[limits]\nheaders = 0\n", "limits.headers: 4KiB or more", ""),
        ("[limits]\nrequest_receipt = 0\n", "limits.request_receipt: above 0 seconds", ""),
        ("[limits]\ndeadline = '0s'\n", "limits.deadline: above 0 seconds", ""),
        ("[limits]\nstop = -1\n", "limits.stop: 0 or more", ""),
        (f"a = {'[' * 20000}", "nested too deeply", ""),
    ],
)
def test_a_bad_setting_is_refused_with_its_place_and_the_nearest_name(
    write, env, text, message, hint
):
    write(text)
    with pytest.raises(BadConfig) as caught:
        load(None, env)
    assert message in caught.value.message
    assert "lorad.toml" in caught.value.message or message.startswith("models: ")
    assert hint in caught.value.hint
    assert caught.value.exit == 2


def test_a_mark_of_its_encoding_at_the_begin_of_a_file_is_no_setting(write, env):
    path = write("[lora]\nslots = 3\n")
    path.write_text("\ufeff" + path.read_text())
    assert load(None, env)[0].lora.slots == 3


def test_without_a_model_the_files_are_named_that_were_looked_for(tmp_path, env):
    main = tmp_path / "lorad" / "lorad.toml"
    env = env | {"CONFIGURATION_DIRECTORY": str(main.parent)}
    with pytest.raises(BadConfig) as caught:
        load(None, env)
    assert caught.value.message.endswith(f"{main} is not there")
    assert "--config" in caught.value.hint
    main.parent.mkdir()
    main.write_text("[lora]\nslots = 3\n")
    with pytest.raises(BadConfig) as caught:
        load(None, env)
    assert caught.value.message == f"models: none is in {main}"
    assert "[[models]]" in caught.value.hint


def test_an_unknown_variable_is_refused_by_its_name(write, env):
    write("")
    with pytest.raises(BadConfig, match=r"LORAD_LORA__SLOTZ: unknown key lora\.slotz"):
        load(None, env | {"LORAD_LORA__SLOTZ": "1"})


def test_variables_without_a_section_are_not_settings(write, env):
    write("")
    with_them = load(None, env | {"LORAD_HOST": "unix:///x", "LORAD_CACHE": "/y"})
    assert with_them == load(None, env)


def test_a_file_without_an_end_is_read_no_further_than_any_configuration_goes(env):
    with pytest.raises(BadConfig, match="/dev/zero: over 4 MiB"):
        load(Path("/dev/zero"), env)


def test_a_configuration_may_come_through_a_pipe(write, env, tmp_path):
    whole, pipe = write("[lora]\nslots = 3\n").read_bytes(), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(whole.replace(b"\n", b"\r\n"),))
    writer.start()
    assert load(pipe, env)[0].lora.slots == 3
    writer.join()


def test_a_named_file_must_exist(write, env):
    write("")
    with pytest.raises(BadConfig, match="No such file"):
        load(Path("/nowhere/lorad.toml"), env)


def test_without_a_model_the_message_shows_what_to_write(env):
    with pytest.raises(BadConfig) as caught:
        load(None, env)
    assert "[[models]]" in caught.value.hint


def test_a_base_without_config_json_is_refused(write, env, base):
    (base / "config.json").unlink()
    write("")
    with pytest.raises(BadConfig, match=r"no config\.json"):
        load(None, env)


def test_a_user_has_xdg_directories_and_maybe_no_runtime_directory():
    paths = find({"HOME": "/home/ada"}, uid=1000)
    assert paths.config == Path("/home/ada/.config/lorad")
    assert paths.state == Path("/home/ada/.local/state/lorad")
    assert paths.runtime is None
    assert find({"XDG_RUNTIME_DIR": "/run/user/1000"}, uid=1000).runtime == Path(
        "/run/user/1000/lorad"
    )


def test_root_and_system_units_have_the_machines_directories():
    assert find({}, uid=0).state == Path("/var/lib/lorad")
    unit = find({"RUNTIME_DIRECTORY": "/run/lorad", "STATE_DIRECTORY": "/var/lib/a:/b"}, uid=980)
    assert unit.system
    assert unit.state == Path("/var/lib/a")


def test_a_uid_without_an_account_or_home_gets_paths_that_say_so(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    places = find({}, uid=54321)
    assert places.state == Path("/nonexistent/.local/state/lorad")
    assert places.runtime is None


@pytest.mark.parametrize("length", [-1, 1])
def test_a_context_without_room_for_an_answer_is_refused_before_the_engine_starts(
    length: int,
) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineConfig(model="m", max_model_len=length)


def test_references_in_requests_are_allowed_by_patterns_and_none_of_them_is_said(write, env):
    write('[lora]\nresolve = true\nresolve_allow = ["hf:acme/*", "s3://models/lora/*"]\n')
    settings, _ = load(None, env)
    assert settings.lora.resolve_allow == ("hf:acme/*", "s3://models/lora/*")
    assert doubts(settings) == ()
    write("[lora]\nresolve = true\n")
    (doubt,) = doubts(load(None, env)[0])
    assert "no reference is allowed" in doubt
    write("")
    assert doubts(load(None, env)[0]) == ()


@pytest.mark.parametrize("pattern", ["acme/*", "https://example.org/*", "hf:acme/x@main", "*"])
def test_a_pattern_that_is_none_of_references_is_refused(write, env, pattern):
    write(f'[lora]\nresolve_allow = ["{pattern}"]\n')
    with pytest.raises(BadConfig, match=r"lora\.resolve_allow") as caught:
        load(None, env)
    assert "hf:ORG/*" in caught.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1:9411", "[::1]:9411", "127.8.8.8:0"])
def test_metrics_may_be_had_on_a_loopback_address(write, env, address):
    write(f'[metrics]\ntcp = "{address}"\n')
    assert load(None, env)[0].metrics.tcp == address


@pytest.mark.parametrize("address", ["0.0.0.0:9411", "192.0.2.1:9411", "[::]:9411"])
def test_an_address_that_others_reach_has_to_be_wanted(write, env, address):
    write(f'[metrics]\ntcp = "{address}"\n')
    with pytest.raises(BadConfig, match=r"metrics\.tcp") as caught:
        load(None, env)
    assert "beyond_loopback" in caught.value.hint
    write(f'[metrics]\ntcp = "{address}"\nbeyond_loopback = true\n')
    assert load(None, env)[0].metrics.beyond_loopback


@pytest.mark.parametrize(
    "address", ["9411", "localhost:9411", "127.0.0.1", "::1:9411", "[127.0.0.1]:1", "127.0.0.1:x"]
)
def test_what_is_no_address_is_refused(write, env, address):
    write(f'[metrics]\ntcp = "{address}"\n')
    with pytest.raises(BadConfig, match="an IP address and a port"):
        load(None, env)


def test_tcp_is_off_and_loopback_without_keys_is_doubted(write, env):
    write("")
    settings, _ = load(None, env)
    assert not settings.tcp.enabled and not settings.tcp.admin_bind
    write("[tcp]\nenabled = true\n")
    settings, _ = load(None, env)
    (doubt,) = doubts(settings)
    assert "every user of this machine" in doubt
    write('[tcp]\nenabled = true\nbind = "[::]:1"\n[inference]\nauth = "key"\n')
    assert load(None, env)[0].tcp.bind == "[::]:1", "tenants have keys"
