"""The filter of a table: what is typed, and what is left."""

import pytest

from lorad.tui.filtering import parse

FIELDS = {"state": "idle", "pin": "no", "tenant": "acme"}


@pytest.mark.parametrize(
    "text, found",
    [
        ("", True),
        ("   ", True),
        ("sql", True),
        ("SQL", True),
        ("sql gen", True),
        ("sql french", False),
        ("!sql", False),
        ("!french", True),
        ("state:idle", True),
        ("state:id", True),
        ("state:active", False),
        ("!state:active", True),
        ("state:idle !pin:yes", True),
        ("state:", True),
        ("!", True),
        ("!state:", True),
        ("tenant:acme sql", True),
        ("nofield:idle", False),
    ],
)
def test_a_row_is_shown_if_every_word_holds(text, found):
    assert parse(text).matches("acme/sql-gen", FIELDS) is found


def test_a_colon_that_is_in_a_name_is_looked_for_there():
    assert parse("hf:acme").matches("hf:acme/sql", {"state": "idle"})


def test_nothing_typed_is_no_filter():
    assert not parse("  ! state: ")
    assert parse("x")
