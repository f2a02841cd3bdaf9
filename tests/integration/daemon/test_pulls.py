"""Pulls by a whole daemon: restarts in their midst, requests for references, slow sources."""

import importlib.util
import json
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from lorad.wire_operations import PullStart

#: `tests/unit/service` and `tests/faults/sources` say the same without a daemon.
pytestmark = pytest.mark.late

FAKE = Path(__file__).parents[2] / "fakes" / "sources.py"
RULES = '[lora]\nslots = 8\nram_cache = "16MiB"\nresolve = true\nresolve_allow = ["hf:open/*"]\n'


def _load():
    spec = importlib.util.spec_from_file_location("sources_of_daemon", FAKE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fakes = _load()


@pytest.fixture(scope="module")
def daemon(make_daemon):
    """Its sources are a hub in a folder; references of `open` may be asked for."""
    daemon = make_daemon()
    daemon.hub = fakes.Hub(daemon.root / "hub")
    text = daemon.config.read_text()
    daemon.config.write_text(text.replace('[lora]\nslots = 8\nram_cache = "16MiB"\n', RULES))
    assert "resolve_allow" in daemon.config.read_text()
    daemon.command = lambda *arguments: [
        sys.executable,
        str(FAKE),
        str(daemon.hub.root),
        "--config",
        str(daemon.config),
        *arguments,
    ]
    daemon.start()
    return daemon


@pytest.fixture
def put(daemon, make_adapter, tmp_path):
    """put("open/sql", seed, **rules): a repository with an adapter that works."""

    def put(repo, seed, commit="1", **rules):
        folder = make_adapter(tmp_path / f"{seed}", seed)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return daemon.hub.put(repo, files, commit=commit, **rules)

    return put


def operation(daemon, id):
    with daemon.client() as client:
        return client.operation(id)


def begin(daemon, reference, **wishes):
    with daemon.client() as client:
        return client.pull(PullStart(reference=reference, **wishes)).id


def staged(daemon):
    return list(daemon.root.rglob("pull-*"))


def loractl(daemon, *argv):
    command = [sys.executable, "-m", "lorad.cli.app", "-H", f"unix://{daemon.admin}", *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=daemon.env, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_pulls_are_killed_with_the_daemon_and_go_on_after_the_restart(daemon, put, poll):
    half = 4 * fakes.CHUNK
    commit = put("acme/sql", 1, hold_at=half)
    put("acme/slow", 2, hold_at=half)
    id, slow = begin(daemon, "hf:acme/sql", load=True), begin(daemon, "hf:acme/slow")
    poll(lambda: operation(daemon, id).done_bytes >= half, "half of one")
    poll(lambda: operation(daemon, slow).done_bytes >= half, "half of the other")
    daemon.kill()
    daemon.hub.rule("acme/sql", commit=fakes.commit_of("newer"), hold_at=1 << 40)
    daemon.start()
    done = poll(lambda: (o := operation(daemon, id)).state == "done" and o, daemon.tail)
    assert (done.name, done.commit) == ("sql", commit)
    row = daemon.adapter("sql")
    assert (row.source, row.rev) == (f"hf:acme/sql@{commit}", done.rev)
    starts = [int(c.split()[2]) for c in daemon.hub.calls() if c.startswith("fetch hf:acme/sql")]
    assert starts[0] == 0
    assert starts[1] >= half
    assert daemon.text("sql") != daemon.text("tiny")
    assert operation(daemon, slow).state in ("queued", "running")
    cancelled = loractl(daemon, "op", "cancel", slow)
    assert (cancelled.returncode, cancelled.stdout) == (0, f"{slow}  cancelled\n")
    poll(lambda: not staged(daemon), "its folder to go")
    assert daemon.adapter("slow") is None


def test_a_request_for_a_reference_waits_for_its_pull_while_others_are_served(daemon, put, poll):
    commit = put("open/voice", 3, hold_at=fakes.CHUNK)
    asked = threading.Thread(target=lambda: answers.append(daemon.ask("hf:open/voice")))
    answers = []
    asked.start()
    poll(lambda: any("fetch hf:open/voice" in c for c in daemon.hub.calls()), "the pull")
    assert daemon.text("tiny")
    daemon.upload("beside", 4, load=True)
    assert daemon.text("beside")
    assert answers == []
    daemon.hub.rule("open/voice", hold_at=1 << 40)
    asked.join(60)
    (answer,) = answers
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "hf:open/voice"
    name = f"hf:open/voice@{commit}"
    assert answer.headers["x-lorad-rev"] == daemon.adapter(name).rev
    assert answer.json()["choices"][0]["text"] == daemon.text(name)
    with daemon.http() as http:
        assert name in [card["id"] for card in http.get("/v1/models").json()["data"]]
        card = http.get("/v1/models/hf:open/voice").json()
        assert (card["id"], card["root"]) == ("hf:open/voice", answer.headers["x-lorad-rev"])
        ids = http.post("/tokenize", json={"model": "hf:open/voice", "prompt": "abc"})
        assert len(ids.json()["tokens"]) == 3
    shown = loractl(daemon, "show", name)
    assert f"source    {name}" in shown.stdout
    assert loractl(daemon, "rm", name, "-y").returncode == 0


def test_a_request_for_what_is_not_allowed_not_there_or_away_is_told_so(daemon, put):
    put("shut/sql", 5)
    before = len(daemon.hub.calls())
    refused = daemon.ask("hf:shut/sql")
    unknown = daemon.ask("nosuch")
    assert refused.status_code == unknown.status_code == 404
    bodies = [answer.json()["error"] for answer in (refused, unknown)]
    assert bodies[0]["message"] == bodies[1]["message"].replace("nosuch", "hf:shut/sql")
    assert bodies[0]["code"] == bodies[1]["code"] == "model_not_found"
    assert len(daemon.hub.calls()) == before
    missing = daemon.ask("hf:open/missing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    put("open/away", 6, error="source_unreachable")
    away = daemon.ask("hf:open/away")
    assert (away.status_code, away.headers["retry-after"]) == (503, "10")
    assert away.headers["x-should-retry"] == "true"


@pytest.mark.slow
def test_pull_and_op_of_loractl_against_a_real_daemon(daemon, put):
    commit = put("acme/cli", 7)
    planned = loractl(daemon, "pull", "hf:acme/cli", "--dry-run", "--json")
    plan = json.loads(planned.stdout)
    assert (plan["name"], plan["commit"]) == ("cli", commit)
    assert sum(f["num_bytes"] for f in plan["files"]) == plan["total_bytes"]
    assert daemon.adapter("cli") is None
    done = loractl(daemon, "pull", "hf:acme/cli", "--name", "team/cli", "--pin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("team/cli@")
    assert daemon.adapter("team/cli").pinned
    put("acme/cli", 8, commit="2")
    taken = loractl(daemon, "pull", "hf:acme/cli", "--name", "team/cli")
    assert (taken.returncode, taken.stdout) == (6, "")
    assert "E_NAME_TAKEN" in taken.stderr
    replaced = loractl(daemon, "pull", "hf:acme/cli", "--name", "team/cli", "--replace")
    assert replaced.returncode == 0, replaced.stderr
    listed = loractl(daemon, "op", "ls", "--json")
    states = [o["state"] for o in json.loads(listed.stdout)["items"] if o["name"] == "team/cli"]
    assert states == ["done", "failed", "done"]
    with daemon.client() as client:
        (left,) = client.load("team/cli", wait=False).items
        assert client.operation(left.operation).kind == "load"


def test_a_stop_in_the_midst_of_a_pull_takes_no_time_and_loses_nothing(daemon, put, poll):
    put("acme/late", 9, hold_at=fakes.CHUNK)
    id = begin(daemon, "hf:acme/late")
    poll(lambda: operation(daemon, id).done_bytes >= fakes.CHUNK, "its first bytes")
    asked = threading.Thread(target=lambda: answers.append(daemon.ask("hf:open/late")))
    answers = []
    put("open/late", 10, hold_at=0)
    asked.start()
    poll(lambda: any("fetch hf:open/late" in c for c in daemon.hub.calls()), "the request's pull")
    before = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - before < 5.0
    asked.join(10)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "draining")
    (database,) = daemon.root.rglob("registry.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT state, staging FROM operations WHERE id = ?", (id,))
        ((state, staging),) = rows.fetchall()
    assert state == "running"
    assert staging in {path.name for path in staged(daemon)}
