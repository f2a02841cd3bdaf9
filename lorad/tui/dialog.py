"""The question before something is changed: No unless somebody says otherwise.

Goes in: an `Act`, and what is known of its adapter as it is now.  Comes out: the choice, None for
No.  What is in flight goes on changing while one thinks.
"""

from collections.abc import Callable
from typing import ClassVar

from textual import events

from lorad.tui.acts import Act, Choice, Subject
from lorad.tui.panel import Line, Span
from lorad.tui.prose import wrapped
from lorad.tui.sheet import Sheet

_LEAVING = ("ctrl+q", "ctrl+c")


class Dialog(Sheet[Choice]):
    """`about` is called again and again; None: it is about no adapter."""

    WIDTH: ClassVar[int] = 66

    def __init__(self, act: Act, about: Callable[[], Subject] | None = None) -> None:
        super().__init__("ARE YOU SURE?", hint="esc is no")
        self.panel.said = (("ARE YOU SURE?", "warn"),)
        self._act, self._about = act, about
        self._place = 0  # 0 is No

    def content(self, width: int) -> list[Line]:
        head = self._act.what[:1].upper() + self._act.what[1:] + "?"
        out: list[Line] = [((line, "strong"),) for line in wrapped(head, width)]
        if self._about is not None:
            about = self._about()
            ink = "warn" if about.running or about.waiting else ""
            out += [((line, ink),) for line in wrapped(about.in_flight(), width)]
        for text in self._act.lines:
            out += [((line, ""),) for line in wrapped(text, width)]
        return [*out, (), self._buttons()]

    def _buttons(self) -> Line:
        spans: list[Span] = []
        for place, label in enumerate(self._labels()):
            here = place == self._place
            mark = self.top.glyphs.here if here else " "
            spans.append((f"{mark}[{label}]", "strong+pick" if here else "key"))
            spans.append(("  ", ""))
        return tuple(spans)

    def _labels(self) -> list[str]:
        return ["n No", *(f"{choice.key} {choice.label}" for choice in self._act.choices)]

    # ------------------------------------------------------------- keys and mouse
    def on_key(self, event: events.Key) -> None:
        if event.key in _LEAVING:
            return
        event.stop()
        event.prevent_default()
        number = len(self._act.choices) + 1
        match event.key:
            case "enter":
                self._take(self._place)
            case "escape" | "n" | "q":
                self._take(0)
            case "tab" | "right" | "l" | "down" | "j":
                self._move((self._place + 1) % number)
            case "shift+tab" | "left" | "h" | "up" | "k":
                self._move((self._place - 1) % number)
            case key:
                for place, choice in enumerate(self._act.choices, start=1):
                    if choice.key == key:
                        self._take(place)

    def on_click(self, event: events.Click) -> None:
        """On a label."""
        event.stop()
        panel = self.panel.region
        if event.screen_y != panel.bottom - 2:
            return
        x = event.screen_x - panel.x - 2
        for place, label in enumerate(self._labels()):
            width = len(label) + 3
            if 0 <= x < width:
                self._take(place)
                return
            x -= width + 2

    def _move(self, place: int) -> None:
        self._place = place
        self.show()

    def _take(self, place: int) -> None:
        self.dismiss(self._act.choices[place - 1] if place else None)
