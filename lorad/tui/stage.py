"""What the parts of the screen may know of the app that they are shown by.

Goes in: nothing.  Comes out: a protocol, so that panels, sheets and screens stand below the app.
"""

from typing import Protocol

from lorad.tui.draw import Glyphs
from lorad.tui.ink import Look
from lorad.tui.model import Model
from lorad.tui.office import Office
from lorad.wire_stream import Board


class Stage(Protocol):
    """Read only: what changes it are keys, and the two calls at the end."""

    @property
    def model(self) -> Model: ...
    @property
    def shown(self) -> Board | None:
        """With the ages of the last picture."""

    @property
    def office(self) -> Office | None:
        """None: there is no daemon that one could ask."""

    @property
    def glyphs(self) -> Glyphs: ...
    @property
    def look(self) -> Look: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def interval(self) -> float:
        """Seconds between two pictures."""

    @property
    def faded(self) -> bool:
        """What is shown is not what is."""

    @property
    def stale(self) -> bool: ...
    @property
    def said(self) -> str:
        """In the footer, for a moment."""

    @property
    def title_of_source(self) -> str: ...
    @property
    def screens(self) -> list[tuple[str, str]]:
        """Keys and names of all there are."""

    @property
    def screen_key(self) -> str:
        """Of the one in sight; "" before there is one."""

    @property
    def about(self) -> str:
        """What the rows of the screen in sight are to the keys; see View."""

    @property
    def target(self) -> str:
        """The adapter that keys are about; "" for none."""

    @property
    def height_above(self) -> int:
        """Lines above the screens."""

    def say(self, text: str, *, seconds: float = 3.0) -> None:
        """In place of the key hints, for a moment."""

    async def action_view(self, key: str) -> None:
        """Go to a screen."""
