"""Boards that are always the same, and the dashboard over them without a terminal."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from lorad.tui.app import Settings, TopApp
from lorad.tui.messages import Whole
from lorad.tui.office import Office

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

    async def resize(self, width, height):
        await self.pilot.resize_terminal(width, height)
        await self.pilot.pause()

    def lines(self):
        """What the terminal shows."""
        return [strip.text for strip in self.app.screen._compositor.render_strips()]

    def text(self):
        return "\n".join(line.rstrip() for line in self.lines())


@pytest.fixture
def play(boards):
    """`play(act, board, size, settings, daemon)`: run `act(stage)` on an app that shows the board.

    `daemon` answers what the app asks.
    """

    def run(act, board=None, size=(120, 36), settings=None, daemon=None):
        async def whole():
            clock, source = Clock(), boards.Script()
            office = None if daemon is None else Office(daemon.client)
            app = TopApp(source, settings or Settings(), office=office, clock=clock)
            async with app.run_test(size=size) as pilot:
                stage = Stage(app, source, clock, pilot)
                if board is not None:
                    await stage.tell(Whole(board))
                await act(stage)
                source.tell(None)

        asyncio.run(whole())

    return run
