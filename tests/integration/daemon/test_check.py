"""`lorad --check`: a base that a start would refuse is refused there, in the same words."""

import json
import shutil
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def daemon(make_daemon):
    return make_daemon()


@pytest.fixture
def folder(daemon, base, tmp_path):
    """A copy of the base that a test may harm, and that the configuration names."""
    daemon.base = tmp_path / "copy"
    shutil.copytree(base, daemon.base)
    daemon.configure()
    return daemon.base


def test_a_whole_base_is_valid(daemon, folder):
    assert daemon.refused("--check")[0] == 0
    assert _loractl(daemon) == (0, "the configuration is valid\n", "")


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: _edit(f, model_type="mamba"), "mamba"),
        (lambda f: _edit(f, quantization_config={"quant_method": "gptq"}), "quantiz"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json in"),
        (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (lambda f: (f / "model.safetensors").write_bytes(b"cut"), "model.safetensors"),
    ],
    ids=["type", "quantized", "tokenizer", "weights", "cut"],
)
@pytest.mark.late
def test_a_base_that_would_not_be_served_is_not_called_valid(daemon, folder, harm, words):
    harm(folder)
    status, said = daemon.refused("--check")
    assert status == 2
    assert said.startswith("lorad: error: models.base: ") and words in said
    status, out, told = _loractl(daemon)
    assert (status, out) == (2, "")
    assert told.splitlines()[0] == said.splitlines()[0].removeprefix("lorad: ")


@pytest.mark.parametrize(
    ("models", "more", "words"),
    [
        ("max_model_len = 4097", "", "models.max_model_len = 4097 is above the model's 4096"),
        ("", '[lora]\nadapter_floor = "32MiB"', "lora.adapter_floor = 33554432: kv_floor and"),
    ],
    ids=["length", "floor"],
)
@pytest.mark.late
def test_a_start_says_what_check_and_loractl_say(daemon, folder, models, more, words):
    text = daemon.config.read_text().replace("max_model_len = 4096", models)
    daemon.config.write_text(text.replace("[lora]", more or "[lora]"))
    said = [daemon.refused("--check"), daemon.refused()]
    assert said[0] == said[1]
    status, told = said[0]
    assert status == 2 and told.startswith(f"lorad: error: {words}")
    assert f"({daemon.config}:" in told.splitlines()[0]
    assert _loractl(daemon)[2].splitlines()[0] == told.splitlines()[0].removeprefix("lorad: ")
    assert not (daemon.root / "state").exists(), "nothing was taken"


def test_weights_of_a_draft_that_are_cut_are_refused_too(daemon, folder, base):
    draft = folder.with_name("draft")
    shutil.copytree(base, draft)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    line = f'deterministic = true\nspeculation = "draft"\ndraft_model = "{draft}"'
    daemon.config.write_text(daemon.config.read_text().replace("deterministic = true", line))
    status, told = daemon.refused("--check")
    assert status == 2 and told.startswith(f"lorad: error: models.draft_model: {weights} ends at")


def test_a_draft_that_is_too_large_to_pay_is_valid_and_warned_of(daemon, folder, base):
    line = f'speculation = "draft"\ndraft_model = "{base}"'
    daemon.config.write_text(daemon.config.read_text().replace("deterministic = true", line))
    status, told = daemon.refused("--check")
    assert status == 0, told
    assert told.startswith(f"lorad: warning: models.draft_model = {base}: ")
    assert "100% of the" in told and told.count("\n") == 1
    assert _loractl(daemon)[0] == 0
    assert _loractl(daemon)[2] == told.removeprefix("lorad: ")


def _loractl(daemon):
    """`loractl config check` where that daemon would start: (status, stdout, stderr)."""
    command = [sys.executable, "-m", "lorad.cli.app", "config", "check", str(daemon.config)]
    done = subprocess.run(command, capture_output=True, text=True, env=daemon.env, timeout=60)
    return done.returncode, done.stdout, done.stderr
