"""The dashboard: what keys and commands do.

Goes in: keys, clicks, words after a colon.  Comes out: what the shell shows next; files; text for
the clipboard.  What changes the daemon is asked for first, and is not here with --read-only.
"""

from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar

from textual.binding import Binding

from lorad.tui.desk import Desk
from lorad.tui.grid import Grid
from lorad.tui.help import Help
from lorad.tui.ink import LOOKS
from lorad.tui.keys import KEYS
from lorad.tui.palette import Action, Palette
from lorad.tui.replay import Replay
from lorad.tui.save import save
from lorad.tui.shell import Settings, Shell

__all__ = ["Settings", "TopApp"]

INTERVALS = (0.5, 1.0, 2.0, 5.0, 10.0)
MAX_INTERVAL = 60.0
#: `enter` is the tables' own, that of a row.
_ELSEWHERE = ("enter",)


class TopApp(Shell):
    """The app that `loractl top` runs."""

    BINDINGS: ClassVar[list[Any]] = [
        *(
            Binding(key.keys, key.action, key.does, show=False, priority=key.first)
            for key in KEYS
            if key.keys not in _ELSEWHERE
        ),
        *(Binding(str(n), f"view('{n}')", f"screen {n}", show=False) for n in range(1, 8)),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What opens the prompt is a character of what is typed while it is open."""
        return not (action in ("filter", "command") and self._prompt.open)

    # ------------------------------------------------------------- the selected row
    @cached_property
    def desk(self) -> Desk:
        return Desk(self)

    @property
    def target(self) -> str:
        return self.desk.target

    def action_detail(self) -> None:
        """All about the selected row."""
        self.desk.open(self._view.detail() if self._view is not None else None)

    def action_adapter(self, name: str) -> None:
        """All about an adapter, wherever it is."""
        self.desk.open(self.desk.adapter(name))

    def on_grid_chosen(self, message: Grid.Chosen) -> None:
        self.action_detail()

    def action_act(self, verb: str, name: str | None = None, number: int | None = None) -> None:
        """Ask, then do: pin, load, evict, drain, cancel, priority; `name` "" is the daemon."""
        self.desk.act(verb, name, number)

    def action_copy_name(self) -> None:
        self._copy(self.target, "the name")

    def action_copy_row(self) -> None:
        self._copy(self.desk.row_json(), "the row as JSON")

    def _copy(self, text: str, what: str) -> None:
        if not text:
            self.say("nothing is selected")
            return
        self.copy_to_clipboard(text)  # OSC 52: the terminal's, also over ssh
        self.say(f"copied {what}; shift+drag selects text")

    # ------------------------------------------------------------- tables
    @property
    def _grid(self) -> Grid[Any] | None:
        return self._view.grid if self._view is not None else None

    def action_sort_next(self) -> None:
        if self._grid is not None:
            self._grid.sort_next()

    def action_sort_reverse(self) -> None:
        if self._grid is not None:
            self._grid.sort_reverse()

    def action_wide(self) -> None:
        if self._grid is not None:
            self._grid.toggle_wide()

    def action_filter(self) -> None:
        """As it is typed; enter keeps it, escape takes it back."""
        grid = self._grid
        if grid is None:
            return

        def narrow(text: str, done: bool) -> None:
            grid.narrow(text)
            if done:
                grid.focus()

        self._prompt.ask("filter: word  !word  state:idle", grid.listing.filter_text, narrow)

    def action_escape(self) -> None:
        grid = self._grid
        if grid is not None and grid.listing.filter_text:
            grid.narrow("")

    # ------------------------------------------------------------- how it is shown
    def action_freeze(self) -> None:
        self.model.freeze()
        self.paint()

    def action_pace(self, by: int) -> None:
        nearest = min(INTERVALS, key=lambda each: abs(each - self.interval))
        place = INTERVALS.index(nearest) + by
        self._set_interval(INTERVALS[max(0, min(place, len(INTERVALS) - 1))])

    def _set_interval(self, seconds: float) -> None:
        self.interval = seconds
        self._source.pace(seconds)
        self.paint()
        self.say(f"a picture every {seconds:g} s")

    def action_refresh(self) -> None:
        self.paint(all=True)
        self.screen.refresh(layout=True)

    def action_theme_next(self) -> None:
        names = list(LOOKS)
        self.action_theme(names[(names.index(self.look.name) + 1) % len(names)])

    def action_theme(self, name: str) -> None:
        if name not in LOOKS:
            self.say(f"there is no theme {name}: {' '.join(LOOKS)}")
            return
        self.theme = name
        self.paint(all=True)
        self.say(f"theme {name}")

    def action_mouse(self) -> None:
        """Off, the terminal selects text as it does elsewhere."""
        driver: Any = self._driver
        self._mouse_on = not getattr(self, "_mouse_on", True)
        name = "_enable_mouse_support" if self._mouse_on else "_disable_mouse_support"
        with suppress(AttributeError):  # a driver without a mouse
            getattr(driver, name)()
        self.say("mouse on" if self._mouse_on else "mouse off: drag selects text")

    def action_save(self) -> None:
        if self.shown is None:
            self.say("there is nothing to save yet")
            return
        try:
            path = save(self.shown, self.export_screenshot(title="loractl top"))
        except OSError as error:
            self.say(f"not saved: {error.strerror or error}", seconds=6)
            return
        self.say(f"saved {path.name} and .svg", seconds=6)

    # ------------------------------------------------------------- commands
    def action_help(self) -> None:
        self.push_screen(Help())

    def action_palette(self) -> None:
        async def do(action: Action | None) -> None:
            if action is not None:
                await self.run_action(action)

        self.push_screen(Palette(), do)

    def action_command(self) -> None:
        async def do(text: str) -> None:
            await self.command(text)

        def take(text: str, done: bool) -> None:
            if done:
                if self._view is not None:
                    self._view.shown()
                self.call_later(do, text)

        self._prompt.ask("filter, sort, theme, interval, a screen, q", "", take)

    async def command(self, text: str) -> None:
        """What is typed after the colon."""
        word, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        screens = {name.lower(): key for key, name in self.screens}
        match word.lower():
            case "":
                return
            case "q" | "quit":
                self.exit()
            case "filter" if self._grid is not None:
                self._grid.narrow(rest)
            case "sort" if self._grid is not None:
                if not self._grid.sort_by(rest.lower()):
                    self.say(f"there is no column {rest!r} to sort by")
            case "theme":
                self.action_theme(rest)
            case "interval":
                self._command_interval(rest)
            case name if name in screens or name in screens.values():
                await self.action_view(screens.get(name, name))
            case name:
                await self._command_else(name, rest)

    def _command_interval(self, text: str) -> None:
        with suppress(ValueError):
            seconds = float(text.removesuffix("s"))
            if INTERVALS[0] <= seconds <= MAX_INTERVAL:
                self._set_interval(seconds)
                return
        self.say(f"an interval is {INTERVALS[0]:g} to {MAX_INTERVAL:g} seconds")

    async def _command_else(self, name: str, rest: str) -> None:
        """What is done to an adapter or a recording; whatever a key does can be said, too."""
        if isinstance(self._source, Replay) and (said := self._source.obey(name, rest)):
            self.say(said)
            return
        if self.desk.command(name, rest):
            return
        for key in KEYS:
            if name in (key.short, key.action):
                await self.run_action(key.action)
                return
        self.say(f"there is no command {name!r}; ? has all")

    def action_leave(self) -> None:
        self.exit()
