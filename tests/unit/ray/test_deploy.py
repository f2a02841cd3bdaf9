"""`lorad deploy ray` where there is no cluster: what it prints, and why it ends."""

import socket
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from lorad.cli.serve import app

CONFIG = '[[models]]\nbase = "/model"\nname = "base"\n'


@pytest.fixture
def deploy(tmp_path, capsys):
    file = tmp_path / "lorad.toml"
    file.write_text(CONFIG)

    def run(*more, config=file, here=False):
        asked = ["deploy", "ray", str(config), "--catalog", "/shared/adapters", *more]
        asked += [] if here else ["--elsewhere"]
        result = CliRunner().invoke(app, asked)
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        return result.exit_code, result.stdout, result.stderr

    return run


def test_check_prints_the_file_for_serve_and_needs_no_cluster(deploy) -> None:
    status, out, _ = deploy("--check", "-n", "3", "--name", "adapters", "--port", "9000")
    assert status == 0
    file = yaml.safe_load(out)
    assert file["http_options"] == {"host": "127.0.0.1", "port": 9000}
    (application,) = file["applications"]
    assert application["name"] == "adapters"
    assert application["args"] == {"config": CONFIG, "catalog": "/shared/adapters"}
    assert application["deployments"][0] == {"name": "replica", "num_replicas": 3}


def test_a_file_that_is_not_there_or_no_configuration_is_exit_2(deploy, tmp_path) -> None:
    status, _, said = deploy(config=tmp_path / "none.toml")
    assert status == 2
    assert said.startswith(f"lorad: error: {tmp_path}/none.toml: No such file or directory\n")
    bad = tmp_path / "bad.toml"
    bad.write_text("[models]\n")
    assert deploy(config=bad)[0] == 2


@pytest.mark.parametrize("more", [("--check",), ()])
def test_a_base_that_is_not_here_is_exit_2_with_a_next_step_unless_it_is_elsewhere(
    deploy, tmp_path, more
) -> None:
    status, out, said = deploy(*more, here=True)
    assert (status, out) == (2, "")
    wrong, hint = said.splitlines()
    assert wrong == "lorad: error: models.base: /model is no folder on this machine"
    assert hint.strip() == (
        "try: a folder with config.json in it; --elsewhere if only the nodes have it"
    )
    empty = tmp_path / "lorad-empty.toml"
    (tmp_path / "base").mkdir()
    empty.write_text(CONFIG.replace("/model", str(tmp_path / "base")))
    status, out, said = deploy(*more, here=True, config=empty)
    assert (status, out) == (2, "") and "config.json" in said and "try: " in said


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--port=0", "--port"),
        ("--port=65536", "--port"),
        ("--timeout=soon", "--timeout"),
        ("--name=", "--name"),
        ("--name=a/b", "--name"),
        ("--cpus=inf", "cpus: 0 or more"),
        ("--gpus=nan", "gpus: 0 or more"),
        ("-n0", "replicas: 1 or more"),
        ("--ingresses=0", "ingresses: 1 or more"),
        ("--homes=here", "homes: an absolute path"),
        ("--catalog=s3://", "catalog: s3:// names no bucket"),
        ("--catalog=here", "catalog: 'here' is neither"),
        ("--max=3", "--min 1 --max 8"),
    ],
)
def test_a_value_that_is_none_is_exit_2_and_says_which_before_anything_is_asked(
    deploy, given, told
) -> None:
    status, out, said = deploy("--check", given)
    assert (status, out) == (2, "") and told in said
    assert "try: " in said or "Usage: " in said


def test_everybody_is_not_let_in_by_mistake(deploy) -> None:
    status, _, said = deploy("--check", "--host", "0.0.0.0")
    assert status == 2
    assert "api_keys_file" in said


def test_a_cluster_that_is_not_there_is_told_at_once(deploy) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        status, _, said = deploy("--address", address)
    assert status == 1
    assert f"no Ray cluster is reachable at {address}" in said
    assert "ray start --head" in said


def test_without_ray_it_says_what_to_install(deploy, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, said = deploy()
    assert status == 1
    assert "pip install '.[ray]' in a checkout" in said


def test_nothing_of_it_is_imported_by_the_daemons_command_line() -> None:
    code = "import sys, lorad.cli.serve; print([m for m in sys.modules if 'ray' in m.split('.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
