"""Names and wishes: what a folder is called, and what its lorad.toml asks for."""

import hashlib
import os
from pathlib import Path

import pytest

from lorad.watch.inbox import InboxOptions, describe, printable, read_options

INBOX = Path("/srv/inbox")


@pytest.mark.parametrize(
    ("relative", "name", "tenant"),
    [
        ("bible", "bible", None),
        ("acme/sql-gen", "acme/sql-gen", "acme"),
        ("a.b_c-1", "a.b_c-1", None),
    ],
)
def test_a_legal_path_is_the_name(relative: str, name: str, tenant: str | None) -> None:
    folder = describe(INBOX, INBOX / relative, None)
    assert (folder.name, folder.tenant, folder.legal) == (name, tenant, True)
    assert folder.display_name == relative


def test_of_thousands_of_folders_in_an_adapters_the_first_few_are_told_of() -> None:
    inside = [f"run-{n:04}" for n in range(3000)]
    assert describe(INBOX, INBOX / "a", None, nested=inside).nested == tuple(inside[:16])


@pytest.mark.parametrize(
    "relative",
    [
        "Bible",
        "a b",
        "-a",
        "a" * 64,
        "é",
        "[/bold]",
        "x\x1b]0;t\x07",
        "acme/sql/checkpoint-4",
        "ä/b",
    ],
)
def test_an_illegal_path_is_filed_under_its_hash(relative: str) -> None:
    folder = describe(INBOX, INBOX / relative, None)
    digest = hashlib.sha256(relative.encode()).hexdigest()[:12]
    assert (folder.name, folder.tenant, folder.legal) == (f"inbox:{digest}", None, False)
    assert folder.display_name.isascii() and folder.display_name.isprintable()


def test_case_twins_do_not_share_a_name() -> None:
    names = {describe(INBOX, INBOX / name, None).name for name in ("bible", "Bible", "BIBLE")}
    assert len(names) == 3


def test_a_name_that_is_not_utf8_is_shown_byte_by_byte() -> None:
    folder = describe(INBOX, INBOX / os.fsdecode(b"a\xff\n"), None)
    assert folder.display_name == "a\\xff\\n"
    assert not folder.legal


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31m\u202e\ud800") == "a\\x1b[31m\\u202e\\ud800"


def test_wishes_are_read() -> None:
    toml = b'model = "m"\npin = true\npriority = 90\n[labels]\nteam = "x y"\n'
    assert read_options(toml) == (InboxOptions("m", True, 90, {"team": "x y"}), "")
    assert read_options(None) == (InboxOptions(), "")
    assert read_options(b"") == (InboxOptions(), "")


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        (b"pinn = true", "unknown key 'pinn'; known are labels, model, pin, priority"),
        (b"pin = 1", "pin must be true or false"),
        (b'pin = "yes"', "pin must be true or false"),
        (b"priority = 101", "priority must be a whole number from 0 to 100"),
        (b"priority = true", "priority must be a whole number from 0 to 100"),
        (b"priority = 1.5", "priority must be a whole number from 0 to 100"),
        (b"model = 3", "model must be the name of a served model"),
        (b'labels = "x"', "labels must be a table"),
        (b"[labels]\na = 1", "labels must be a table"),
        (b'[labels]\n"a b" = "x"', "labels must be a table"),
        (b'[labels]\na = "\\u001b"', "labels must be a table"),
        (b"pin = ", "lorad.toml: "),
        (b"\xff", "lorad.toml: "),
        (b"a = " + b"[" * 5000, "lorad.toml: "),
        (b"#" * 70_000, "more than 65536 bytes"),
        (b'"\x1b[31m" = 1', "lorad.toml: "),
    ],
)
def test_a_wrong_wish_is_a_problem_of_the_folder(toml: bytes, problem: str) -> None:
    folder = describe(INBOX, INBOX / "a", toml)
    assert problem in folder.problem
    assert folder.problem.startswith("lorad.toml")
    assert folder.problem.isprintable() and len(folder.problem) < 300
    assert folder.options == InboxOptions()
