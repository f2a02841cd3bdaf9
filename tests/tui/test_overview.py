"""The overview on a terminal: what it shows at which size, in which look, of which board."""

import pytest
from msgspec.structs import replace

from lorad.tui import draw
from lorad.tui.details import AdapterDetail
from lorad.tui.messages import Changed, Happened, Lost, Whole
from lorad.tui.overview import plan
from lorad.tui.shell import Settings
from lorad.wire_stream import Drain

SIZES = ((120, 36), (80, 24), (60, 16))


def test_a_small_board_at_every_size(play, boards, same, svg_of):
    """And what was selected stays so, whatever the size."""

    async def act(stage):
        await stage.press("j", "j", "j")
        for width, height in SIZES:
            await stage.resize(width, height)
            lines = stage.lines()
            assert [len(line) for line in lines] == [width] * height
            same(f"small-{width}x{height}.txt", stage.text())
            assert stage.app.desk.target == "globex/legal-v3"
            assert any("globex/legal-v3" in line and "▌" in line for line in lines)
        await stage.resize(120, 36)
        same("small-120x36.svg", svg_of(stage.app))
        await stage.resize(170, 30)
        same("small-170x30.txt", stage.text())
        await stage.resize(40, 10)
        assert "at least 60x16 is needed" in stage.text()
        assert len(stage.text().split()) < 12
        await stage.resize(59, 40)
        assert "at least 60x16 is needed" in stage.text()
        for width in (61, 200, 75, 100, 99, 240):
            await stage.resize(width, 40)
        assert stage.app.desk.target == "globex/legal-v3"

    play(act, boards.small())


def test_nothing_but_bold_and_reverse_without_colour(play, boards, same, svg_of, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def act(stage):
        assert stage.app.look.mono
        same("mono-80x24.txt", stage.text())
        same("mono-80x24.svg", svg_of(stage.app))
        for keys in ((), ("question_mark",), ("escape", "ctrl+p"), ("escape", "slash", "x")):
            await stage.press(*keys)
            for style in stage.styles():
                assert style.color is None or style.color.is_default, style
                assert style.bgcolor is None or style.bgcolor.is_default, style
                assert not (style.dim or style.italic or style.underline), style

    play(act, boards.small(), (80, 24))


def test_ascii_is_ascii_to_the_last_border(play, boards, same):
    async def act(stage):
        for kind in ("empty", "hostile", "small"):
            await stage.tell(Whole(getattr(boards, kind)()))
            same(f"ascii-{kind}-120x36.txt", stage.text())
        for keys in (("question_mark",), ("escape", "ctrl+p"), ("escape", "slash"), ("escape",)):
            await stage.press(*keys)
            assert stage.text().isascii()
        await stage.tell(Lost("ECONNREFUSED", 4.0))
        assert stage.text().isascii()

    play(act, settings=Settings(ascii=True))


def test_a_daemon_that_nobody_asked_yet(play, boards, same):
    async def act(stage):
        same("empty-120x36.txt", stage.text())
        await stage.resize(80, 24)
        same("empty-80x24.txt", stage.text())
        assert " 0%" not in "".join(line for line in stage.lines() if "all" in line)

    play(act, boards.empty())


def test_before_the_first_data_it_says_so(play, boards):
    async def act(stage):
        assert "waiting for the first data" in stage.text()
        assert "unix:///run/lorad/admin.sock" in stage.text()
        await stage.tell(Lost("ENOENT", 2.0))
        assert "DISCONNECTED 0 s, retry in 2 s (ENOENT)" in stage.text()
        await stage.tell(Whole(boards.small()))
        assert "acme/sql-gen" in stage.text()
        assert "DISCONNECTED" not in stage.text()

    play(act)


def test_the_header_counts_what_was_refused(play, boards):
    async def act(stage):
        assert "quarantined" not in stage.text()
        status = boards.status(adapters={"idle": 3, "quarantined": 2})
        await stage.tell(Whole(boards.board((), status=status)))
        for width, height in SIZES:
            await stage.resize(width, height)
            assert "READY  2 quarantined" in stage.lines()[0]

    play(act, boards.small())


def test_of_many_drains_those_that_something_runs_in_are_shown_first(play, boards):
    held = [Drain(name=f"acme/a{n}", held=True, cause="operator") for n in range(9)]
    last = Drain(name="globex/busy", running=2, begun_with=3, cause="evict")
    drains = {drain.name: drain for drain in (*held, last)}

    async def act(stage):
        for width, height in SIZES[:2]:
            await stage.resize(width, height)
            lines = stage.lines()
            head = next(n for n, line in enumerate(lines) if "DRAINS 10" in line)
            assert "globex/busy" in lines[head + 1]

    play(act, replace(boards.small(), drains=drains))


def test_the_stages_of_a_load_leave_room_for_other_events(play, boards):
    async def act(stage):
        events = stage.app.query_one("#events")
        for number, type in enumerate(("adapter.rejected", "ram.loading", "ram.load")):
            await stage.tell(Happened(boards.event(300 + number, type, "acme/late", "told")))
        assert "adapter.rejected   acme/late" in stage.text()
        assert "ram.load" not in stage.text()
        events.action_back(1)
        await stage.pilot.pause()
        assert "adapter.rejected   acme/late" not in stage.text()
        await stage.tell(Happened(boards.event(303, "slot.loading", "acme/late", "told")))
        await stage.tell(Happened(boards.event(304, "slot.load", "acme/late", "told")))
        assert "2 above" in stage.text()
        await stage.press("5")
        assert "ram.loading" in stage.text() and "slot.loading" in stage.text()

    play(act, boards.small())


def test_a_lost_link_dims_what_is_shown_and_keeps_it(play, boards, same):
    async def act(stage):
        before = [line for line in stage.lines() if "acme/sql-gen" in line]
        bright = {style.color for style in stage.styles(of="acme/support-de")}
        await stage.tell(Lost("ECONNREFUSED", 1.0))
        stage.clock.now += 12
        await stage.tell(Lost("ECONNREFUSED", 4.0))
        said = "DISCONNECTED 12 s, retry in 4 s (ECONNREFUSED), data from 16:32:07"
        assert said in stage.text()
        same("disconnected-80x24.txt", stage.text())
        assert [line for line in stage.lines() if "acme/sql-gen" in line] == before
        assert not bright & {style.color for style in stage.styles(of="acme/support-de")}
        stage.clock.now += 2
        stage.app.paint()
        await stage.pilot.pause()
        assert "DISCONNECTED 14 s, retry in 2 s" in stage.text()
        status = boards.status(instance_id="inst-two", pid=5000)
        await stage.tell(Whole(boards.board((), status=status, events=())))
        assert "DISCONNECTED" not in stage.text()
        assert "daemon.restarted" in stage.text()
        assert "acme/sql-gen" not in "".join(stage.lines()[3:12])

    play(act, boards.small(), (80, 24))


def test_256_slots_scroll_and_an_update_draws_only_what_it_changed(play, boards, same):
    async def act(stage):
        same("many-120x36.txt", stage.text())
        assert "1-18 of 256" in stage.text()
        stage.app.query_one("#slots").sort_by("slot")
        await stage.press("G")
        assert "239-256 of 256" in stage.text()
        assert "adapter-255" in stage.text()
        await stage.press("ctrl+u", "k")
        assert stage.app.desk.target == "tenant16/adapter-237"
        table = stage.app.query_one("#slots")
        first = table.first
        board = stage.app.model.board
        unseen = boards.busy("tenant00/adapter-000", 0, 9, 1, 9)
        delta = next(boards.deltas(board, 1, rows=0))
        delta = type(delta)(sequence=2, time=board.time, slots={unseen.name: unseen})
        stage.app.model.take(Changed(delta))
        stage.app.shown = stage.app.model.shown()
        table.listing.show(stage.app.shown.slots)
        assert table.repaint() == 0
        assert (table.first, stage.app.desk.target) == (first, "tenant16/adapter-237")

    play(act, boards.many(256))


def test_names_that_would_drive_the_terminal_are_only_shown(play, boards, same):
    """Control characters, bidi marks, markup: fault 10."""

    async def act(stage):
        await stage.tell(Happened(boards.event(200, "x\x1b[2J", "\u202ex", "[bold]\x07\x9b31m")))
        same("hostile-120x36.txt", stage.text())
        for width, height in SIZES:
            await stage.resize(width, height)
            for line in stage.lines():
                assert line.isprintable(), ascii(line)
            assert stage.cells() == [width] * height
        await stage.resize(120, 36)
        shown = stage.text()
        for name in ("[/bold]", "[red]not red[/red]", "?]0;owned?", "$(reboot)`id`", "%s%n{name}"):
            assert name in shown

    play(act, boards.hostile())


def test_a_minute_of_churn_ends_in_the_board_that_it_should(play, boards, same):
    before, deltas = boards.churny()

    async def act(stage):
        for delta in deltas[:6]:
            await stage.tell(Changed(delta))
        same("churny-120x36.txt", stage.text())

    play(act, before)


@pytest.mark.parametrize("width", [60, 79, 80, 99, 100, 120, 200])
@pytest.mark.parametrize("height", [14, 18, 22, 30, 60])
def test_panels_fill_the_height_whatever_it_is(width, height):
    for num_slots in (0, 16, 256):
        p = plan(width, height, num_slots)
        middle = p.churn if p.beside else p.churn + p.drain
        assert p.slots + middle + p.events == height
        assert p.slots >= 5
        assert p.beside is (width >= 100 and height >= 24)


def test_of_several_engines_rows_say_where_each_adapter_and_request_is(play, boards, fakes):
    async def act(stage):
        await stage.resize(160, 36)
        text = stage.text()
        assert "REPL" in text and "0,1" in text
        header = next(line for line in text.splitlines() if " 0 1" in line)
        assert header, "the model with the numbers of its engines"
        await stage.press("3")
        assert "REPL" in stage.text()
        await stage.press("2")
        await stage.until(lambda: not stage.app.view.grid.listing.due)
        assert "REPL" in stage.text()

    play(act, boards.replicas(), daemon=fakes.FakeDaemon(fakes.adapter(1)))


@pytest.mark.parametrize(
    ("tasks", "wide", "narrow"),
    [
        ((("generate",), ("embed",)), "tok/s 8.9k  embed tok/s 12.0k", "tok/s 8.9k  embed 12.0k"),
        ((("generate", "embed", "rerank"),), "8.9k  pooled tok/s 12.0k", "8.9k  pooled 12.0k"),
        ((("rerank",),), "rerank tok/s 12.0k  run", "rerank tok/s 12.0k  run"),
        ((("embed",), ("rerank",)), "pooled tok/s 12.0k  run", "pooled tok/s 12.0k  run"),
    ],
)
def test_the_header_says_how_fast_inputs_are_embedded_or_reranked_where_that_is_done(
    play, boards, tasks, wide, narrow
):
    async def act(stage):
        await stage.resize(160, 36)
        assert wide in stage.text()
        await stage.resize(80, 24)
        assert narrow in stage.text()
        assert "generate" not in narrow and ("8.9k" in stage.text()) is ("8.9k" in narrow)

    play(act, boards.serving(*tasks))


def test_the_header_of_a_generator_alone_speaks_of_nothing_else(play, boards):
    async def act(stage):
        await stage.resize(160, 36)
        assert "tok/s 8.9k  run 37" in stage.text()

    play(act, boards.serving(("generate",)))


def test_names_of_a_clusters_members_are_whole_on_a_narrow_terminal(play, boards, fakes):
    async def act(stage):
        await stage.resize(80, 24)
        assert "REPLICA" in stage.text() and "kx03f9az+1" in stage.text()
        await stage.press("3")
        rows = [line for line in stage.text().splitlines() if "running" in line]
        assert any("kx03f9az " in line for line in rows), stage.text()

    play(act, boards.replicas("kx03f9az", "p7w1qq2d"), daemon=fakes.FakeDaemon(fakes.adapter(1)))


def test_of_several_models_the_header_names_all_and_rows_say_whose_they_are(play, boards, fakes):
    async def act(stage):
        await stage.resize(160, 36)
        text = stage.text()
        assert "llama minilm" in text and "MODEL" in text
        await stage.press("3")
        assert "(minilm)" in stage.text()
        await stage.press("2")
        await stage.until(lambda: not stage.app.view.grid.listing.due)
        assert "MODEL" in stage.text()

    play(act, boards.two_models(), daemon=fakes.FakeDaemon(fakes.adapter(1)))


def test_where_tokens_are_guessed_ahead_each_row_says_how_well(play, boards, fakes):
    board = boards.guessing()
    first, *_ = board.slots

    async def act(stage):
        await stage.resize(160, 36)
        text = stage.text()
        assert "RIGHT TOK/DRAW" in text
        [row] = [line for line in text.splitlines() if f" {first} " in line and "75%" in line]
        assert row.index("75%") < row.index(" 2.5 ")
        await stage.resize(79, 24)
        assert "TOK/DRAW" not in stage.text(), "what matters more keeps its place"

    play(act, board, daemon=fakes.FakeDaemon(fakes.adapter(1)))
    lines = AdapterDetail(first, asks=False).told(board, 100, draw.UNICODE)
    said = " ".join("".join(text for text, _ in line) for line in lines)
    assert "75% of 200 tokens right in 60 s, 2.5 tokens a draw, 60% in its life" in said


def test_where_none_are_there_is_no_column_of_it(play, boards):
    async def act(stage):
        await stage.resize(160, 36)
        assert "TOK/DRAW" not in stage.text()

    play(act, boards.small())
