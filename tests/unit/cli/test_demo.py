"""The first conversion of the demo's model, told to people and to files."""

import io
import subprocess
import sys

import pytest

from lorad import demo_model

BAR = "import tqdm; list(tqdm.tqdm(range(3), desc='converting'))"


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stdout", "bars"), [(Screen, True), (io.StringIO, False)])
def test_progress_bars_are_drawn_for_a_terminal_and_not_into_a_file(
    tmp_path, monkeypatch, stdout, bars
):
    said = []

    def run(command, *, env, **options):
        done = subprocess.Popen(
            [sys.executable, "-c", BAR], env=env, stderr=subprocess.PIPE, text=True
        )
        said.append(done.communicate(timeout=60)[1])
        folder = command[-1]
        subprocess.Popen(["mkdir", "-p", folder]).wait()

    monkeypatch.setattr(demo_model, "fetch", lambda scratch: scratch / "x.gguf")
    monkeypatch.setattr(demo_model.subprocess, "run", run)
    monkeypatch.setattr(sys, "stdout", stdout())
    monkeypatch.setattr(sys, "stderr", Screen())
    assert demo_model.ensure(tmp_path / "model") == tmp_path / "model"
    assert ("converting" in said[0]) is bars
