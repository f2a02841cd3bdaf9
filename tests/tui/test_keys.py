"""What keys, clicks and commands do."""

import json
import os
import stat

from textual import events

from lorad.tui.keys import KEYS
from lorad.tui.messages import Changed, Happened, Lost, Whole
from lorad.tui.shell import Settings


def test_tables_are_moved_in_filtered_and_sorted(play, boards):
    async def act(stage):
        app = stage.app
        app.query_one("#slots").sort_by("slot")
        await stage.press("G")
        assert app.desk.target == "globex/legal-v3"
        await stage.press("k", "up")
        assert app.desk.target == "tyrell/voight"
        await stage.press("g", "j", "down")
        assert app.desk.target == "globex/legal-v3@c4a0d9"
        await stage.press("s")
        assert "sort NAME" in stage.text()
        assert app.desk.target == "acme/router"
        await stage.press("S", "g")
        assert app.desk.target == "wayne/bat-ops"
        await stage.type("/state:idle !hooli")
        assert "filter state:idle !hooli" in stage.text()
        assert "hooli/box" not in "".join(stage.lines()[3:12])
        await stage.press("enter")
        assert app.focused.id == "slots"
        await stage.press("slash", "x", "escape")
        assert app.query_one("#slots").listing.filter_text == "state:idle !hooli"
        await stage.press("escape")
        assert app.query_one("#slots").listing.filter_text == ""
        await stage.type("/nobody", "enter")
        assert "none of 16 matches the filter" in stage.text()
        await stage.press("escape", "w")
        assert "TOK/S" not in stage.lines()[4]
        await stage.press(*["right"] * 12)
        assert "TOK/S" in stage.lines()[4]
        await stage.press("w", "y")
        assert app.clipboard == "wayne/bat-ops"
        await stage.press("Y")
        assert json.loads(app.clipboard)["name"] == "wayne/bat-ops"

    play(act, boards.small(), (80, 24))


def test_the_footer_names_the_keys_that_do_something_on_its_screen(play, boards):
    """`x cancel` stood where it ends a drain, and `p pin` where no row is an adapter."""
    adapters = {"p", "l", "e", "d", "x", "y"}

    async def act(stage):
        for screen in "1234567":
            await stage.press(screen)
            words = stage.lines()[-1].split("  ")
            named = dict(word.strip().split(" ", 1) for word in words if word.strip())
            there = {"3": {"x", "y"}, "6": set(), "7": set()}.get(screen, adapters)
            assert adapters & named.keys() == there, screen
            wanted = {"3": "cancel", "6": None, "7": None}.get(screen, "undrain")
            assert named.get("x") == wanted
            assert named["?"] == "help" and named["q"] == "quit"

        for width in range(76, 84):
            await stage.resize(width, 24)
            for screen in "237":
                await stage.press(screen)
                assert stage.lines()[-1].rstrip().endswith("q quit"), (width, screen)

    play(act, boards.small(), (140, 24))


def test_a_click_selects_a_heading_sorts_and_the_wheel_moves(play, boards):
    async def act(stage):
        app = stage.app
        app.query_one("#slots").sort_by("slot")
        await stage.pilot.click("#slots", offset=(20, 5))
        assert app.desk.target == "globex/summarise"
        heading = stage.lines()[4].index("RUN")
        await stage.pilot.click("#slots", offset=(heading + 1, 1))
        assert "sort RUN ▼" in stage.text()
        assert app.desk.target == "acme/sql-gen"
        await stage.pilot.click("#slots", offset=(heading + 1, 1))
        assert "sort RUN ▲" in stage.text()
        before = app.desk.target
        app.query_one("#slots").on_mouse_scroll_down(_Wheel())
        assert app.desk.target != before

    play(act, boards.small())


class _Wheel:
    def stop(self):
        pass


def test_what_is_frozen_says_so_and_goes_on_where_the_daemon_is(play, boards):
    board = boards.small()

    async def act(stage):
        await stage.press("space")
        stage.clock.now += 7
        for delta in boards.deltas(board, 2):
            await stage.tell(Changed(delta))
        assert "FROZEN, data from 16:32:07, 7 s old" in stage.text()
        assert "wait 4" in stage.text()
        await stage.press("space")
        assert "FROZEN" not in stage.text()
        assert "wait 2" in stage.text()
        stage.clock.now += 30
        stage.app.paint()
        await stage.pilot.pause()
        assert "NO NEWS for 30 s" in stage.text()

    play(act, board, (80, 24))


def test_events_are_new_until_somebody_touches_a_key(play, boards):
    async def act(stage):
        await stage.tell(*(Happened(boards.event(n, "slot.load", f"new/{n}")) for n in (200, 201)))
        assert "2 new" in stage.text()
        await stage.press("j")
        stage.app.paint()
        await stage.pilot.pause()
        assert "2 new" not in stage.text()
        assert "new/201" in stage.text()
        await stage.press("tab", "j", "j")
        assert "2 above" in stage.text()
        assert "new/201" not in stage.text()
        await stage.tell(Happened(boards.event(202, "slot.load", "new/202")))
        assert "3 above" in stage.text()
        assert "new/202" not in stage.text()
        await stage.press("g")
        assert "new/202" in stage.text()

    play(act, boards.small(), (80, 24))


def test_help_and_palette_have_every_key(play, boards):
    async def act(stage):
        app = stage.app
        await stage.resize(120, 70)
        await stage.press("question_mark")
        shown = stage.text()
        for key in KEYS:
            assert key.does in shown
        assert "shift+drag" in shown
        await stage.press("q", "ctrl+p", *"paper", "enter")
        assert app.theme == "paper"
        await stage.press("ctrl+p", *"freez", "enter")
        assert app.model.frozen
        await stage.press("ctrl+p", *"zz", "enter")
        await stage.type(":sort idle", "enter")
        assert "sort IDLE" in stage.text()
        for said in ("filter hooli", "interval 5"):
            await app.command(said)
        assert app.query_one("#slots").listing.filter_text == "hooli"
        assert (app.interval, stage.source.paces) == (5.0, [5.0])
        await stage.press("minus", "t")
        assert stage.source.paces == [5.0, 2.0]
        assert app.theme == "terminal"
        for wrong in ("dance", "sort colour", "theme pink", "interval soon"):
            app.said = ""
            await app.command(wrong)
            assert wrong.split()[-1] in app.said or "0.5 to 60" in app.said
        await app.command("q")
        assert app._exit

    play(act, boards.small())


def test_read_only_has_no_key_that_changes_anything(play, boards):
    async def act(stage):
        assert "evict" not in stage.lines()[-1]
        await stage.press("question_mark")
        assert "evict it from the GPU" not in stage.text()
        assert "read-only" in stage.text()
        await stage.press("escape")
        for key in "pledx":
            await stage.press(key)
            assert "read-only" in stage.lines()[-1]

    play(act, boards.small(), settings=Settings(read_only=True))


def test_a_snapshot_is_the_board_and_the_screen_and_nobody_elses(
    play, boards, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    async def act(stage):
        await stage.press("ctrl+s", "ctrl+s")
        assert "saved lorad-top-20260301-163207-2.json" in stage.text()
        os.chmod(tmp_path, 0o500)

    play(act, boards.small(), (80, 24))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "lorad-top-20260301-163207-2.json",
        "lorad-top-20260301-163207-2.svg",
        "lorad-top-20260301-163207.json",
        "lorad-top-20260301-163207.svg",
    ]
    board = json.loads((tmp_path / names[2]).read_bytes())
    assert board["slots"]["acme/sql-gen"]["running"] == 11
    assert "acme/sql-gen" in (tmp_path / names[3]).read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_q_leaves_even_while_nobody_answers(play, boards):
    async def act(stage):
        await stage.tell(Whole(boards.small()), Lost("ECONNREFUSED", 10.0))
        await stage.press("slash", "x")
        await stage.press("escape", "q")
        assert stage.app._exit

    play(act, size=(80, 24))


def test_what_is_typed_faster_than_the_prompt_opens_is_not_taken_for_keys(play, boards):
    async def act(stage):
        names = {":": "colon", " ": "space", "/": "slash"}
        for text, taken in ((":sort rev", "sort rev"), ("/acme/sp state:act", "acme/sp state:act")):
            for character in text:
                key = names.get(character, character)
                stage.app.post_message(events.Key(key, character))
            await stage.pilot.pause()
            assert stage.app.query_one("#prompt").value == taken
            await stage.press("enter")
        assert "sort REV" in stage.text() and "filter acme/sp state:act" in stage.text()
        assert "FROZEN" not in stage.text() and "ARE YOU SURE" not in stage.text()

    play(act, boards.small())
