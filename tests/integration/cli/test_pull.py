"""pull and op: what is sent, what is printed where, and what each end costs."""

import os
import pty
import signal
import threading

import pytest

from lorad.errors import LoradError

REF = "hf:acme/sql"
#: For a test that is wrong; nothing here takes as long.
LIMIT = ("--timeout", "30s")


@pytest.fixture
def pulls(server):
    return server.api.pulls


@pytest.fixture
def move(server, pulls):
    """move(state="done"): of the one operation, on the server's loop."""

    def move(id="00000000", **values):
        server.api.run(lambda: pulls.move(id, **values))

    return move


@pytest.fixture
def meanwhile(server, pulls):
    """meanwhile(step, ...): in a thread, each once a client waits and was told of the last."""
    threads = []

    def meanwhile(*steps):
        def told(number):
            last = next(reversed(pulls.rows.values()), None)
            return pulls.pending and (number == 0 or pulls.seen is last)

        def run():
            for number, step in enumerate(steps):
                server.api.until(lambda n=number: told(n))
                step()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield meanwhile
    for thread in threads:
        thread.join(10)


def test_a_pull_waits_and_prints_the_adapter_and_its_revision(loractl, pulls, move, meanwhile):
    meanwhile(lambda: move(state="done", rev="d4" * 32, commit="c" * 40, message="take care"))
    done = loractl("pull", REF, *LIMIT)
    assert (done.exit, done.out) == (0, "sql@d4d4d4d4  hf:acme/sql\n")
    assert done.err == "take care\n"
    (start,) = pulls.starts
    assert (start.reference, start.name, start.token) == (REF, "", "")
    assert not (start.replace or start.pin or start.load or start.offline or start.dry_run)


def test_every_wish_is_passed_on(loractl, pulls, tmp_path):
    token = tmp_path / "token"
    token.write_text("hf_abc\n")
    token.chmod(0o600)
    words = "--revision v1 --name acme/x --replace --pin --load --offline --no-wait"
    done = loractl("pull", REF, *words.split(), "--token-file", str(token))
    assert (done.exit, done.out, done.err) == (0, "00000000\n", "")
    (start,) = pulls.starts
    assert (start.revision, start.name, start.token) == ("v1", "acme/x", "hf_abc")
    assert start.replace
    assert start.pin
    assert start.load
    assert start.offline
    assert loractl("pull", REF, "--no-wait", "--json").json["id"] == "00000001"
    token.chmod(0o644)
    assert "chmod 600" in loractl("pull", REF, "--no-wait", "--token-file", str(token)).err


def test_a_token_file_that_is_none_is_refused_before_anything_is_sent(loractl, pulls, tmp_path):
    for content in (b"", b"two words", b"\xff\xfe", b"x" * 5000):
        (tmp_path / "t").write_bytes(content)
        done = loractl("pull", REF, "--token-file", str(tmp_path / "t"))
        assert (done.exit, done.out) == (2, "")
    assert loractl("pull", REF, "--token-file", str(tmp_path)).exit == 2
    assert loractl("pull", REF, "--token-file", str(tmp_path / "absent")).exit == 1
    assert pulls.starts == []


def test_a_dry_run_prints_files_sizes_and_the_commit(loractl, pulls):
    done = loractl("pull", REF, "--dry-run")
    assert done.out.splitlines() == [
        "FILE                       SIZE",
        "adapter_config.json         700",
        "adapter_model.safetensors     -",
        f"sql  -  hf:acme/sql@{'c' * 40}",
    ]
    assert pulls.starts[0].dry_run
    assert pulls.rows == {}
    plan = loractl("pull", REF, "--dry-run", "--json").json
    assert (plan["schema"], plan["commit"]) == ("lorad/pull-plan.v1", "c" * 40)


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        ("source_not_found", "", 4),
        ("source_denied", "", 5),
        ("name_taken", "E_NAME_TAKEN", 6),
        ("adapter_invalid", "E_RANK_LIMIT", 8),
        ("insufficient_storage", "", 9),
        ("source_unreachable", "", 1),
    ],
)
def test_a_failed_pull_ends_with_its_codes_status(loractl, pulls, code, reason, status):
    pulls.first = {
        "state": "failed",
        "code": code,
        "reason": reason,
        "message": "so it is",
        "hint": "do this",
    }
    done = loractl("pull", REF, *LIMIT)
    tag = f"  [{reason}]" if reason else ""
    assert (done.exit, done.out) == (status, "")
    assert done.err == f"error: so it is{tag}\n  try: do this\n"
    error = loractl("pull", REF, "--json").error
    assert (error["code"], error["details"]["operation"]) == (code, "00000001")


def test_what_the_daemon_refuses_at_once_is_told(loractl, pulls):
    pulls.answer = LoradError("bad_reference", "no such form", hint="write hf:ORG/REPO")
    assert loractl("pull", "nonsense").err == "error: no such form\n  try: write hf:ORG/REPO\n"
    assert loractl("pull", "nonsense").exit == 2


def test_a_timeout_is_7_prints_the_id_and_leaves_the_operation_alone(loractl, pulls):
    done = loractl("pull", REF, "--timeout", "50ms")
    assert (done.exit, done.out) == (7, "00000000\n")
    assert "operation 00000000 goes on" in done.err
    assert "loractl op show 00000000" in done.err
    assert pulls.rows["00000000"].state == "running"
    late = loractl("pull", REF, "--timeout", "50ms", "--json")
    assert (late.exit, late.json["id"], late.error["code"]) == (7, "00000001", "deadline_exceeded")


def test_ctrl_c_is_130_and_leaves_the_operation_alone(server, pulls, process):
    one = process("pull", REF, host=server.admin)
    server.api.until(lambda: pulls.pending)
    one.send_signal(signal.SIGINT)
    out, err = one.communicate(timeout=60)
    assert (one.returncode, out) == (130, b"")
    assert err.decode() == "interrupted; operation 00000000 goes on: loractl op show 00000000\n"
    assert pulls.rows["00000000"].state == "running"


def test_progress_is_a_line_for_every_tenth_where_there_is_no_terminal(
    loractl, pulls, move, meanwhile
):
    pulls.first = {"state": "running", "total_bytes": 1000}
    meanwhile(
        lambda: move(done_bytes=90),
        lambda: move(done_bytes=150),
        lambda: move(done_bytes=190),
        lambda: move(done_bytes=1000),
        lambda: move(state="done", rev="d4" * 32),
    )
    done = loractl("pull", REF, *LIMIT)
    assert done.err.splitlines() == [
        "hf:acme/sql: running 15%  150 of 0.98K",
        "hf:acme/sql: running 100%  0.98K of 0.98K",
    ]


@pytest.mark.parametrize("word", ["--json", "-q"])
def test_progress_is_silent_for_programs_and_with_quiet(loractl, pulls, move, meanwhile, word):
    pulls.first = {"state": "running", "total_bytes": 1000, "done_bytes": 500}
    meanwhile(lambda: move(state="done", rev="d4" * 32))
    done = loractl("pull", REF, word, *LIMIT)
    assert (done.exit, done.err) == (0, "")


def test_progress_is_one_bar_on_a_terminal_and_goes_at_the_end(server, pulls, process, move):
    pulls.first = {"state": "running", "total_bytes": 1000, "done_bytes": 500}
    ours, theirs = pty.openpty()
    one = process("pull", REF, host=server.admin, stderr=theirs)
    os.close(theirs)
    server.api.until(lambda: pulls.pending, seconds=30)
    move(state="done", done_bytes=1000, rev="d4" * 32)
    out, _ = one.communicate(timeout=60)
    drawn = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the last writer is gone
            break
        if not piece:
            break
        drawn += piece
    os.close(ours)
    assert out == b"sql@d4d4d4d4  hf:acme/sql\n"
    text = drawn.decode()
    assert "[############------------] 50%  500 of 0.98K" in text
    assert "\n" not in text
    assert text.endswith("\r")
    assert not text.rsplit("\r", 2)[-2].strip()


def test_op_lists_shows_and_cancels(loractl, pulls, move):
    assert loractl("op", "ls").out.split() == ["ID", "KIND", "TARGET", "STATE", "PROGRESS", "AGE"]
    for name in ("a", "b"):
        loractl("pull", f"hf:acme/{name}", "--no-wait", "--name", name)
    move("00000000", state="failed", code="source_busy", message="later", hint="wait")
    move("00000001", total_bytes=1000, done_bytes=430)
    rows = [line.split() for line in loractl("op", "ls", "--no-headers").out.splitlines()]
    assert rows == [
        ["00000000", "pull", "hf:acme/a", "failed", "-", "0s"],
        ["00000001", "pull", "hf:acme/b", "running", "43%", "0s"],
    ]
    assert loractl("op", "ls", "--live", "-o", "name").out == "00000001\n"
    listed = loractl("op", "ls", "--json").json
    assert listed["schema"] == "lorad/operations.v1"
    assert [item["id"] for item in listed["items"]] == ["00000000", "00000001"]
    shown = loractl("op", "show", "00000000").out
    assert "why      source_busy: later" in shown
    assert "try      wait" in shown
    assert loractl("op", "show", "00000001", "--json").json["done_bytes"] == 430
    assert loractl("op", "cancel", "00000001").out == "00000001  cancelled\n"
    assert loractl("op", "cancel", "00000000").exit == 6
    assert loractl("op", "show", "nosuch").exit == 4
    assert loractl("op", "cancel", "../../x").exit == 4
    assert loractl("op").exit == 2
    assert loractl("op", "frobnicate").exit == 2


def test_a_cancelled_pull_is_1_for_whoever_waits(loractl, pulls, move, meanwhile):
    meanwhile(lambda: move(state="cancelled"))
    done = loractl("pull", REF, *LIMIT)
    assert (done.exit, done.err) == (1, "error: operation 00000000 was cancelled\n")


def test_a_reference_is_a_name_like_any_other(server, loractl, make_row):
    for name in (f"hf:acme/sql@{'c' * 40}", "s3://bucket/x/../y"):
        server.rows[name] = make_row(name)
        assert loractl("show", name, "-o", "name").out == f"{name}\n"
        assert loractl("set", name, "--priority", "7").exit == 0
        assert loractl("rm", name, "-y").exit == 0
