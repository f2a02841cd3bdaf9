"""What is drawn: never wider than its place, never taken for a command by the terminal."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from lorad.tui import draw
from lorad.tui.draw import ASCII, UNICODE, Glyphs

HOSTILE = "a\x1b]0;pwn\x07b\x9b31m\u202ec\r\n\x7f[/bold]"
BOTH = pytest.mark.parametrize("glyphs", [ASCII, UNICODE], ids=["ascii", "unicode"])

quick = settings(max_examples=60, deadline=None)
texts = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("ab漢字e\u0301\u200d\ufe0f👩🏽🇩🇪\u202e\x1b\n\u1100\u1161가नि"),
    ),
    max_size=40,
)
widths = st.integers(-2, 60)
numbers = st.one_of(st.none(), st.floats(), st.integers(0, 10**15))
glyph_sets = st.sampled_from([ASCII, UNICODE])


# ----------------------------------------------------------------- glyphs
def test_every_glyph_takes_one_cell_and_ascii_is_ascii() -> None:
    for glyphs in (ASCII, UNICODE):
        single = glyphs.fill + glyphs.rest + glyphs.parts + glyphs.spark + glyphs.pool
        single += glyphs.cut + glyphs.up + glyphs.down + glyphs.here + glyphs.dot
        assert all(cell_len(c) == 1 for c in single)
        assert len(set(glyphs.pool)) == 5, "five kinds of memory are told apart without colour"
    drawn = "".join(getattr(ASCII, name) for name in Glyphs.__slots__)
    assert drawn.isascii()


@pytest.mark.parametrize(
    ("encoding", "asked", "chosen"),
    [
        ("utf-8", False, UNICODE),
        ("UTF8", False, UNICODE),
        ("utf-8", True, ASCII),
        ("ISO-8859-1", False, ASCII),
        ("ANSI_X3.4-1968", False, ASCII),
        (None, False, ASCII),
    ],
)
def test_a_terminal_that_is_not_known_to_show_more_gets_ascii(
    encoding: str | None, asked: bool, chosen: Glyphs
) -> None:
    assert draw.glyphs_for(encoding, ascii=asked) is chosen


# ----------------------------------------------------------------- text
def test_a_hostile_name_is_inert_and_its_markup_is_text() -> None:
    assert draw.inert(HOSTILE) == "a?]0;pwn?b?31m?c ?[/bold]"


def test_line_ends_and_tabs_are_one_space_each_and_columns_stay_columns() -> None:
    assert draw.inert("a\tb\nc\r\nd\u2028e") == "a b c d e"
    assert draw.cut("SLOT  NAME    STATE", 16) == "SLOT  NAME    S>"


def test_marks_do_not_pile_up_and_variants_do_not_widen() -> None:
    assert draw.inert("a" + "\u0316" * 50) == "a" + "\u0316" * 3
    assert draw.inert("e\u0301") == "é"
    assert draw.inert("\u2764\ufe0f") == "\u2764"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("acme/sql", 8, "acme/sql"),
        ("acme/sql", 10, "acme/sql  "),
        ("acme/sql-gen", 8, "acme/sq>"),
        ("漢字漢字", 8, "漢字漢字"),
        ("漢字漢字", 7, "漢字漢>"),
        ("漢字漢字", 6, "漢字> "),
        ("x", 0, ""),
        ("xy", 1, ">"),
    ],
)
def test_text_fits_by_cells(text: str, width: int, shown: str) -> None:
    assert draw.fit(text, width) == shown
    assert draw.cut(text, width) == shown.rstrip()


def test_figures_stand_at_the_right() -> None:
    assert draw.fit("82%", 5, right=True) == "  82%"


@quick
@given(texts, widths, glyph_sets, st.booleans())
def test_no_text_is_wider_or_narrower_than_its_place(
    text: str, width: int, glyphs: Glyphs, right: bool
) -> None:
    shown = draw.fit(text, width, glyphs, right=right)
    assert cell_len(shown) == max(width, 0)
    assert shown.isprintable()
    assert cell_len(draw.cut(text, width, glyphs)) <= max(width, 0)


@quick
@given(texts)
def test_what_is_inert_stays_as_it_is(text: str) -> None:
    once = draw.inert(text)
    assert draw.inert(once) == once


# ----------------------------------------------------------------- bars
@pytest.mark.parametrize(
    ("share", "ascii", "blocks"),
    [
        (0.0, "[------]", "░░░░░░░░"),
        (0.001, "[#-----]", "▏░░░░░░░"),
        (0.5, "[###---]", "████░░░░"),
        (0.55, "[###---]", "████▍░░░"),
        (0.999, "[#####-]", "███████▉"),
        (1.0, "[######]", "████████"),
        (7.0, "[######]", "████████"),
        (-1.0, "[------]", "░░░░░░░░"),
        (None, "--      ", "--      "),
        (float("nan"), "--      ", "--      "),
    ],
)
def test_a_bar_says_at_a_glance_whether_there_is_any_or_any_left(
    share: float | None, ascii: str, blocks: str
) -> None:
    assert draw.bar(share, 8, ASCII) == ascii
    assert draw.bar(share, 8, UNICODE) == blocks


@quick
@given(numbers, widths, glyph_sets)
def test_a_bar_is_as_wide_as_its_place(share: float | None, width: int, glyphs: Glyphs) -> None:
    assert cell_len(draw.bar(share, width, glyphs)) == max(width, 0)


def test_the_parts_of_a_pool_are_told_apart_and_make_the_whole() -> None:
    assert draw.stacked((50, 25, 0, 12.5, 12.5), 16, ASCII) == ("########", "====", "", "--", "..")
    assert "".join(draw.stacked((1, 1, 1, 1, 1), 5, UNICODE)) == UNICODE.pool


def test_a_small_part_of_a_pool_is_seen_and_an_empty_pool_has_none() -> None:
    assert draw.shares((1e12, 1, 0), 10) == (9, 1, 0)
    assert draw.shares((1, 1e12, 1), 2) == (1, 1, 0)
    assert draw.shares((0, 0), 10) == (0, 0)


@quick
@given(st.lists(numbers, max_size=7), widths)
def test_the_parts_of_a_pool_are_as_wide_as_its_place(
    parts: list[float | None], width: int
) -> None:
    known = [p if p is not None else 0.0 for p in parts]
    cells = draw.shares(known, width)
    assert len(cells) == len(parts)
    assert all(c >= 0 for c in cells)
    assert sum(cells) in (0, max(width, 0))


# ----------------------------------------------------------------- sparklines
@pytest.mark.parametrize(
    ("values", "ascii", "blocks"),
    [
        ([0, 1, 2, 3], "  _.:|", "  ▁▃▆█"),
        ([0, 0, 0], "   ___", "   ▁▁▁"),
        ([0.001, 100], "    .|", "    ▂█"),
        ([None, 5, None], "    | ", "    █ "),
        ([], "      ", "      "),
        ([0, 9, 0, 0] * 3, "|_|_|_", "█▁█▁█▁"),
    ],
)
def test_a_sparkline_keeps_its_peaks_and_tells_little_from_nothing(
    values: list[float | None], ascii: str, blocks: str
) -> None:
    assert draw.sparkline(values, 6, ASCII) == ascii
    assert draw.sparkline(values, 6, UNICODE) == blocks


def test_a_sparkline_against_a_fixed_top_does_not_fill_it() -> None:
    assert draw.sparkline([50, 100, 200], 3, ASCII, top=100) == ":||"


@quick
@given(st.lists(numbers, max_size=70), widths, glyph_sets, numbers)
def test_a_sparkline_is_as_wide_as_its_place(
    values: list[float | None], width: int, glyphs: Glyphs, top: float | None
) -> None:
    assert cell_len(draw.sparkline(values, width, glyphs, top=top)) == max(width, 0)


# ----------------------------------------------------------------- figures
@pytest.mark.parametrize(
    ("share", "shown"),
    [(None, "--"), (0.0, "0%"), (0.001, "1%"), (0.824, "82%"), (0.9999, "99%"), (1.0, "100%")],
)
def test_a_percentage_of_nothing_asked_is_not_zero(share: float | None, shown: str) -> None:
    assert draw.percent(share) == shown


def test_a_share_of_nothing_is_not_known() -> None:
    assert draw.ratio(0, 0) is None
    assert draw.ratio(0, 4) == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "--"),
        (-3, "0s"),
        (0.9, "0s"),
        (41, "41s"),
        (60, "1m"),
        (3599, "59m"),
        (3600, "1h00m"),
        (35999, "9h59m"),
        (36000, "10h"),
        (86399, "23h"),
        (3 * 86400 + 4 * 3600 + 59, "3d04h"),
        (864000, "10d"),
    ],
)
def test_ages_are_short(seconds: float | None, shown: str) -> None:
    assert draw.age(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "--"),
        (0, "0ms"),
        (0.0004, "0.4ms"),
        (0.00996, "10ms"),
        (0.082, "82ms"),
        (0.9996, "1.0s"),
        (1.24, "1.2s"),
        (9.96, "10s"),
        (59.6, "1m"),
        (120, "2m"),
    ],
)
def test_durations_have_the_unit_that_suits_them(seconds: float | None, shown: str) -> None:
    assert draw.duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "--"),
        (0, "0"),
        (0.01, "0"),
        (4.23, "4.2"),
        (9.96, "10"),
        (41.2, "41"),
        (510, "510"),
        (999.6, "1.0k"),
        (2400, "2.4k"),
        (14_200, "14.2k"),
        (128_000, "128k"),
        (1_200_000, "1.2M"),
    ],
)
def test_rates_are_short(value: float | None, shown: str) -> None:
    assert draw.rate(value) == shown


def test_the_speed_of_little_things_is_not_zero() -> None:
    assert [draw.pace(v) for v in (None, 0, -1, float("nan"))] == [""] * 4
    assert draw.pace(18 * 2**20) == "18M/s"
    assert draw.pace(2.14e9) == "2.1GB/s"


def test_whole_things_have_no_tenths() -> None:
    assert [draw.count(v) for v in (None, 0, 4, 9, 510, 2400)] == [
        *("--", "0", "4", "9", "510", "2.4k")
    ]


@pytest.mark.parametrize(
    ("used", "total", "shown"),
    [
        (None, 5, "--"),
        (52.1 * 2**30, 79.6 * 2**30, "52.1/79.6G"),
        (84 * 2**20, 79.6 * 2**30, "0.082/79.6G"),
        (0, 0, "0/0"),
        (5, 512, "5/512"),
    ],
)
def test_what_is_used_is_told_in_the_unit_of_the_whole(
    used: float | None, total: float | None, shown: str
) -> None:
    assert draw.size_of(used, total) == shown


@quick
@given(st.floats(0, 1e12))
@example(1000.0)
def test_figures_keep_to_their_columns(value: float) -> None:
    assert len(draw.rate(value)) <= 5
    assert len(draw.count(value)) <= 5
    assert len(draw.percent(min(value, 1.0))) <= 4
    assert len(draw.age(min(value, 8e8))) <= 5
    assert len(draw.duration(min(value, 8e7))) <= 5
    assert len(draw.size(int(value))) <= 5


def test_a_moment_is_told_to_the_second_and_nonsense_is_not_known() -> None:
    assert draw.clock("2026-01-02T03:04:05Z")[-6:] == ":04:05"
    assert (draw.clock(None), draw.clock("soon")) == ("--", "--")
