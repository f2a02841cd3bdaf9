"""`loractl run`: the prompt's ways in, the answer's ways out, and every way to stop."""

import asyncio
import io
import signal
import sys

import msgspec
import pytest

from lorad.errors import LoradError


@pytest.fixture
def say(monkeypatch):
    """Put bytes on stdin."""

    def put(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))

    return put


def prompt_of(server):
    return bytes(server.api.engine.submits[-1].prompt).decode()


def test_it_streams_the_answer_and_ends_the_line(server, loractl):
    done = loractl("run", "bible", "Hi")
    assert (done.exit, done.out, done.err) == (0, "Hello world\n", "")
    assert prompt_of(server) == "<user>Hi\n<assistant>"


def test_options_reach_the_engine(server, loractl):
    words = "--system S --max-tokens 5 --temperature 0.5 --seed 7"
    assert loractl("run", "tiny", "Hi", *words.split()).out == "Hello\n"
    submit = server.api.engine.submits[-1]
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (5, 0.5, 7)
    assert prompt_of(server) == "<system>S\n<user>Hi\n<assistant>"


def test_raw_leaves_the_template_out(server, loractl):
    assert loractl("run", "bible", "Hi", "--raw").out == "Hello world\n"
    assert prompt_of(server) == "Hi"


def test_an_answer_in_one_piece_is_the_same_answer(server, loractl):
    assert loractl("run", "bible", "Hi", "--no-stream").out == "Hello world\n"
    assert loractl("run", "bible", "Hi", "--no-stream", "--raw").out == "Hello world\n"


@pytest.mark.parametrize("dash", [[], ["-"]])
def test_the_prompt_may_come_from_stdin_in_utf_8_whatever_the_locale(server, loractl, say, dash):
    say("Gr\u00fc\u00dfe\nan alle\n".encode())
    assert loractl("run", "bible", *dash).exit == 0
    assert prompt_of(server) == "<user>Gr\u00fc\u00dfe\nan alle\n<assistant>"


@pytest.mark.parametrize("data", [b"", b"\n", b"\xff\xfe"])
def test_stdin_without_a_prompt_is_2(server, loractl, say, data):
    say(data)
    done = loractl("run", "bible")
    assert done.exit == 2
    assert done.err.startswith("error: stdin is ")


def test_a_terminal_is_not_waited_for(server, loractl, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert loractl("run", "bible").exit == 2
    monkeypatch.setattr(sys, "stdin", None)
    assert loractl("run", "bible").exit == 2


def test_an_unknown_model_is_4_and_never_the_base(server, loractl):
    done = loractl("run", "nope", "Hi")
    assert (done.exit, done.out) == (4, "")
    assert done.err == "error: no adapter named 'nope'\n  try: loractl ls\n"
    assert server.api.engine.submits == []


def test_what_the_admin_socket_knows_of_a_missing_name_is_told(server, loractl):
    server.failures["bibel"] = LoradError("model_not_found", "no bibel", hint="did you mean bible?")
    done = loractl("run", "bibel", "Hi")
    assert (done.exit, done.err) == (4, "error: no bibel\n  try: did you mean bible?\n")
    no_admin = loractl("-H", str(server.inference), "run", "bibel", "Hi")
    assert (no_admin.exit, no_admin.err.splitlines()[1]) == (4, "  try: loractl ls")


@pytest.mark.parametrize("rev", [None, "c3" * 32], ids=["refused", "damaged later"])
def test_a_quarantined_adapter_says_so_to_its_operator(server, loractl, make_row, rev):
    server.rows["bad"] = make_row(
        "bad", state="quarantined", rev=rev, reason="E_TRUNCATED", reason_message="size 3"
    )
    done = loractl("run", "bad", "Hi")
    assert (done.exit, done.out) == (8, "")
    assert (
        done.err == "error: 'bad' is quarantined: size 3  [E_TRUNCATED]\n  try: loractl show bad\n"
    )
    assert loractl("ls").err == "1 quarantined: loractl show NAME says why\n"


def test_an_adapter_whose_replacement_was_refused_is_told_of_below_the_list(
    server, loractl, make_row
):
    """Its row is that of a healthy one, and operators took the new content for served."""
    server.rows["old"] = make_row("old", state="idle", rev="c3" * 32, reason="E_TRUNCATED")
    told = "1 serves earlier content, as the newest was refused: loractl show old\n"
    assert loractl("ls").err == told
    server.rows["two"] = make_row("two", state="ram", rev="c4" * 32, reason="E_TRUNCATED")
    assert loractl("ls").err.startswith("2 serve earlier content")


def test_a_daemon_that_is_not_ready_is_10(server, loractl):
    server.api.engine.not_ready = LoradError("loading_base", "the base model is still loading")
    done = loractl("run", "bible", "Hi")
    assert done.exit == 10
    assert done.err.splitlines()[1] == "  try: loractl ping says when it is ready"


def test_a_program_gets_text_usage_and_identity(server, loractl):
    server.api.engine.reply = "\u00e9\x1b[2J".encode()
    document = loractl("run", "bible", "Hi", "--json").json
    assert document["schema"] == "lorad/run.v1"
    assert document["text"] == "\u00e9\x1b[2J"
    assert document["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == 7
    assert document["system_fingerprint"].endswith("b2b2b2b2")
    assert document["seconds"] >= document["first_token_seconds"] >= 0


def test_generated_control_characters_do_not_reach_the_terminal(server, loractl):
    server.api.engine.reply = b"a\x1b[2J\n\tb\x07"
    assert loractl("run", "bible", "Hi").out == "a?[2J\n\tb?\n"


@pytest.mark.parametrize("flag", ["--stats", "-v"])
def test_stats_go_to_stderr(server, loractl, flag):
    done = loractl("run", "bible", "Hi", flag)
    assert done.out == "Hello world\n"
    assert "20 prompt tokens (0 cached), 12 generated in " in done.err
    assert loractl("run", "bible", "Hi", flag, "-q").err == ""


def test_a_failure_in_mid_answer_keeps_what_came_and_says_why(server, loractl):
    server.api.engine.error = ("engine_restarting", "the engine was restarted")
    done = loractl("run", "bible", "Hi")
    assert done.exit == 10
    assert done.out == "Hello worl\n" or done.out.startswith("Hello")
    assert done.out.endswith("\n")
    assert done.err.startswith("error: the engine was restarted")


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
@pytest.mark.parametrize("at", [0, 5])
def test_its_timeout_aborts_the_request_and_is_7_though_nothing_comes(server, loractl, at, flags):
    server.api.hold_engine(at=at)
    done = loractl("run", "bible", "Hi", "--timeout", "300ms", *flags)
    assert done.exit == 7
    assert done.err.startswith("error: not answered after 0.3 s; the request is aborted")
    server.api.until(lambda: not server.api.engine.running)


def test_the_inference_socket_will_do_for_whom_it_is_all(server, loractl):
    assert loractl("-H", f"unix://{server.inference}", "run", "bible", "Hi").out == "Hello world\n"
    done = loractl("-H", f"unix://{server.inference}", "ls")
    assert done.exit == 4
    assert "is this the admin socket?" in done.err


def test_status_of_a_gateway_without_sockets_says_where_it_was_reached(
    server, loractl, monkeypatch
):
    listing = server.api.listing
    said = msgspec.structs.replace(listing.status(), inference_socket="", admin_socket="")
    monkeypatch.setattr(listing, "status", lambda: said)
    rows = [line.split() for line in loractl("status").out.splitlines()]
    assert ["inference", f"unix://{server.admin}"] in rows
    assert ["admin", f"unix://{server.admin}"] in rows


def test_ctrl_c_aborts_the_request_and_exits_130(server, process):
    server.api.hold_engine(at=5)
    running = process("run", "bible", "Hi", host=server.admin)
    assert running.stdout.read(5) == b"Hello"
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert err.decode() == "interrupted; the request is aborted\n"
    assert out == b"\n"
    server.api.until(lambda: not server.api.engine.running)
    assert server.api.engine.aborts


def test_a_reader_that_leaves_aborts_the_request_and_is_141(server, process):
    gate = server.api.hold_engine(at=5)
    running = process("run", "bible", "Hi", host=server.admin)
    assert running.stdout.read(5) == b"Hello"
    running.stdout.close()
    server.api.run(gate.set)
    assert running.wait(30) == 141
    assert running.stderr.read() == b""
    server.api.until(lambda: not server.api.engine.running)


def test_ctrl_c_while_the_daemon_works_says_that_it_goes_on(server, process, tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    server.api.adapters.add_gate = gate = server.api.run(asyncio.Event)
    adding = process("add", str(folder), host=server.admin)
    server.api.until(lambda: server.calls, 30)
    adding.send_signal(signal.SIGINT)
    _, err = adding.communicate(timeout=30)
    assert adding.returncode == 130
    assert err.decode() == "interrupted; what the daemon had begun goes on\n"
    server.api.run(gate.set)
    server.api.until(lambda: server.api.adapters.added_files == {"adapter_config.json": 2})


def test_what_a_request_may_have_besides_is_passed_on_as_json_or_as_text(server, loractl):
    asked = ["--extra", "top_p=0.5", "--extra", 'stop=["x", "y"]', "--extra", "user=me"]
    assert loractl("run", "bible", "hi", *asked).exit == 0
    submit = server.api.engine.submits[-1]
    assert submit.sampling.top_p == 0.5


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("top_p", "write key=value, such as top_p=0.9"),
        ("=1", "write key=value, such as top_p=0.9"),
        ("model=devil", "the command says that itself"),
        ("stream=false", "the command says that itself"),
    ],
)
def test_an_extra_that_is_none_is_a_slip(loractl, extra, words):
    done = loractl("run", "bible", "hi", "--extra", extra)
    assert done.exit == 2 and words in done.err


@pytest.mark.parametrize("value", ["7", "NaN", "Infinity", "1e999", "[" * 3000])
def test_an_extra_that_the_daemon_does_not_take_is_refused_in_its_words(loractl, value):
    """What is no number for JSON must not go as null, which means that nothing was said."""
    done = loractl("run", "bible", "hi", "--extra", f"top_p={value}")
    assert done.exit == 2 and "top_p" in done.err
