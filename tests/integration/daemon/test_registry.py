"""The registry of a real daemon: copied while it changes, told as lines, taken in; and the machine
around it looked over."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from lorad import wire
from lorad.cli.app import invoke
from lorad.registry import offline

#: `tests/unit/registry` and `tests/faults/registry` say the same without a daemon.
pytestmark = pytest.mark.late


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def ctl(daemon, capsys, monkeypatch):
    """ctl("ls"): (exit status, stdout, stderr) of loractl against that daemon."""
    for name, value in daemon.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LORAD_HOST", f"unix://{daemon.admin}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*words):
        capsys.readouterr()
        status = invoke(list(words))
        return status, *capsys.readouterr()

    return run


def test_a_copy_during_writes_is_of_one_moment(daemon, ctl, tmp_path):
    daemon.upload("acme/one", 1, pin=True, labels={"team": "x"}, priority=100)
    daemon.upload("two", 2, priority=100)
    over, turns = threading.Event(), []

    def write():
        with daemon.client() as client:
            while not over.is_set():
                value = len(turns) % 101
                for name in ("acme/one", "two"):
                    client.patch(name, priority_of(value))
                turns.append(value)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(2):
            file = tmp_path / f"{number}.db"
            status, _, said = ctl("registry", "backup", str(file))
            assert status == 0, said
            one, two = offline.entries(file)
            assert one.pinned and one.labels == {"team": "x"}
            assert (one.priority - two.priority) % 101 in (0, 1), "between two writes, not within"
    finally:
        over.set()
        writer.join()
    assert turns, "nothing was written meanwhile"
    status, said, _ = ctl("registry", "check", "--json")
    assert (status, json.loads(said)["problems"]) == (0, [])


def priority_of(priority):
    return wire.AdapterPatch(priority=priority)


def test_names_that_were_removed_come_back_from_lines_while_it_serves(daemon, ctl, tmp_path):
    daemon.upload("back", 3, pin=True, priority=61, labels={"a": "b"})
    before = daemon.text("back")
    status, lines, _ = ctl("registry", "export")
    assert status == 0
    file = tmp_path / "names.jsonl"
    file.write_text(lines)
    rev = daemon.adapter("back").rev
    kept = tmp_path / "kept"
    shutil.copytree(daemon.root / "state" / "store" / rev, kept)
    with daemon.client() as client:
        client.upload(kept, wire.UploadStart(name="twin"))  # so that the content stays
        client.remove("back")
    status, out, said = ctl("registry", "import", str(file), "--yes", "-o", "jsonl")
    assert status == 0, said
    told = {item["name"]: item["action"] for item in map(json.loads, out.splitlines())}
    assert told["back"] == "created"
    row = daemon.wait_state("back", "idle", "active", "registered")
    assert (row.rev, row.pinned, row.priority, row.labels) == (rev, True, 61, {"a": "b"})
    assert daemon.text("back") == before


def test_a_backup_is_taken_in_live_and_never_put_under_the_daemon(daemon, ctl, tmp_path):
    file = tmp_path / "r.db"
    assert ctl("registry", "backup", str(file))[0] == 0
    with daemon.client() as client:
        client.patch("two", priority_of(3))
    status, _, said = ctl("registry", "restore", str(file), "--yes")
    assert status == 6 and "a daemon answers" in said
    state = str(daemon.root / "state")
    status, _, said = ctl("registry", "restore", str(file), "--yes", "--state-dir", state)
    assert status == 6 and "uses" in said, "named by hand, it is still the daemon's"
    wanted = next(e.priority for e in offline.entries(file) if e.name == "two")
    status, _, said = ctl("registry", "restore", str(file), "--live", "--yes")
    assert status == 0, said
    assert daemon.adapter("two").priority == wanted


def test_doctor_and_plan_of_a_daemon_that_runs(daemon, ctl):
    status, said, _ = ctl("doctor", "--config", str(daemon.config), "--json")
    found = {item["check"]: item for item in json.loads(said)["items"]}
    for check in ("configuration", "daemon", "version", "admin socket", "inference socket"):
        assert found[check]["status"] == "ok", found[check]
    assert found["hub"]["message"] == "is not asked: HF_HUB_OFFLINE"
    assert status == (not json.loads(said)["ok"])
    status, said, _ = ctl("plan", "--rank", "4:3", "--json")
    planned = json.loads(said)
    with daemon.client() as client:
        picture, row = client.status(), daemon.adapter("two")
    assert (Path(picture.state_dir) / "registry.db").is_file() and Path(picture.store_dir).is_dir()
    assert found["store folder"]["message"].startswith(picture.store_dir)
    assert planned["arena"]["num_blocks"] == picture.pool.total
    assert planned["arena"]["block_bytes"] == picture.pool.block_bytes
    assert planned["adapters"][0]["num_bytes"] == row.num_bytes, "rank 4, on all projections"


def test_a_restored_registry_serves_at_the_next_start(daemon, ctl, tmp_path):
    daemon.upload("last", 4, pin=True)
    text = daemon.text("last")
    file = tmp_path / "r.db"
    assert ctl("registry", "backup", str(file))[0] == 0
    with daemon.client() as client:
        client.patch("last", priority_of(1))
    assert daemon.stop() == 0
    state = str(daemon.root / "state")
    status, _, said = ctl("registry", "restore", str(file), "--yes", "--state-dir", state)
    assert status == 0, said
    daemon.start()
    row = daemon.adapter("last")
    assert row.pinned and row.priority == 50
    assert daemon.text("last") == text
