"""The programs of docs/howto/clients.md, as they are there, against a real daemon."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "clients.md"
BLOCK = re.compile(r"^```(sh|python|js)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    (section.partition("\n")[0], kind, text)
    for section in PAGE.read_text().split("\n## ")[1:]
    for kind, text in BLOCK.findall(section)
]
NEEDED = {"LangChain": "langchain_openai", "LiteLLM": "litellm", "openai-python": "httpx2"}


def names():
    seen = {}
    for title, _, _ in SNIPPETS:
        seen[title] = seen.get(title, 0) + 1
        yield f"{title}-{seen[title]}"


def test_each_client_is_shown_over_the_socket_and_over_tcp():
    for client in ("curl", "openai-python", "openai-node", "LangChain", "LiteLLM"):
        texts = [text for title, _, text in SNIPPETS if title == client]
        assert any("/run/lorad/inference.sock" in text for text in texts), client
        assert any("http://127.0.0.1:8411" in text for text in texts), client


@pytest.mark.parametrize(("title", "kind", "text"), SNIPPETS, ids=names())
def test_a_program_of_the_page_runs(daemon, free_ports, given, tmp_path, title, kind, text):
    if module := NEEDED.get(title):
        pytest.importorskip(module)
    if kind == "js" and not (given.node / "node_modules" / "openai").is_dir():
        pytest.skip("openai-node is not installed: make test-clients")
    text = text.replace("/run/lorad/inference.sock", str(daemon.inference))
    text = text.replace("http://127.0.0.1:8411", f"http://127.0.0.1:{free_ports[0]}")
    folder = given.node if kind == "js" else tmp_path  # imports are looked up beside a module
    program = folder / {"sh": "snippet.sh", "python": "snippet.py", "js": "snippet.mjs"}[kind]
    program.write_text(text)
    run = {"sh": ["sh"], "python": [sys.executable, "-W", "ignore"], "js": ["node"]}[kind]
    environment = os.environ | {
        "LORAD_API_KEY": given.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONPATH": str(PAGE.parents[2]),
    }
    done = subprocess.run(
        [*run, str(program)], env=environment, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert done.stdout.strip(), "it prints its answer"
