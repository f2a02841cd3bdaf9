"""The line that one types in: a filter, or a command."""

from collections.abc import Callable

from textual import events
from textual.widgets import Input

Take = Callable[[str, bool], None]


class Prompt(Input):
    """Hidden until `ask`; then `take(text, done)` for every change and at the end.

    Given up with escape, the text at the end is that of the beginning.
    """

    DEFAULT_CSS = """
    Prompt { height: 1; border: none; padding: 0 1; background: $panel; display: none; }
    Prompt:focus { border: none; }
    """

    def __init__(self) -> None:
        super().__init__(id="prompt", select_on_focus=False, compact=True)
        self._take: Take | None = None
        self._begun = ""

    @property
    def open(self) -> bool:
        return self._take is not None

    def ask(self, what: str, start: str, take: Take) -> None:
        """`what` is said while nothing is typed."""
        self._take, self._begun = None, start
        self.placeholder, self.value = what, start
        self.cursor_position = len(start)
        self.display = True
        # At once: `focus` would wait for its turn, and what is typed until then would be taken for
        # keys of the table.
        self.screen.set_focus(self, scroll_visible=False)
        self._take = take

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._take is not None:
            self._take(event.value, False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._close(event.value)

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self._close(self._begun)

    def on_blur(self) -> None:
        if self._take is not None:
            self._close(self.value)

    def _close(self, text: str) -> None:
        take, self._take = self._take, None
        self.display = False
        if take is not None:
            take(text, True)
