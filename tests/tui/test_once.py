"""The board as text: all of it, inert, no wider than it may be, and JSON for programs."""

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from lorad.tui.draw import ASCII, UNICODE, Glyphs
from lorad.tui.once import lines
from lorad.wire_stream import Board, Drain, Health
from tests.fakes import boards


def shown(board: Board, glyphs: Glyphs = ASCII, width: int | None = None) -> str:
    return "\n".join(lines(board, glyphs, width))


def test_it_has_the_sections_of_the_overview_in_their_order() -> None:
    text = shown(boards.small())
    titles = [line.split()[1] for line in text.splitlines() if line.startswith("-- ")]
    assert titles == [
        *("SLOTS", "CHURN", "DRAIN", "PREFIX", "REQUESTS", "HEALTH", "EVENTS"),
    ]
    clock = datetime.fromisoformat(boards.small().time).astimezone(UTC).astimezone()
    first, second, *_ = text.splitlines()
    assert first.startswith("lorad 0.1.0  READY  pid 4121  up 3d04h")
    assert first.endswith(clock.strftime("%H:%M:%S"))
    assert "tok/s 8.9k" in second
    assert "TTFT p50 82ms p99 410ms" in second


@pytest.mark.parametrize(
    "row",
    [
        "0     acme/sql-gen            1eb501  active    P      90    64  336M   11     0  "
        "[###-] 82%                  74%   2.4k    0s",
        "10    stark/jarvis            36eca8  loading   -      60    32  168M    0     3  "
        "[###-] from RAM 21.4GB/s    --      0    --",
        "7     hooli/nucleus           930aee  idle      -      40    16   84M    0     0  "
        "--                          33%      0   41s",
    ],
    ids=["active", "loading", "idle"],
)
def test_a_slot_is_a_line(row: str) -> None:
    assert " ".join(row.split()) in [
        " ".join(line.split()) for line in lines(boards.small(), ASCII)
    ]


def test_columns_stand_under_their_headings() -> None:
    text = lines(boards.small(), ASCII)
    place = next(i for i, line in enumerate(text) if line.startswith("SLOT "))
    state = text[place].index("STATE")
    assert {line[state:].split()[0] for line in text[place + 1 : place + 17]} == {
        *("active", "draining", "idle", "loading"),
    }


def test_an_empty_board_says_so_and_nothing_that_was_not_measured() -> None:
    quiet = replace(boards.empty(), health=Health())
    text = shown(quiet)
    assert "no adapter is resident" in text
    assert "VRAM --" in text
    assert not any(word in text for word in ("TTFT", "CHURN", "DRAIN", "PREFIX", "HEALTH"))


def test_ascii_is_ascii_and_the_rest_is_utf8() -> None:
    assert shown(boards.small(), ASCII).isascii()
    assert not shown(boards.small(), UNICODE).isascii()


def test_nothing_foreign_reaches_the_terminal_as_more_than_text() -> None:
    for glyphs in (ASCII, UNICODE):
        for line in lines(boards.hostile(), glyphs):
            assert line.isprintable()
    assert "[/bold]" in shown(boards.hostile()), "markup is shown as it is"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_gets_lines_that_fit(width: int) -> None:
    for board in (boards.small(), boards.hostile()):
        assert max(cell_len(line) for line in lines(board, UNICODE, width)) <= width


def test_256_slots_are_256_lines_and_requests_are_the_ten_that_run_longest() -> None:
    text = lines(boards.many(256), ASCII)
    assert sum(" tenant" in line and "/adapter-" in line for line in text) >= 256
    assert sum(line.startswith("req-") for line in text) == 10
    assert any("the longest 10 of 37" in line for line in text)


def test_a_drain_that_is_held_says_who_ends_it() -> None:
    held = Drain(name="", held=True, running=3, seconds=61.0, cause="operator")
    text = shown(replace(boards.small(), drains={"": held}))
    assert "the daemon" in text
    assert "until loractl resume" in text


def test_slots_say_how_guesses_went_where_tokens_are_guessed() -> None:
    text = shown(boards.guessing()).splitlines()
    heading = next(line for line in text if line.startswith("SLOT"))
    assert heading.split()[-4:] == ["RIGHT", "TOK/DRAW", "TOK/S", "IDLE"]
    first, second, *_ = boards.guessing().slots
    row = {name: next(line for line in text if f" {name} " in line) for name in (first, second)}
    end = heading.index("TOK/S")
    assert row[first][:end].split()[-2:] == ["75%", "2.5"]
    assert row[second][:end].split()[-2:] == ["--", "--"], "not any more within the minute"
    assert "TOK/DRAW" not in shown(boards.small())


def test_replicas_have_a_line_each_and_rows_say_where_they_are() -> None:
    text = shown(boards.replicas())
    assert "replica 0  READY  H200  run 2  wait 0  slots 2/0" in text
    assert "replica 1  ENGINE_RESTARTING (it died)" in text and "restarts 1" in text
    heading = next(line for line in text.splitlines() if line.startswith("SLOT"))
    assert heading.split()[:3] == ["SLOT", "NAME", "REPLICA"]
    assert "0,1" in text and "REPLICA" not in shown(boards.small())


def test_what_is_pooled_has_a_pace_of_its_own() -> None:
    assert "embed tok/s 12.0k" in shown(boards.serving(("generate",), ("embed",)))
    assert "pooled tok/s 12.0k" in shown(boards.serving(("embed", "rerank")))
    assert "12.0k" not in shown(boards.serving(("generate",)))


def test_several_models_have_a_line_each_and_rows_say_whose_they_are() -> None:
    text = shown(boards.two_models())
    assert "model   llama  READY" in text and "run 2" in text
    assert "model   minilm  ENGINE_RESTARTING (the engine is restarting)" in text
    heading = next(line for line in text.splitlines() if line.startswith("SLOT"))
    assert heading.split()[:3] == ["SLOT", "NAME", "MODEL"]
    assert "(minilm)" in text, "a request for that base itself"
    assert "MODEL" not in shown(boards.small()) and "(minilm)" not in shown(boards.small())


def test_a_gateway_without_sockets_is_where_it_was_asked() -> None:
    board = boards.small()
    board = replace(board, status=replace(board.status, admin_socket=""))
    first = lines(board, ASCII, host="http://10.0.0.1:8000")[0]
    assert "  http://10.0.0.1:8000  " in first and "unix:" not in first
    assert "unix:" not in lines(board, ASCII)[0]
