"""`loractl top`: the board once where there is no terminal, and what is told when it cannot be."""

import json
import os
import subprocess
import sys
import threading

import pytest

from lorad.cli import top
from lorad.wire_stream import Slot
from tests.fakes import terminals

NAMES = ("acme/sql", "\x1b]0;owned\x07[/bold]")


def slot(name, place):
    return Slot(
        name=name,
        rev="a1" * 32,
        slot=place,
        state="idle",
        pinned=False,
        priority=50,
        rank=8,
        gpu_bytes=84 << 20,
    )


@pytest.fixture(autouse=True)
def rows(server):
    server.api.board.parts = {"slots": {name: slot(name, i) for i, name in enumerate(NAMES)}}


@pytest.fixture
def shown(monkeypatch):
    """As if all were terminals; what was shown."""
    calls = []
    monkeypatch.setattr(top, "can_show", lambda: True)
    monkeypatch.setattr(top, "show", lambda *call: calls.append(call))
    return calls


@pytest.fixture
def tape(tmp_path):
    return tmp_path / "churn.jsonl"


# ----------------------------------------------------------------- once
@pytest.mark.parametrize("words", [["top"], ["tui"], ["top", "--once"]])
def test_without_a_terminal_it_is_the_board_as_text(loractl, words):
    done = loractl(*words)
    assert (done.exit, done.err) == (0, "")
    assert done.out.startswith("lorad ")
    assert "acme/sql" in done.out
    assert "?]0;owned?[/bold]" in done.out, "a foreign name is text"
    assert "\x1b" not in done.out


def test_ascii_is_ascii_and_so_is_what_another_locale_cannot_show(loractl, server, outcome):
    assert loractl("top", "--ascii").out.isascii()
    env = {**os.environ, "LORAD_HOST": f"unix://{server.admin}", "PYTHONIOENCODING": "latin-1"}
    done = outcome("top", env=env)
    assert done.exit == 0
    assert done.out.isascii()


@pytest.mark.parametrize("words", [["--json"], ["-o", "jsonl"]])
def test_for_a_program_it_is_the_board_as_json_with_and_without_once(loractl, shown, words):
    for once in ([], ["--once"]):
        done = loractl("top", *once, *words)
        assert done.exit == 0
        assert done.json["schema"] == "lorad/stream.v1"
        assert set(done.json["slots"]) == set(NAMES)
    assert not shown


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_can_nothing_gets_the_text(loractl, monkeypatch, term):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", term)
    assert not top.can_show()
    assert loractl("top").out.startswith("lorad ")


def test_once_takes_neither_textual_nor_asyncio(server, outcome):
    code = (
        "import sys; from lorad.cli.app import invoke; status = invoke(['top']); "
        "assert not {'textual', 'asyncio', 'torch'} & set(sys.modules); sys.exit(status)"
    )
    env = {**os.environ, "LORAD_HOST": f"unix://{server.admin}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_reader_that_leaves_is_141_and_a_closed_output_0(server, process):
    env = {**os.environ, "LORAD_HOST": f"unix://{server.admin}"}
    reading, writing = os.pipe()
    os.close(reading)
    one = process("top", env=env, stdout=writing)
    os.close(writing)
    _, err = one.communicate(timeout=60)
    assert (one.returncode, err) == (141, b"")
    closing = ["sh", "-c", f"exec {sys.executable} -m lorad.cli.app top >&-"]
    done = subprocess.run(closing, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


# ----------------------------------------------------------------- shown
def test_a_terminal_gets_the_dashboard_and_how_it_is_wanted(loractl, shown, server):
    words = ["--ascii", "--interval", "500ms", "--read-only", "--screen", "3"]
    assert loractl("top", *words, "--theme", "mono", "--no-mouse").exit == 0
    [(source, look, connect)] = shown
    assert source.title == f"unix://{server.admin}"
    assert look == top.Look(True, "mono", 0.5, True, 3, False)
    with connect() as client:
        assert set(client.board().slots) == set(NAMES)


def test_what_comes_is_recorded_and_is_shown_without_a_daemon(loractl, monkeypatch, tape):
    def look(source, how, connect):
        next(iter(source.messages(threading.Event())))

    monkeypatch.setattr(top, "can_show", lambda: True)
    monkeypatch.setattr(top, "show", look)
    assert loractl("top", "--record", str(tape)).exit == 0
    assert json.loads(tape.read_text().splitlines()[0])["schema"] == "lorad/recording.v1"
    nowhere = ["-H", "unix:///nowhere/admin.sock", "top", "--replay", str(tape)]
    done = loractl(*nowhere, "--once")
    assert (done.exit, "acme/sql" in done.out) == (0, True)
    assert set(loractl(*nowhere, "--json").json["slots"]) == set(NAMES)
    done = loractl("top", "--record", str(tape))
    assert (done.exit, "is there already" in done.err) == (2, True)


def test_a_replay_asks_nobody(loractl, shown, tape):
    tape.write_text('{"schema": "lorad/recording.v1"}\n')
    words = ["-H", "unix:///nowhere/admin.sock", "top", "--replay", str(tape), "--speed", "4"]
    assert loractl(*words).exit == 0
    [(source, _, connect)] = shown
    assert (source.title, connect) == ("replay churn.jsonl x4", None)


# ----------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--interval", "soon"], "not a duration"),
        (["--interval", "100ms"], "200ms to 10s"),
        (["--interval", "11s"], "200ms to 10s"),
        (["--speed", "2"], "--replay"),
        (["--speed", "0", "--replay", "x"], "above 0"),
        (["--speed", "inf", "--replay", "x"], "1000 at most"),
        (["--record", "x", "--replay", "y"], "not a recording"),
        (["--record", "x", "--once"], "--once shows none"),
        (["--record", "x"], "no terminal"),
        (["--screen", "8"], "equal to 7"),
    ],
)
def test_what_cannot_be_is_2_and_leaves_no_file(loractl, monkeypatch, tmp_path, words, why):
    monkeypatch.chdir(tmp_path)
    done = loractl("top", *words)
    assert done.exit == 2
    assert why in done.err
    assert not list(tmp_path.iterdir())


def test_a_theme_that_there_is_not_is_named_with_those_that_there_are(loractl, monkeypatch):
    monkeypatch.setattr(top, "can_show", lambda: True)
    done = loractl("top", "--theme", "neon")
    assert done.exit == 2
    assert "mono" in done.err


def test_a_daemon_that_is_away_is_3_before_anything_is_shown(loractl, shown, tmp_path):
    for words in (["top"], ["top", "--once"]):
        done = loractl("-H", str(tmp_path / "none.sock"), *words)
        assert done.exit == 3
        assert "cannot reach lorad" in done.err
    assert not shown


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("hello", "is no recording of loractl top"),
        ('{"schema": "lorad/recording.v1"}\n', "before its first board"),
        ('{"schema": "lorad/recording.v1"}\n{"at": 1, "board": 3}\n', "damaged at line 2"),
        ('{"schema": "lorad/recording.v7", "version": "3.1"}\n', "by loractl 3.1 in a newer form"),
    ],
)
def test_a_recording_that_is_none_is_1_and_a_line_with_the_next_step(loractl, tape, content, why):
    if content is not None:
        tape.write_text(content)
    done = loractl("top", "--replay", str(tape))
    assert done.exit == 1
    error, hint = done.err.splitlines()
    assert why in error
    step = "as new, or newer" if "newer form" in why else "--record FILE"
    assert hint.startswith("  try: ") and (step in hint or content is None)


def test_without_textual_it_says_so_and_what_works(loractl, monkeypatch):
    monkeypatch.setattr(top, "can_show", lambda: True)
    for name in list(sys.modules):
        if name.partition(".")[0] == "textual" or name.startswith("lorad.tui."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    done = loractl("top")
    assert done.exit == 1
    assert "needs the Python package textual" in done.err
    assert "loractl top --once" in done.err


# ----------------------------------------------------------------- in a terminal
@pytest.mark.slow
def test_it_lives_through_the_daemons_end_and_its_return(make_server, tmp_path):
    parts = {"slots": {"acme/sql": slot("acme/sql", 0)}}
    first = make_server(tmp_path)
    first.api.board.parts = parts
    words = ("-H", f"unix://{first.admin}", "top", "--interval", "200ms", "--ascii")
    with terminals.loractl(*words) as terminal:
        terminal.wait_for("acme/sql")
        first.close()
        terminal.wait_for("DISCONNECTED")
        assert terminal.program.poll() is None
        (tmp_path / "staging").rmdir()  # that of the first
        second = make_server(tmp_path)
        second.api.board.parts = {"slots": {"acme/other": slot("acme/other", 0)}}
        terminal.wait_for("acme/other")
        terminal.type("q")
        assert terminal.end() == 0
        assert not terminals.modes(terminal.read)
        assert terminal.settings == terminal.before


@pytest.mark.slow
def test_it_is_left_at_once_while_the_daemon_is_away(make_server, tmp_path):
    server = make_server(tmp_path)
    server.api.board.parts = {"slots": {"acme/sql": slot("acme/sql", 0)}}
    with terminals.loractl("-H", f"unix://{server.admin}", "top") as terminal:
        terminal.wait_for("acme/sql")
        server.close()
        terminal.wait_for("DISCONNECTED")
        terminal.type("q")
        assert terminal.end() == 0
        assert terminal.settings == terminal.before


@pytest.mark.slow
def test_a_recording_on_a_full_disk_stops_and_the_dashboard_goes_on(make_server, tmp_path):
    server = make_server(tmp_path)
    server.api.board.parts = {"slots": {"acme/sql": slot("acme/sql", 0)}}
    tape = tmp_path / "tape.jsonl"
    words = ("-H", f"unix://{server.admin}", "top", "--record", str(tape), "--interval", "200ms")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    with terminals.loractl(*words, before=limit) as terminal:
        terminal.wait_for("record.stopped")
        terminal.type("q")
        assert terminal.end() == 0
        assert terminal.settings == terminal.before
    assert tape.stat().st_size <= 2000
    assert tape.read_bytes().endswith(b"\n")


@pytest.mark.slow
def test_a_dumb_terminal_gets_the_text(make_server, tmp_path):
    server = make_server(tmp_path)
    server.api.board.parts = {"slots": {"acme/sql": slot("acme/sql", 0)}}
    with terminals.loractl("-H", f"unix://{server.admin}", "top", TERM="dumb") as terminal:
        assert terminal.end() == 0
        assert "acme/sql" in terminal.read
        assert "\x1b" not in terminal.read
