"""Screens 2 to 7 and what lies over them: what they show, at which size, in which look."""

import pytest
from msgspec.structs import replace

from lorad.tui.app import Settings
from lorad.tui.details import event_lines, tokens
from lorad.tui.event_log import EventLog
from lorad.tui.messages import Changed, Happened, Whole
from lorad.tui.model import MAX_EVENTS
from lorad.tui.panel import wide
from lorad.tui.prose import field, wrapped
from lorad.wire import EventItem
from lorad.wire_stream import Delta

SCREENS = ("2", "3", "4", "5", "6", "7")
SIZES = ((120, 36), (80, 24), (60, 16))


@pytest.fixture
def daemon(fakes):
    """Thirty adapters, and one that is refused."""
    broken = fakes.adapter(
        31,
        name="acme/broken",
        state="quarantined",
        reason="E_TRUNCATED",
        reason_message="too short",
    )
    return fakes.FakeDaemon(*(fakes.adapter(i) for i in range(30)), broken)


async def settled(stage, key):
    """The screen, with all that it asks for."""
    await stage.press(key)
    if key == "2":
        await stage.until(lambda: not stage.app.view.grid.listing.due)
    if key == "7":
        await stage.until(lambda: "admin.group" in stage.text() or "asking" not in stage.text())
    stage.app.said = ""
    stage.app.paint()
    await stage.pilot.pause()


def body(stage):
    """Of a screen, without the header and the footer, which are not its own."""
    above = stage.app.height_above
    return "\n".join(line.rstrip() for line in stage.lines()[above:-1])


def test_every_screen_is_as_it_was_at_every_size(play, boards, daemon, same):
    async def act(stage):
        for width, height in SIZES:
            await stage.resize(width, height)
            for key in SCREENS:
                await settled(stage, key)
                assert stage.cells() == [width] * height
                same(f"screen{key}-{width}x{height}.txt", body(stage))

    play(act, boards.small(), daemon=daemon)


def test_ascii_is_ascii_and_no_foreign_string_drives_the_terminal(play, boards, daemon, fakes):
    bad = boards.HOSTILE_NAMES
    for i, name in enumerate(bad):
        row = fakes.adapter(i, name=name, tenant=name, source=name, reason=bad[2],
                            reason_message=bad[1], state="idle")  # fmt: skip
        daemon.adapters[name] = row

    async def act(stage):
        def check(key):
            assert stage.text().isascii(), key
            assert stage.text().replace("\n", "").isprintable(), key
            assert stage.cells() == [stage.app.size.width] * stage.app.size.height, key

        for key in SCREENS:
            await settled(stage, key)
            check(key)
            await stage.press("enter")
            check(key)
            stage.app.pop_screen()
        await stage.resize(60, 16)
        await settled(stage, "2")
        await stage.press("e")
        check("e")
        stage.app.pop_screen()
        await stage.press("ctrl+p", "o")
        assert stage.text().replace("\n", "").isprintable()

    play(act, boards.hostile(), settings=Settings(ascii=True), daemon=daemon)


def test_without_colour_states_are_words(play, boards, daemon):
    async def act(stage):
        text = ""
        for key in SCREENS:
            await settled(stage, key)
            assert all(style.color is None and style.bgcolor is None for style in stage.styles())
            text += stage.text()
        for word in ("quarantined", "queued", "WARN", "warn", "following"):
            assert word in text, word

    play(act, boards.small(), (80, 24), Settings(theme="mono"), daemon)


def test_a_board_with_nothing_on_it_says_so_on_every_screen(play, boards, fakes):
    async def act(stage):
        said = {}
        for key in SCREENS:
            await stage.press(key)
            assert "waiting" in stage.text()
        await stage.tell(Whole(boards.empty()))
        for key in SCREENS:
            await settled(stage, key)
            said[key] = stage.text()
        for key, words in (
            ("2", "no adapter is registered"),
            ("3", "nothing is asked for"),
            ("4", "nothing was asked"),
            ("5", "nothing happened yet"),
            ("6", "there are no tenants"),
        ):
            assert words in said[key]
        assert "%" not in said["4"].split("PREFIX CACHE")[1].replace("0% of the pool", "")

    async def recorded(stage):
        await stage.press("2")
        assert "a recording has the slots alone" in stage.text()
        await stage.press("7")
        assert "a recording has no settings" in stage.text()
        await stage.press("1", "p")
        assert "no daemon" in stage.text()
        await stage.press("enter")
        assert "a recording has no more" in stage.text()

    play(act, None, (80, 24), daemon=fakes.FakeDaemon())
    play(recorded, boards.small(), (80, 24))


def test_a_gateway_has_no_settings_and_that_is_no_error(play, boards, daemon, fakes):
    async def act(stage):
        daemon.refuses["config"] = fakes.refused(404, "not_found", "a gateway has no config")
        await settled(stage, "7")
        await stage.until(lambda: "each member has its own" in stage.text())
        assert "settings are each member's" in stage.text() and "not_found" not in stage.text()

    play(act, boards.small(), (120, 36), daemon=daemon)


def test_rows_of_other_screens_have_details_of_their_own(play, boards, daemon):
    async def act(stage):
        for key, words, target in (
            ("3", ("REQUEST req-0000", "512 at most"), "acme/sql-gen"),
            ("5", ("EVENT drain.start", "c4a0d9", "No new requests are"), "globex/legal-v3"),
            ("6", ("TENANT acme", "acme/*", "1.2k a minute of 2.0k"), ""),
            ("7", ("CHECK disk", "loractl gc --dry-run"), ""),
        ):
            await settled(stage, key)
            await stage.press("enter")
            for said in words:
                assert said in stage.text(), said
            assert stage.app.desk.target == target
            await stage.press("escape")
        await stage.press("tab", "enter")
        assert "SETTING limits.queue" in stage.text() and "1024 at the next" in stage.text()
        await stage.press("escape", "3", "enter")
        await stage.tell(
            Changed(Delta(sequence=2, time=boards.moment(1), gone={"requests": ("req-0000",)}))
        )
        assert "it is gone" in stage.text()

    play(act, boards.small(), (80, 24), daemon=daemon)


def events(first, number):
    return [
        Happened(EventItem(id=i, time="2026-03-01T16:33:00Z", type="slot.load", name=f"a/{i}"))
        for i in range(first, first + number)
    ]


def test_the_log_follows_until_one_reads_and_counts_what_is_new(play, boards):
    async def act(stage):
        await stage.press("5")
        log = stage.app.query_one(EventLog).listing
        await stage.tell(*events(200, 3))
        assert log.row.name == "a/202" and "following" in stage.text()
        await stage.press("j")
        await stage.tell(*events(203, 4))
        assert log.row.name == "a/201" and "4 new" in stage.text()
        await stage.press("g")
        assert log.row.name == "a/206" and "following" in stage.text()
        gap = EventItem(id=1 << 62, time=boards.moment(), level="warn", type="gap", message="lost")
        await stage.tell(Happened(gap), *events(300, 1))
        assert "--- lost ---" in stage.text() and log.row.name == "a/300"
        for text, number in (
            ("level:warn", 2),
            ("type:slot", 10),
            ("adapter:a/2", 7),
            ("hooli", 1),
        ):
            await stage.app.command(f"filter {text}")
            assert len(log.keys) == number, text
        await stage.press("escape", "space")
        await stage.tell(*events(400, 2))
        assert log.row.name != "a/401"
        await stage.press("space")
        assert log.row.name == "a/401"
        for message in events(500, MAX_EVENTS + 10):
            stage.app.model.take(message)
        stage.app.paint()
        assert len(log.rows) == MAX_EVENTS and log.row.name == f"a/{509 + MAX_EVENTS}"

    play(act, boards.small())


def test_more_requests_than_a_board_has_room_for_are_counted(play, boards):
    async def act(stage):
        await stage.press("3")
        assert "the oldest 37 of 812" in stage.text()
        await stage.app.command("filter state:queued uid")
        assert len(stage.app.view.grid.listing.keys) == 4
        await stage.app.command("filter (base)")
        assert {row.adapter for row in map(stage.app.view.grid.listing.rows.get,
                                           stage.app.view.grid.listing.keys)} == {""}  # fmt: skip
        await stage.tell(Whole(replace(boards.small(), requests={})))
        assert "nothing" in body(stage)

    play(act, replace(boards.small(), num_requests=812))


def test_text_is_wrapped_to_cells_whatever_it_is_made_of(boards):
    for text in (*boards.HOSTILE_NAMES, "a few words of no length " * 9, "", "x" * 200):
        for width in (8, 20, 61):
            assert all(wide(((line, ""),)) <= width for line in wrapped(text, width)), text
            assert all(wide(line) <= max(width, 18) for line in field("name", text, width))
    item = EventItem(id=1, time="2026-03-01T16:33:00Z", type="slot.load", message="word " * 30)
    assert all(wide(line) <= 50 for line in event_lines(item, 50))


def test_a_vocabulary_of_its_own_says_how_far_it_goes(fakes):
    row = fakes.adapter(0)
    serving = fakes.FakeDaemon(row).client().adapter(row.name).serving
    for told, words in (
        ({}, ""),
        ({"num_tokens": 49_152}, "49,152"),
        ({"num_tokens": 49_155, "extra_tokens": 3}, "49,155, 3 behind the base's"),
    ):
        assert tokens(replace(serving, **told)) == words
