"""Boards that are always the same, and the dashboard over them without a terminal."""

import asyncio
import importlib.util
import os
import re
import sys
import time
from pathlib import Path

import pytest
import textual.app
import textual.pilot
from rich.cells import cell_len

from lorad.tui.app import Settings, TopApp
from lorad.tui.messages import Whole
from lorad.tui.office import Office

SNAPSHOTS = Path(__file__).parent / "snapshots"
#: With this set, snapshots are written anew: look at what `git diff` shows then.
WRITE = "LORAD_WRITE_SNAPSHOTS"
FAKES = Path(__file__).parents[1] / "fakes"


def module_of(file, name):
    """A module of tests/fakes, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FAKES / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def boards():
    """The module tests/fakes/boards.py."""
    return module_of("boards.py", "boards_of_the_dashboard")


@pytest.fixture(scope="session")
def fakes():
    """The module tests/fakes/daemon_client.py."""
    return module_of("daemon_client.py", "clients_of_the_dashboard")


#: Characters that keys have other names for.
NAMES = {" ": "space", "/": "slash", ":": "colon", "!": "exclamation_mark"}


class Clock:
    """Seconds that only a test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Stage:
    """An app that runs, its source and its clock."""

    def __init__(self, app, source, clock, pilot):
        self.app, self.source, self.clock, self.pilot = app, source, clock, pilot

    async def tell(self, *messages):
        """And wait until the screen shows it."""
        for message in messages:
            taken = self.app.num_taken
            self.source.tell(message)
            while self.app.num_taken == taken:
                await self.pilot.pause()
        self.app.paint()
        await self.pilot.pause()

    async def press(self, *keys):
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def type(self, text, *keys):
        await self.pilot.press(*(NAMES.get(c, c) for c in text), *keys)
        await self.pilot.pause()

    async def until(self, condition):
        """What another thread does has come to be."""
        for _ in range(4000):
            if condition():
                return
            await self.pilot.pause(0.005)
        pytest.fail(f"it never came to be; the screen shows\n{self.text()}")

    async def resize(self, width, height):
        await self.pilot.resize_terminal(width, height)
        # Textual waits a moment for the last of many.
        await self.until(lambda: self.app._resize_event is None)
        await self.pilot.pause()

    def lines(self):
        """What the terminal shows."""
        return [strip.text for strip in self.app.screen._compositor.render_strips()]

    def styles(self, of=""):
        """Of everything that is shown, after the app's filters; `of`: of lines that hold it."""
        ground = self.app.screen.background_colors[1]
        for strip in self.app.screen._compositor.render_strips():
            if of not in strip.text:
                continue
            for each in self.app.get_line_filters():
                strip = strip.apply_filter(each, ground)
            yield from (s.style for s in strip if s.style is not None and s.text.strip(" │|"))

    def cells(self):
        """How wide each line is on the terminal."""
        return [cell_len(line) for line in self.lines()]

    def text(self):
        return "\n".join(line.rstrip() for line in self.lines())


async def quiet():
    """Until nobody on the loop has anything to do: `asyncio` keeps what can run in `_ready`."""
    ready = asyncio.get_running_loop()._ready
    rounds = 0
    while rounds < 2:
        await asyncio.sleep(0)
        rounds = 0 if ready else rounds + 1


def idle_of(app):
    """What Textual waits by, which sleeps for 20 ms and looks whether the process did."""

    async def idle(min_sleep=0.0, max_sleep=1.0):
        for _ in range(3):  # what is called after a refresh may ask for one
            await quiet()
            app.screen._on_timer_update()  # does what it does 60 times a second, now
        await quiet()

    return idle


@pytest.fixture
def play(boards, monkeypatch):
    """`play(act, board, size, settings, daemon)`: run `act(stage)` on an app that shows the board.

    `daemon` answers what the app asks.
    """

    def run(act, board=None, size=(120, 36), settings=None, daemon=None):
        async def whole():
            clock, source = Clock(), boards.Script()
            office = None if daemon is None else Office(daemon.client)
            app = TopApp(source, settings or Settings(), office=office, clock=clock)
            for module in (textual.app, textual.pilot):
                monkeypatch.setattr(module, "wait_for_idle", idle_of(app))
            async with app.run_test(size=size) as pilot:
                stage = Stage(app, source, clock, pilot)
                if board is not None:
                    await stage.tell(Whole(board))
                await act(stage)
                source.tell(None)

        asyncio.run(whole())

    return run


@pytest.fixture(autouse=True)
def zone(monkeypatch):
    """Times of day are those of UTC; and nobody asks for no colour."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def same():
    """`same(name, text)`: it is what is kept in snapshots/."""

    def compare(name, text):
        path, text = SNAPSHOTS / name, text.rstrip() + "\n"
        if os.environ.get(WRITE):
            SNAPSHOTS.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"if that is meant: {WRITE}=1, and look at git diff"

    return compare


def plain_svg(svg):
    """Without what differs from run to run: the ids that Rich makes up."""
    return re.sub(r"terminal-\d+", "terminal", svg)


@pytest.fixture(scope="session")
def svg_of():
    """The screen of an app as an SVG that is always the same."""
    return lambda app: plain_svg(app.export_screenshot(title="loractl top"))
