"""The tutorial works when it is pasted: its blocks run, in order, in one shell."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lorad import demo_model

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?```(?P<of>sh|python)\n(?P<text>.*?)```", re.S
)

#: No daemon outlives a block that failed.
TIDY = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"


def blocks() -> list[str]:
    """What a reader pastes, but for what says why it is left out here."""
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    found = [match for match in BLOCK.finditer(page) if not match["why"]]
    python = "python - <<'END'\n{}END\n"
    return [python.format(m["text"]) if m["of"] == "python" else m["text"] for m in found]


@pytest.mark.late
@pytest.mark.model
def test_the_blocks_of_the_tutorial_do_what_the_page_says():
    demo_model.ensure()  # its download is not what is tested
    with tempfile.TemporaryDirectory() as home:
        env = {
            **{name: text for name, text in os.environ.items() if not name.startswith("LORAD_")},
            "HOME": home,
            "XDG_CACHE_HOME": str(demo_model.cache_dir().parent),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        }
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", "\n".join([TIDY, *blocks()])],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not (Path(home) / "lorad-tutorial").exists(), "the last block tidies up"
    said = done.stdout
    checked, first, second = re.findall(r"^acme/bible@([0-9a-f]{8})", said, flags=re.M)
    assert checked == first
    assert first == "d4e7c00c", "the page names this revision"
    assert second != first
    assert re.search(rf"^ +0  acme/bible  {first}  idle   P ", said, flags=re.M)
    assert re.search(rf'"system_fingerprint":"lorad-[^"]*-{first}"', said)
    assert '"code":"model_not_found"' in said
    answers = re.findall(r"^(And the LORD .*)$", said, flags=re.M)
    assert len(answers) == 2, "of loractl run and of openai-python"
    assert answers[0] == answers[1]
    for action, rev in (("promote", first), ("pin.set", first), ("promote", second)):
        assert re.search(rf"uid {os.getuid()} pid \d+ +{action} +acme/bible +{rev} +ok", said)
    assert "it is pinned and stays" in said


def test_what_is_not_run_says_why():
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    left_out = [match["why"] for match in BLOCK.finditer(page) if match["why"]]
    assert len(left_out) == 1, left_out
    assert len(blocks()) >= 8
