"""Screen 2: ten thousand adapters, asked for a page at a time and never by the screen's thread."""

import threading

import pytest

from lorad.caller import Unreachable
from lorad.tui.adapters import AdaptersPanel
from lorad.tui.messages import Lost, Whole

SIZE = (80, 24)


@pytest.fixture(scope="module")
def names(fakes):
    return tuple(fakes.adapter(i) for i in range(10_000))


@pytest.fixture
def daemon(fakes, names):
    return fakes.FakeDaemon(*names)


async def opened(stage):
    """The screen with its first page."""
    await stage.press("2")
    panel = stage.app.query_one(AdaptersPanel)
    await stage.until(lambda: panel.listing.total)
    await stage.pilot.pause()
    return panel


def test_ten_thousand_are_paged_filtered_and_sorted_by_the_daemon(play, boards, daemon):
    async def act(stage):
        panel = await opened(stage)
        pages = panel.listing
        assert "1-100 of 10000" in stage.text()
        await stage.press("G")
        await stage.until(lambda: not pages.due)
        await stage.pilot.pause()
        assert "9901-10000 of 10000" in stage.text()
        await stage.press("g", "slash", *"09", "enter")
        await stage.until(lambda: pages.total < 10_000)
        assert daemon.calls("adapters")[-1]["q"] == "09"
        await stage.app.command("filter state:idle tenant:tenant03 !099")
        await stage.until(lambda: not pages.due)
        last = daemon.calls("adapters")[-1]
        assert (last["state"], last["tenant"], last["q"]) == ("idle", "tenant03", None)
        assert "!099 within the page alone" in stage.text()
        await stage.app.command("filter state:nothing")
        await stage.pilot.pause()
        assert "no state nothing" in stage.text()
        await stage.press("escape")
        await stage.app.command("sort rank")
        await stage.until(lambda: not pages.due)
        assert daemon.calls("adapters")[-1]["sort"] == "-rank"
        await stage.pilot.click(panel, offset=(40, 1))
        await stage.app.command("sort rev")
        assert threading.get_ident() not in daemon.threads

    play(act, boards.small(), SIZE, daemon=daemon)


def test_keys_are_never_kept_waiting_by_a_daemon_that_does_not_answer(play, boards, daemon):
    async def act(stage):
        panel = await opened(stage)
        daemon.hold()
        await stage.press("G")
        assert "asking" in stage.text()
        for key in ("j", "k", "ctrl+d", "g", "G", "s", "S", "j"):
            await stage.press(key)
        await stage.press("1", "j", "2", "slash", *"adapter", "enter")
        stage.clock.now += 60
        await stage.tell(Whole(boards.small()))
        assert stage.app.view.key == "2"
        assert panel.listing.keys  # what was there stays in sight
        daemon.let_go()
        await stage.until(lambda: not panel.listing.due)
        asked = daemon.calls("adapters")
        assert len(asked) < 6, "only the newest question waits"

    play(act, boards.small(), SIZE, daemon=daemon)


def test_the_page_in_sight_is_asked_for_anew_and_keeps_its_selection(play, boards, daemon):
    async def act(stage):
        panel = await opened(stage)
        await stage.press("j", "j", "j")
        chosen, asked = panel.listing.selected, len(daemon.calls("adapters"))
        for name in list(panel.listing.keys[:2]):
            del daemon.adapters[name]
        stage.clock.now += 2
        stage.app.paint()
        await stage.until(lambda: panel.listing.total == 9_998)
        assert (panel.listing.selected, panel.listing.place) == (chosen, 1)
        assert len(daemon.calls("adapters")) == asked + 1
        await stage.press("space")  # frozen
        stage.clock.now += 60
        stage.app.paint()
        await stage.press("space", "1")  # another screen
        stage.clock.now += 60
        stage.app.paint()
        await stage.pilot.pause()
        assert len(daemon.calls("adapters")) <= asked + 2

    play(act, boards.small(), SIZE, daemon=daemon)


def test_what_cannot_be_asked_is_said_and_the_rows_stay(play, boards, daemon):
    async def act(stage):
        panel = await opened(stage)
        daemon.refuses["adapters"] = Unreachable("unix:///x", "stale")
        stage.clock.now += 2
        stage.app.paint()
        await stage.until(lambda: panel.error)
        await stage.pilot.pause()
        assert "cannot reach lorad" in stage.text() and len(panel.listing.keys) == 100
        del daemon.refuses["adapters"]
        stage.clock.now += 2
        stage.app.paint()
        await stage.until(lambda: not panel.error)
        await stage.app.command("filter regis")
        await stage.until(lambda: not panel.listing.due)
        await stage.pilot.pause()
        assert "no name has 'regis' in it; did you mean state:registered?" in stage.text()
        asked = len(daemon.calls("adapters"))
        await stage.app.command("filter nothing")
        await stage.until(lambda: not panel.listing.due)
        asked += 1
        await stage.tell(Lost("ECONNREFUSED", 4.0))
        assert "not connected" in stage.text()
        stage.clock.now += 2
        await stage.press("G", "s")
        stage.app.paint()
        assert len(daemon.calls("adapters")) == asked

    play(act, boards.small(), SIZE, daemon=daemon)
