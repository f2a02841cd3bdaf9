"""Whatever happens: one line, a next step, an exit status, and no traceback."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from lorad.cli import complete, listing, serve
from lorad.cli.app import invoke

HEAVY = (
    "torch",
    "sqlalchemy",
    "starlette",
    "rich",
    "httpx",
    "openai",
    "numpy",
    "textual",
    "asyncio",
)


@pytest.fixture
def listener(tmp_path):
    """`listener(answer)`: a socket where each call gets these bytes, or silence for None.

    `listener.asked` is set once a call has come.
    """
    opened = []

    def listen(answer):
        path = tmp_path / "fake.sock"
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen()
        opened.append(server)

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                opened.append(connection)
                if connection.recv(65536):
                    listen.asked.set()
                    if answer is not None:
                        connection.sendall(answer)
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        return f"unix://{path}"

    listen.asked = threading.Event()
    yield listen
    for one in opened:
        one.close()


def http(body, status=200):
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["loractl", "--help"], "Usage: loractl"),
        (["loractl", "add", "--help"], "Usage: loractl add"),
        (["lorad", "--help"], "Usage: lorad"),
        (["lorad", "demo", "--help"], "Usage: lorad demo"),
    ],
)
def test_help_imports_nothing_heavy(argv, words):
    """Start-up in milliseconds is noted in docs/bench-log.md; this is why it stays so."""
    module = {"loractl": "app", "lorad": "serve"}[argv[0]]
    code = (
        "import atexit, sys\n"
        f"heavy = lambda: [m for m in {HEAVY} if m in sys.modules]\n"
        "atexit.register(lambda: print(heavy(), file=sys.stderr))\n"
        f"from lorad.cli import {module}\n"
        f"sys.argv = {argv}\n"
        f"{module}.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith(words)
    assert done.stderr == "[]\n"


def test_without_a_command_the_help_is_on_stderr_and_it_is_2(loractl):
    done = loractl()
    assert (done.exit, done.out) == (2, "")
    assert "Commands:\n" in done.err


@pytest.mark.parametrize(
    ("words", "cause", "command"),
    [
        (["gateway"], "Missing option '--member'.", "lorad gateway"),
        (["serve", "--nope"], "No such option: --nope", "lorad serve"),
        (["deploy", "ray"], "Missing argument 'CONFIG'.", "lorad deploy ray"),
        (["bogus"], "No such command 'bogus'.", "lorad"),
    ],
)
def test_lorad_tells_a_mistake_in_its_command_line_as_loractl_does(capsys, words, cause, command):
    assert serve.invoke(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"lorad: error: {cause}\n  try: {command} --help\n"


def test_a_mistake_below_a_group_leads_to_that_commands_own_help(loractl):
    done = loractl("tenant", "set", "--nope")
    assert done.exit == 2 and done.err.endswith("  try: loractl tenant set --help\n")


def test_nobody_there_is_3(loractl, tmp_path):
    done = loractl("-H", f"unix://{tmp_path}/none.sock", "ls")
    assert done.exit == 3
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["error", "  why", "  try"]
    error = loractl("-H", f"{tmp_path}/none.sock", "ls", "--json").error
    assert error["code"] == "unreachable"
    assert error["why"].endswith("does not exist")


def test_a_daemon_that_hangs_is_left_at_the_timeout(loractl, listener):
    done = loractl("-H", listener(None), "status", "--timeout", "200ms")
    assert done.exit == 3
    assert "does not answer yet" in done.err


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"])
def test_a_daemon_that_dies_in_mid_call_is_3_and_called_so(loractl, listener, answer):
    done = loractl("-H", listener(answer), "status")
    assert done.exit == 3
    assert "the connection broke before the answer was whole" in done.err


@pytest.mark.parametrize(
    ("answer", "exit", "words"),
    [
        (http("{}"), 1, "is not what this loractl knows"),
        (http("<html>"), 1, "is not what this loractl knows"),
        (http("oops", 500), 1, "answered 500 without an explanation"),
        (http("", 404), 1, "answered 404 without an explanation"),
        (b"SSH-2.0-OpenSSH\r\n", 3, "the connection broke"),
    ],
)
def test_a_server_that_is_something_else_is_told_apart(loractl, listener, answer, exit, words):
    done = loractl("-H", listener(answer), "status")
    assert done.exit == exit
    assert words in done.err


def test_a_fault_of_our_own_is_one_line_and_with_v_the_whole(loractl, monkeypatch, capsys):
    def broken(detail):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(listing, "_sort", broken)
    done = loractl("ls")
    assert done.exit == 1
    assert done.err.splitlines()[0] == "error: loractl failed: ZeroDivisionError: oh"
    assert "add -v" in done.err
    assert invoke(["ls", "-v"]) == 1
    assert "listing.py" in capsys.readouterr().err


def test_verbose_errors_show_their_code(loractl):
    assert loractl("show", "nope", "-v").err.splitlines()[0].endswith("[model_not_found]")


def test_json_errors_may_be_asked_for_by_the_environment(loractl, monkeypatch):
    monkeypatch.setenv("LORAD_OUTPUT", "json")
    assert loractl("show", "nope").error["code"] == "model_not_found"
    assert loractl("frobnicate").error["code"] == "usage"
    assert loractl("show", "nope", "-o", "table").err.startswith("error: ")


@pytest.mark.parametrize(
    "argv", [["show", "a\udcff"], ["load", "a\udcff"], ["run", "bible", "\udcff"]]
)
def test_an_argument_that_is_no_text_is_2(loractl, argv):
    done = loractl(*argv)
    assert done.exit == 2
    assert "not UTF-8" in done.err


# ----------------------------------------------------------------- processes of their own
@pytest.mark.parametrize("argv", [["ls"], ["ls", "--help"]])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_reader_that_leaves_is_141_and_silent(server, process, argv, buffered):
    env = {**os.environ, "LORAD_HOST": f"unix://{server.admin}", "PYTHONUNBUFFERED": buffered}
    reading, writing = os.pipe()
    os.close(reading)
    one = process(*argv, env=env, stdout=writing)
    os.close(writing)
    _, err = one.communicate(timeout=60)
    assert (one.returncode, err) == (141, b"")


def test_closed_and_full_outputs_end_without_a_traceback(server, outcome):
    closing = ["sh", "-c", f"exec {sys.executable} -m lorad.cli.app ls >&-"]
    env = {**os.environ, "LORAD_HOST": f"unix://{server.admin}"}
    done = subprocess.run(closing, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    both = ["sh", "-c", f"exec {sys.executable} -m lorad.cli.app show nope >&- 2>&-"]
    assert subprocess.run(both, env=env, timeout=60).returncode == 4
    with open("/dev/full", "w") as full:
        said = outcome("ls", host=server.admin, stdout=full)
    hint = "  try: look at where the output goes: a disk may be full\n"
    assert (said.exit, said.err) == (1, "error: No space left on device\n" + hint)


def test_a_poor_environment_is_enough(server, outcome, make_row):
    """No HOME, an ASCII locale, no colour wanted."""
    server.rows["bible"] = make_row("bible", source="\u00fcber", labels={"a": "\U0001f600"})
    env = {
        "LORAD_HOST": f"unix://{server.admin}",
        "PYTHONIOENCODING": "ascii",
        "LC_ALL": "C",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    table = outcome("ls", "-o", "wide", env=env)
    assert table.exit == 0
    assert "\\xfcber" in table.out
    assert "\x1b" not in table.out
    document = json.loads(outcome("show", "bible", "--json", env=env).out)
    assert document["adapter"]["source"] == "\u00fcber"
    assert document["adapter"]["labels"] == {"a": "\U0001f600"}
    failed = outcome("show", "n\u00f6pe", env=env)
    assert failed.exit == 4
    assert failed.err.startswith("error: no adapter named 'n\\xf6pe'")


def test_the_shell_completes_names_and_nothing_else(server, loractl, make_row, monkeypatch):
    server.rows["bible"] = make_row("bible", slot=1)
    monkeypatch.setattr(complete, "PATIENCE", 10)
    monkeypatch.setenv("_LORACTL_COMPLETE", "complete_bash")

    def completed(words):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - (words[-1] != " ")))
        done = loractl()
        assert done.err == ""
        return done.out.split()

    assert completed("loractl show ") == ["acme/sql", "bible"]
    assert completed("loractl show b") == ["bible"]
    assert completed("loractl run ") == ["tiny", "acme/sql", "bible"]
    assert completed("loractl load ") == ["acme/sql"]
    assert completed("loractl evict ") == ["bible"]
    assert completed("loractl ls --tenant ") == ["acme"]
    assert completed("loractl ls --state r") == ["ram", "registered", "remote"]
    assert completed("loractl ls --sort p") == ["prio", "pin"]


def test_who_talks_to_a_daemon_imports_nothing_to_paint_with(server):
    """rich and pygments, which httpx has for a command line of its own."""
    code = (
        "import atexit, sys\n"
        "from lorad.cli import app, complete\n"
        "heavy = lambda: [m for m in ('rich', 'pygments') if m in sys.modules]\n"
        "atexit.register(lambda: print(heavy(), file=sys.stderr))\n"
        "complete.PATIENCE = 10\n"
        "app.main()\n"
    )
    asked = {
        "LORAD_HOST": f"unix://{server.admin}",
        "_LORACTL_COMPLETE": "complete_bash",
        "COMP_WORDS": "loractl show b",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == (["bible"], "[]\n")


@pytest.mark.parametrize("key", [b"\x03", b"\x04"], ids=["ctrl-c", "ctrl-d"])
def test_who_ends_a_question_is_told_that_nothing_was_done(server, key):
    ours, theirs = os.openpty()
    code = (
        "import fcntl, sys, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl+C reaches it
        "from lorad.cli.app import invoke\n"
        "sys.exit(invoke(['rm', 'bible']))\n"
    )
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    env = {**os.environ, "LORAD_HOST": f"unix://{server.admin}"}
    with subprocess.Popen([sys.executable, "-c", code], env=env, **ends) as one:
        os.close(theirs)
        said, asked = b"", False
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                if select.select([ours], [], [], 1.0)[0]:
                    said += os.read(ours, 1000)
                elif asked:
                    # Again, as a person would: an interrupt that comes after the question and just
                    # before the wait for an answer is noted by Python, which then waits.
                    os.write(ours, key)
                if b"[y/N]" in said and not asked:
                    asked = bool(os.write(ours, key))
    os.close(ours)
    assert said.endswith(b"interrupted; nothing was done\r\n"), said
    assert (one.returncode, server.calls) == (130, [])


def test_ctrl_c_is_130(process, listener):
    one = process("status", env={**os.environ, "LORAD_HOST": listener(None)})
    assert listener.asked.wait(60)
    one.send_signal(signal.SIGINT)
    _, err = one.communicate(timeout=60)
    assert one.returncode == 130, err
    assert err.decode() == "interrupted; what the daemon had begun goes on\n"
