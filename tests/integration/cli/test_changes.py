"""add load evict pin unpin set rm: what is sent, what is asked first, what each refusal costs."""

import asyncio
import io
import sys

import pytest

from lorad import wire
from lorad.cli import app
from lorad.cli.adapters import _became
from lorad.errors import TABLE, LoradError


@pytest.fixture
def folder(tmp_path):
    """A PEFT folder as trainers leave it, with things that nobody serves."""
    made = tmp_path / "My-Adapter"
    made.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md", "optimizer.pt"):
        (made / name).write_text("{}")
    (made / "checkpoint-100").mkdir()
    return made


def test_add_sends_the_adapters_files_and_no_others(server, loractl, folder):
    done = loractl("add", str(folder))
    assert (done.exit, done.out) == (0, "my-adapter@c3c3c3c3  registered\n")
    sent = {"adapter_config.json": 2, "adapter_model.safetensors": 2}
    assert server.api.adapters.added_files == sent
    ((verb, name, options),) = server.calls
    assert (verb, name) == ("add", "my-adapter")
    assert not (options["replace"] or options["pin"] or options["load"] or options["dry_run"])
    assert loractl("add", str(folder), "-o", "name").out == "my-adapter\n"


def test_add_passes_every_wish_on(server, loractl, folder):
    words = "--name acme/new --priority 70 --pin --load --replace --label a=1 --label b=x=y"
    assert loractl("add", str(folder), *words.split(), "--json").json["schema"] == "lorad/added.v1"
    _, name, options = server.calls[0]
    assert name == "acme/new"
    assert options["pin"] is True
    assert (options["priority"], options["load"], options["replace"]) == (70, True, True)
    assert options["labels"] == {"a": "1", "b": "x=y"}


def test_add_says_what_became_of_a_load_that_was_asked_for(server, loractl, folder):
    done = loractl("add", str(folder), "--load")
    said = "my-adapter@c3c3c3c3  registered and resident: 3M, loaded in 0.04 s\n"
    assert (done.exit, done.out, done.err) == (0, said, "")
    told = loractl("add", str(folder), "--load", "--json").json
    assert (told["state"], told["num_bytes"], told["load_seconds"]) == ("idle", 3 << 20, 0.041)


def test_add_takes_one_folder_and_says_what_to_do_with_many(server, loractl, folder):
    done = loractl("add", str(folder), "b", "c")
    assert done.exit == 2 and not server.calls
    assert done.err.startswith("error: add takes one folder at a time, not 3\n  try: for dir in ")


def test_an_adapter_that_was_resident_before_is_told_as_that():
    there = wire.Added(name="a", rev="c3", state="idle", unchanged=True, num_bytes=3 << 20)
    assert _became(there) == "unchanged; it was resident already (3M)"


def test_a_refused_adapter_is_8_with_its_reason_and_the_next_step(server, loractl, folder):
    server.api.adapters.answer = LoradError(
        "adapter_invalid",
        "rank 600",
        hint="raise lora.max_rank",
        details={"reason": "E_RANK_LIMIT"},
    )
    done = loractl("add", str(folder))
    assert (done.exit, done.out) == (8, "")
    assert done.err == "error: rank 600  [E_RANK_LIMIT]\n  try: raise lora.max_rank\n"
    error = loractl("add", str(folder), "--json").error
    assert (error["code"], error["details"]) == ("adapter_invalid", {"reason": "E_RANK_LIMIT"})


def test_when_files_are_missing_it_says_what_is_there_instead(server, loractl, folder):
    server.api.adapters.answer = LoradError(
        "adapter_invalid", "no weights", details={"reason": "E_NO_WEIGHTS"}
    )
    said = loractl("add", str(folder)).err.splitlines()[0]
    assert said.startswith(f"in {folder}: README.md, adapter_config.json")


def test_weights_in_a_pickle_are_to_be_converted_and_not_renamed(server, loractl, tmp_path):
    """The daemon is not sent the file, so it advised to rename what it took for missing."""
    old = tmp_path / "old"
    old.mkdir()
    for name in ("adapter_config.json", "adapter_model.bin"):
        (old / name).write_text("{}")
    server.api.adapters.answer = LoradError(
        "adapter_invalid", "none", hint="rename it", details={"reason": "E_NO_WEIGHTS"}
    )
    told = loractl("add", str(old)).err
    assert "  try: adapter_model.bin is a pickle, and not opened: " in told
    assert "save_pretrained" in told and "rename" not in told


@pytest.mark.parametrize("reason", ["E_NO_CONFIG", "E_NESTED"])
def test_a_folder_of_adapters_is_met_with_the_first_of_them(server, loractl, tmp_path, reason):
    parent = tmp_path / "my runs"
    for name in ("b", "a", "0-logs"):
        (parent / name).mkdir(parents=True)
    for name in ("b", "a"):
        (parent / name / "adapter_config.json").write_text("{}")
    server.api.adapters.answer = LoradError(
        "adapter_invalid", "none", hint="copy it", details={"reason": reason}
    )
    assert loractl("add", str(parent)).err.endswith(f"  try: loractl add '{parent}/a'\n")
    (parent / "adapter_model.safetensors").touch()  # so the subfolders are its checkpoints
    assert loractl("add", str(parent)).err.endswith("  try: copy it\n")


def test_adding_that_takes_longer_than_its_timeout_is_7_and_goes_on(server, loractl, folder):
    server.api.adapters.add_gate = server.api.run(asyncio.Event)
    done = loractl("add", str(folder), "--timeout", "100ms")
    assert done.exit == 7
    assert "not added after 0.1 s; it goes on" in done.err
    server.api.run(server.api.adapters.add_gate.set)


@pytest.mark.parametrize(
    "argv",
    [
        ["add", "/nonexistent"],
        ["add", __file__],
        ["load"],
        ["load", "bible", "--tier", "disk"],
        ["evict"],
        ["evict", "bible", "--all"],
        ["evict", "bible", "--to", "gpu"],
        ["evict", "bible", "--drain-timeout", "soon"],
        ["set", "bible"],
        ["set", "bible", "--priority", "101"],
        ["set", "bible", "--label", "=x"],
        ["ls", "--limit", "many"],
        ["ls", "--timeout", "0"],
        ["ls", "--timeout", "later"],
        ["frobnicate"],
        ["-H", "tcp://x", "ls"],
    ],
)
def test_a_wrong_command_line_is_2_says_why_and_does_nothing(server, loractl, argv):
    done = loractl(*argv)
    assert (done.exit, done.out) == (2, "")
    error, advice = done.err.splitlines()
    assert error.startswith("error: ")
    assert advice.startswith("  try: loractl ")
    assert advice.endswith(" --help")
    assert server.calls == []
    assert loractl(*argv, "--json").error["code"] == "usage"


def test_verbs_arrive_as_they_were_meant(server, loractl):
    loractl("load", "bible", "--pin", "--tier", "ram", "--no-wait", "--timeout", "5s")
    loractl("evict", "bible", "--to", "disk", "--drain-timeout", "1m", "--now", "--force", "-y")
    loractl("evict", "--all", "-y")
    loractl("pin", "bible", "--no-load")
    loractl("unpin", "bible", "acme/sql")
    assert [call[1] for call in server.calls] == [
        wire.Names(names=("bible",), pin=True, tier="ram", wait=False, timeout_s=5.0),
        wire.Names(names=("bible",), to="disk", drain_timeout_s=60.0, now=True, force=True),
        wire.Names(all=True),
        wire.Names(names=("bible",), no_load=True),
        wire.Names(names=("bible", "acme/sql")),
    ]


def test_waiting_is_the_default(server, loractl):
    loractl("load", "bible")
    assert server.calls[0][1].wait is True
    assert server.calls[0][1].timeout_s == 60.0


@pytest.mark.parametrize("code", sorted(TABLE))
def test_a_lone_refusal_exits_with_its_own_status(server, loractl, code):
    server.failures["bible"] = LoradError(code, "no", hint="do that")
    done = loractl("pin", "bible")
    assert done.exit == TABLE[code].exit
    assert (done.out, done.err) == ("", "error: no\n  try: do that\n")


def test_one_refusal_among_several_is_1_and_each_name_is_told(server, loractl):
    server.failures["bible"] = LoradError("no_room", "all is pinned", hint="loractl unpin NAME")
    done = loractl("load", "acme/sql", "bible")
    assert done.exit == 1
    assert [line.split()[:2] for line in done.out.splitlines()] == [
        ["NAME", "RESULT"],
        ["acme/sql", "idle"],
        ["bible", "no_room"],
    ]
    assert done.err == "error: bible: all is pinned\n  try: loractl unpin NAME\n"


@pytest.mark.parametrize("argv", [["rm", "-y"], ["set", "--priority", "3"], ["load"]])
def test_json_lists_each_result_and_stderr_holds_one_object(server, loractl, argv):
    verb, *options = argv
    done = loractl(verb, "nope", "bible", *options, "--json")
    assert done.exit == 1
    assert [(i["name"], i["ok"], i["code"]) for i in done.json["items"]] == [
        ("nope", False, "model_not_found"),
        ("bible", True, ""),
    ]
    assert done.error["code"] == "partly_failed"
    alone = loractl(verb, "nope", *options, "--json")
    assert (alone.exit, alone.error["code"]) == (4, "model_not_found")
    assert alone.error["hint"] == "loractl ls"


def test_set_and_rm_go_on_after_a_failure(server, loractl):
    done = loractl("set", "nope", "acme/sql", "--priority", "7", "--label", "a=1", "--label", "b=")
    assert done.exit == 1
    assert server.calls == [
        ("patch", "acme/sql", wire.AdapterPatch(priority=7, labels={"a": "1", "b": None}))
    ]
    done = loractl("rm", "nope", "../x", "bible", "bible", "--keep-files", "--yes")
    assert done.exit == 1
    assert server.calls[1:] == [("remove", "bible", True)]
    assert "bible  removed " in done.out


@pytest.mark.parametrize(
    "argv", [["rm", "bible"], ["evict", "--all"], ["evict", "bible", "--force"]]
)
@pytest.mark.parametrize("more", [[], ["--no-input"]])
def test_without_a_terminal_what_cannot_be_undone_needs_yes(server, loractl, argv, more):
    done = loractl(*argv, *more)
    assert (done.exit, done.out) == (2, "")
    assert "needs --yes" in done.err and ("rm" not in argv or "(bible)" in done.err)
    assert "there is no terminal" in done.err
    assert server.calls == []


def test_on_a_terminal_it_is_no_input_that_is_named(server, loractl, monkeypatch):
    for module in ("app", "session"):
        monkeypatch.setattr(f"lorad.cli.{module}.may_ask", lambda: True)
    done = loractl("rm", "bible", "--no-input")
    assert done.exit == 2 and "needs --yes, as --no-input was given" in done.err
    assert server.calls == []


def test_a_daemon_that_is_asked_to_roll_back_is_called_one(server, loractl):
    done = loractl("rollback", "bible")
    assert done.exit == 4
    assert done.err.splitlines()[0] == "error: rollback is for a gateway, and this is a daemon"
    assert "loractl add DIR --replace" in done.err


def test_pinned_ones_that_evicting_all_left_alone_are_counted(server, loractl, monkeypatch):
    assert loractl("evict", "--all", "--yes").err == ""
    results = wire.Results(items=(), skipped=("acme/sql", "bible"))
    monkeypatch.setattr(server.api.adapters, "_results", lambda *_: results)
    done = loractl("evict", "--all", "--yes")
    assert (done.exit, done.err) == (0, "2 pinned skipped: --force evicts them too\n")
    done = loractl("evict", "--all", "--yes", "--json")
    assert (done.err, done.json["skipped"]) == ("", ["acme/sql", "bible"])


def test_a_dry_run_needs_no_yes(server, loractl):
    assert loractl("evict", "--all", "--dry-run").exit == 0
    assert server.calls[0][1].dry_run is True


def test_a_dry_run_of_rm_says_what_would_go_and_removes_nothing(server, loractl):
    done = loractl("rm", "bible", "nope", "--dry-run")
    assert done.exit == 1
    assert "bible  would be removed  b2b2b2b2\n" in done.out
    assert done.err.startswith("error: nope: no adapter named 'nope'")
    assert server.calls == []
    assert loractl("ls", "-o", "name").out == "acme/sql\nbible\n"


@pytest.mark.parametrize(("answer", "exit", "done"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
def test_on_a_terminal_it_asks_and_no_is_the_default(
    server, loractl, monkeypatch, answer, exit, done
):
    monkeypatch.setattr(app, "may_ask", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    outcome = loractl("rm", "bible")
    assert outcome.exit == exit
    assert len(server.calls) == done
    assert "unregister (bible)? [y/N]" in outcome.err + outcome.out


def test_leaving_a_question_with_ctrl_d_does_nothing(server, loractl, monkeypatch):
    monkeypatch.setattr(app, "may_ask", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert loractl("rm", "bible").exit == 130
    assert server.calls == []
