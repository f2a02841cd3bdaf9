"""Log lines, and the error table."""

import json
import logging
import os

import pytest

from engine import errors as engine_errors
from lorad import logs
from lorad.errors import TABLE, LockHeld, LoradError, from_engine, meaning


def record(message, *args, error=None):
    return logging.LogRecord("lorad.x", logging.WARNING, "f.py", 1, message, args, error)


def test_foreign_text_can_neither_forge_a_line_nor_drive_a_terminal():
    line = logs.TextLines(journal=False).format(record("name %s", "a\nERROR b \x1b]0;x\x07"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith(r"WARNING lorad.x: name a\nERROR b \x1b]0;x\x07")


def test_the_journal_gets_priorities_and_no_time():
    assert logs.TextLines(journal=True).format(record("hi")) == "<4>lorad.x: hi"


def test_each_line_of_a_traceback_is_an_entry_of_its_priority():
    lines = logs.TextLines(journal=True).format(record("hi", error=raised("a\x1b\nb"))).split("\n")
    assert len(lines) > 3 and all(line.startswith("<4>") for line in lines)
    assert not any("\x1b" in line for line in lines)
    whole = logs.JsonLines(journal=True).format(record("hi", error=raised("x")))
    assert whole.startswith("<4>{") and "\n" not in whole


def test_the_journal_is_known_by_its_stream_and_not_by_an_inherited_variable(tmp_path):
    with (tmp_path / "log").open("w") as stream:
        found = os.fstat(stream.fileno())
        assert logs.is_journal(f"{found.st_dev}:{found.st_ino}", stream)
        assert not logs.is_journal(f"{found.st_dev}:{found.st_ino + 1}", stream)
        assert not logs.is_journal("", stream)


def test_an_error_at_the_start_has_a_priority_too(tmp_path, monkeypatch, capsys):
    with (tmp_path / "log").open("w+") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        found = os.fstat(stream.fileno())
        env = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        LockHeld("another lorad", hint="loractl status").print(logs.error_mark(env))
        assert logs.error_mark({}) == ""
        stream.seek(0)
        said = stream.read()
    assert said == "<3>lorad: error: another lorad\n<3>  try: loractl status\n"


def test_an_event_is_fields_in_json():
    line = record("adapter.added a")
    line.fields = {"event": "adapter.added", "name": "a", "rev": "", "cause": "in\nbox"}
    fields = json.loads(logs.JsonLines().format(line))
    assert (fields["event"], fields["name"], fields["cause"]) == ("adapter.added", "a", "in\\nbox")
    assert "rev" not in fields


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        ("lorad_abcdefgh_" + "k" * 43, "lorad_abcdefgh_***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("hf_" + "A1" * 17, "hf_***"),
        ("https://user:pass@host/x", "https://***@host/x"),
        ("https://h/x?X-Amz-Signature=ab12&y=1", "https://h/x?X-Amz-Signature=***&y=1"),
        ("sk-" + "a" * 40, "sk-***"),
        ("task-force sk-ip hf_hub lorad_state https://host:80/x@y", None),
    ],
)
def test_a_secret_that_slipped_into_a_line_is_not_shown(secret, shown):
    for form in (logs.TextLines(journal=False), logs.JsonLines()):
        line = form.format(record("got %s", secret, error=raised(secret)))
        assert line.count(shown or secret) == 2
        assert shown is None or secret not in line


def raised(text):
    try:
        raise ValueError(text)
    except ValueError as error:
        return ValueError, error, error.__traceback__


def test_a_line_that_repeats_without_end_is_let_through_now_and_then():
    now = 100.0
    sparse = logs.Sparse(10.0, clock=lambda: now)
    full = (OSError, OSError(24, "Too many open files"), None)
    other = (ValueError, ValueError("not that"), None)
    again = [
        record("socket.accept() out of system resources: %d", n, error=full) for n in range(1000)
    ]
    assert [sparse.filter(line) for line in again].count(True) == 1
    assert sparse.filter(record("something else"))
    assert sparse.filter(record("socket.accept() out of system resources", error=other))
    now = 110.0
    assert sparse.filter(again[0])
    assert all(sparse.filter(record(str(n))) for n in range(1000))  # remembered, within bounds
    assert len(sparse._told) <= 100


def test_json_lines_are_one_object_each():
    try:
        raise ValueError("why")
    except ValueError as error:
        line = logs.JsonLines().format(record("hi", error=(ValueError, error, error.__traceback__)))
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("warning", "lorad.x", "hi")
    assert "ValueError: why" in fields["error"]
    assert "\n" not in line


def test_every_code_that_the_engine_raises_is_in_the_table():
    for kind in vars(engine_errors).values():
        if isinstance(kind, type) and issubclass(kind, engine_errors.EngineError):
            assert kind.code in TABLE or kind.code == "no_device", kind


def test_an_engines_error_keeps_its_code_reason_and_hint():
    error = from_engine(engine_errors.AdapterInvalid("E_SHAPE", "wrong", hint="train again"))
    assert (error.code, error.status, error.exit) == ("adapter_invalid", 422, 8)
    assert (error.details, error.hint) == ({"reason": "E_SHAPE"}, "train again")


def test_a_code_that_nobody_entered_is_our_own_fault():
    assert meaning("surprise").status == 500
    with pytest.raises(AssertionError, match="surprise"):
        LoradError("surprise", "x")


def test_codes_that_are_worth_trying_again_say_when():
    for code, row in TABLE.items():
        assert (LoradError(code, "x").retry_after is not None) == row.retryable, code


def test_a_start_error_is_one_line_and_the_next_step(capsys):
    LockHeld("another lorad", hint="loractl status").print()
    assert capsys.readouterr().err == "lorad: error: another lorad\n  try: loractl status\n"
