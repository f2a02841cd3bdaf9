"""registry: on a state directory without a daemon, and what a command line comes to."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from engine.messages import PackedModule
from lorad.registry.lock import state_lock
from lorad.registry.records import RevisionRecord
from lorad.registry.registry import Registry


@pytest.fixture
def state():
    """A state directory with two names, where syncs cost nothing if there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        registry = Registry.open(Path(folder))
        for number, name in enumerate(("acme/a", "b")):
            rev = f"{number + 1:064x}"
            staging = registry.store.stage()
            (staging.path / "adapter_model.safetensors").write_bytes(b"x" * number)
            registry.store.commit(staging, rev)
            facts = RevisionRecord(
                rev=rev,
                rank=8,
                ranks={"q_proj": 8},
                alpha=8.0,
                rslora=False,
                targets=("q_proj",),
                num_layers=1,
                dtype="float32",
                file_bytes=1,
                changes_kv=True,
                modules=(PackedModule(0, "q_proj", 8, 1.0),),
            )
            registry.register(name, model="m", source="x", revision=facts, pin=not number).result()
        registry.close()
        yield Path(folder)


@pytest.fixture
def ctl(loractl, state):
    """ctl("check"): a registry command on those files."""
    return lambda *words: loractl("registry", *words, "--state-dir", str(state))


def test_check_is_ok_and_exits_1_once_something_is_wrong(ctl, state):
    done = ctl("check")
    assert done.exit == 0 and "adapters  2 names, 2 revisions" in done.out
    assert ctl("check", "--json").json["ok"] is True
    (state / "registry.db").write_bytes(b"not a database, but long enough to be read as one" * 99)
    done = ctl("check")
    assert done.exit == 1 and "problem: it is damaged" in done.err
    assert ctl("check", "--json").json["problems"]


def test_a_backup_is_restored_over_a_registry_that_lost_a_name(ctl, state, tmp_path):
    file = tmp_path / "b.db"
    done = ctl("backup", str(file))
    assert done.exit == 0 and done.out.startswith(str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    registry = Registry.open(state)
    registry.remove("b").result()
    registry.close()
    refused = ctl("restore", str(file))
    assert refused.exit == 2 and "needs --yes" in refused.err
    assert [json.loads(x)["name"] for x in ctl("export").out.splitlines()] == ["acme/a"]
    listed = ctl("restore", str(file), "--dry-run", "-o", "name")
    assert listed.out.split() == ["acme/a", "b"]
    done = ctl("restore", str(file), "--yes", "--json")
    assert done.json["names"] == 2 and done.json["kept_aside"]
    assert [json.loads(x)["name"] for x in ctl("export").out.splitlines()] == ["acme/a", "b"]


def test_a_backup_is_not_replaced_unasked(ctl, tmp_path):
    file = tmp_path / "b.db"
    file.write_text("mine")
    assert ctl("backup", str(file)).exit == 2 and file.read_text() == "mine"
    assert ctl("backup", str(file), "--yes").exit == 0
    assert ctl("backup", str(tmp_path)).exit == 2
    os.mkfifo(tmp_path / "pipe")
    assert ctl("backup", str(tmp_path / "pipe"), "--yes").exit == 2
    assert (tmp_path / "pipe").is_fifo()
    nowhere = ctl("backup", str(tmp_path / "nowhere" / "b.db"))
    assert nowhere.exit == 2 and f"{tmp_path}/nowhere is no folder" in nowhere.err


def test_while_somebody_holds_the_state_it_is_a_conflict(ctl, state, tmp_path):
    ctl("backup", str(tmp_path / "b.db"))
    with state_lock(state):
        done = ctl("restore", str(tmp_path / "b.db"), "--yes", "--json")
    assert (done.exit, done.error["code"]) == (6, "conflict")
    assert "stop it first, or loractl registry restore FILE --live" in done.error["hint"]


def test_what_is_no_backup_is_one_line(ctl, tmp_path):
    (tmp_path / "x").write_text("no database")
    done = ctl("restore", str(tmp_path / "x"), "--yes", "--json")
    assert (done.exit, done.error["code"]) == (1, "registry_unusable")


def test_an_export_goes_in_again_and_lists_what_came_of_it(ctl, state, tmp_path):
    lines = tmp_path / "names.jsonl"
    lines.write_text(ctl("export").out.replace('"priority":50', '"priority":7'))
    plan = ctl("import", str(lines), "--dry-run")
    assert plan.exit == 0 and plan.out.count("changed") == 2
    done = ctl("import", str(lines), "--yes", "--json")
    assert [i["action"] for i in done.json["items"]] == ["changed", "changed"]
    assert {e["priority"] for e in ctl("export", "--json").json["items"]} == {7}
    whole = tmp_path / "names.json"
    whole.write_text(ctl("export", "--json").out)
    assert ctl("import", str(whole), "--yes").out.count("unchanged") == 2


def test_names_without_files_here_are_a_failure_of_their_own(ctl, tmp_path):
    lines = tmp_path / "names.jsonl"
    lines.write_text('{"name":"zzz"}\n')
    done = ctl("import", str(lines), "--yes", "--json")
    assert done.exit == 4 and done.error["code"] == "not_found"
    lines.write_text('{"name":"zzz"}\n{"name":"b"}\n')
    done = ctl("import", str(lines), "--yes", "--json")
    assert done.exit == 1 and done.error["code"] == "partly_failed"
    lines.write_text('{"name":"b"}\n{"nam\n')
    done = ctl("import", str(lines), "--yes")
    assert done.exit == 2 and "line 2: no line of an export" in done.err


def test_a_rebuild_says_what_is_lost(ctl, state):
    (state / "registry.db").write_bytes(b"broken")
    assert ctl("rebuild").exit == 2
    done = ctl("rebuild", "--cards-only", "--yes")
    assert done.exit == 0 and "names  2" in done.out
    assert "lost: history, events, audit" in done.err
    assert ctl("check").exit == 0


def test_with_a_daemon_the_files_are_not_replaced(server, loractl, tmp_path, ctl):
    ctl("backup", str(tmp_path / "b.db"))
    done = loractl("registry", "restore", str(tmp_path / "b.db"), "--yes")
    assert done.exit == 6 and "a daemon answers at" in done.err
    assert loractl("registry", "rebuild", "--yes").exit == 6


def test_without_one_the_files_of_the_configuration_are_read(loractl, state, monkeypatch, tmp_path):
    monkeypatch.setenv("LORAD_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("STATE_DIRECTORY", str(state))
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(tmp_path))
    done = loractl("registry", "check")
    assert done.exit == 0 and f"no daemon answers: {state} is read" in done.err
    assert loractl("registry", "check", "--store", "x").exit == 2
