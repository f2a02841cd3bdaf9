"""What is printed: inert, one record a line, cut only for a terminal."""

import io
import json
import os
import sys

import msgspec
import pytest

from lorad.cli import output
from lorad.cli.options import Options
from lorad.cli.output import (
    Column,
    Table,
    age_of,
    human_age,
    human_bytes,
    human_ratio,
    json_text,
    one_line,
    plain,
    print_items,
    print_line,
    print_text,
)

HOSTILE = "a\x1b]0;pwn\x07b\x9b31m\u202ec\r\n\x7f[/bold]"


class Item(msgspec.Struct):
    name: str
    size: int


class Page(msgspec.Struct):
    items: list[Item]


ITEMS = [Item("bible", 7), Item("devil", 12345)]
COLUMNS = (
    Column("NAME", lambda i: i.name),
    Column("SIZE", lambda i: str(i.size), right=True),
    Column("MORE", lambda i: "", wide=True),
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(capsys, form, items=ITEMS, **options):
    chosen = Options(output=form, **options)
    print_items(items, COLUMNS, chosen, document=Page(items=list(items)), name=lambda i: i.name)
    return capsys.readouterr().out


def test_a_table_has_one_record_a_line_under_its_headings(capsys):
    assert show(capsys, "table") == "NAME    SIZE\nbible      7\ndevil  12345\n"
    assert show(capsys, "table", headers=False) == "bible      7\ndevil  12345\n"
    assert show(capsys, "wide").splitlines()[1] == "bible      7  -"
    assert show(capsys, "table", items=[]) == "NAME  SIZE\n"


def test_programs_get_json_lines_or_names(capsys):
    assert json.loads(show(capsys, "json"))["items"][1] == {"name": "devil", "size": 12345}
    lines = show(capsys, "jsonl").splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["bible", "devil"]
    assert show(capsys, "name") == "bible\ndevil\n"


def test_only_a_terminal_gets_its_lines_cut(capsys, monkeypatch):
    long = [Item("x" * 200, 1)]
    assert "x" * 200 in show(capsys, "table", items=long)
    monkeypatch.setattr(sys, "stdout", Terminal())
    size = os.terminal_size((20, 24))
    monkeypatch.setattr(output.shutil, "get_terminal_size", lambda *_, **__: size)  # pytest's, too
    table = Table(COLUMNS, Options())
    table.print(long)
    assert sys.stdout.getvalue().splitlines() == ["NAME" + " " * 15 + ">", "x" * 19 + ">"]


def test_where_a_terminal_has_no_room_columns_go_and_are_named(capsys, monkeypatch):
    columns = (
        Column("NAME", lambda i: i.name),
        Column("REV", lambda i: "0123abcd", drop=1),
        Column("SIZE", lambda i: str(i.size), right=True, drop=2),
        Column("MORE", lambda i: "more", wide=True),
    )
    page, told = Page(items=ITEMS), []
    monkeypatch.setattr(output, "note", lambda text, options: told.append(text))

    def lines(form, room):
        monkeypatch.setattr(output, "terminal_width", lambda: room)
        print_items(ITEMS, columns, Options(output=form), document=page, name=lambda i: i.name)
        return next(line.split() for line in capsys.readouterr().out.splitlines())

    assert lines("table", 0) == lines("table", 22) == ["NAME", "REV", "SIZE"] and not told
    assert lines("table", 21) == ["NAME", "REV"]
    assert lines("table", 14) == ["NAME"]
    assert told == ["no room for SIZE: -o wide has all", "no room for REV SIZE: -o wide has all"]
    assert lines("wide", 28) == ["NAME", "REV", "SIZE", "MORE"]


def test_long_names_lose_their_ends_before_columns_go_and_wide_goes_on_below(capsys, monkeypatch):
    columns = (
        Column("NAME", lambda i: i.name, shrinks=True),
        Column("REV", lambda i: "0123abcd", drop=1),
        Column("SIZE", lambda i: str(i.size), right=True),
    )
    items = [Item("acme/" + "x" * 60, 7), Item("bible", 12345)]
    page, told = Page(items=items), []
    monkeypatch.setattr(output, "note", lambda text, options: told.append(text))

    def lines(form, room):
        monkeypatch.setattr(output, "terminal_width", lambda: room)
        print_items(items, columns, Options(output=form), document=page, name=lambda i: i.name)
        return capsys.readouterr().out.splitlines()

    assert lines("table", 60)[1] == "acme/" + "x" * 37 + ">  0123abcd      7"
    assert lines("table", 41)[2] == "bible" + " " * 19 + "  0123abcd  12345" and not told
    assert lines("table", 40)[1] == "acme/" + "x" * 27 + ">      7"
    assert told == ["no room for REV: -o wide has all"]

    assert lines("wide", 40)[1] == items[0].name + "  0123abcd      7"


def test_later_rows_of_a_table_keep_the_widths_of_the_first(capsys):
    table = Table(COLUMNS[:2], Options())
    table.print([Item("a-long-name", 1)])
    table.print([Item("b", 2)], headings=False)
    assert capsys.readouterr().out.splitlines() == [
        "NAME         SIZE",
        "a-long-name     1",
        "b               2",
    ]


def test_control_characters_never_reach_the_terminal(capsys):
    assert plain(HOSTILE) == "a?]0;pwn?b?31m?c???[/bold]"
    assert one_line("a\n\t b\x1b[2J") == "a b?[2J"
    table = show(capsys, "table", items=[Item(HOSTILE, 1)])
    assert all(c.isprintable() for c in table.replace("\n", ""))
    assert len(table.splitlines()) == 2
    print_text("say\n\tthis\x1b[2J")
    assert capsys.readouterr().out == "say\n\tthis?[2J"


def test_json_escapes_them_and_stays_json():
    text = json_text({"a": HOSTILE, "b": "é\U0001f600"}, "utf-8", indent=2)
    assert all(c.isprintable() for c in text.replace("\n", ""))
    assert "é\U0001f600" in text
    assert json.loads(text) == {"a": HOSTILE, "b": "é\U0001f600"}


def test_json_for_a_locale_without_unicode_is_ascii_and_still_json():
    text = json_text({"b": "é\U0001f600"}, "ascii", indent=-1)
    assert text == '{"b":"\\u00e9\\ud83d\\ude00"}'
    assert json.loads(text) == {"b": "é\U0001f600"}


def test_what_the_locale_cannot_show_is_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii", write_through=True))
    print_line("é")
    assert raw.getvalue() == b"\\xe9\n"


def test_a_closed_stdout_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    print_line("nobody reads this")
    print_text("nor this")
    Table(COLUMNS, Options()).print(ITEMS)
    assert capsys.readouterr() == ("", "")


def test_a_closed_stderr_does_not_leak_into_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    output.complain("error")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (999, "999"),
        (1000, "0.98K"),
        (88080384, "84M"),
        (1.5e15, "1.36e+03T"),
    ],
)
def test_sizes(count, shown):
    assert human_bytes(count) == shown


@pytest.mark.parametrize(
    ("age", "shown"),
    [(None, "-"), (0.2, "0s"), (41, "41s"), (360, "6m"), (10800, "3h"), (86400 * 12, "12d")],
)
def test_ages(age, shown):
    assert human_age(age) == shown


def test_the_age_of_a_time_that_is_none_is_unknown():
    assert age_of(None) is None
    assert age_of("yesterday") is None
    assert age_of("2020-01-01T00:00:00.000Z") > 1e8
    assert age_of("2999-01-01T00:00:00Z") == 0


def test_a_hit_rate_without_questions_is_not_zero():
    assert human_ratio(0, 0) == "--"
    assert human_ratio(1, 3) == "33%"
