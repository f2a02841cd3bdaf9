"""The lines below every screen: a banner when the link is lost, and which keys there are."""

from lorad.tui.draw import clock
from lorad.tui.keys import in_footer
from lorad.tui.panel import Line, Painted


class Banner(Painted):
    """One line when something is not as it should be, and none else."""

    def __init__(self) -> None:
        super().__init__(id="banner")

    def refresh_height(self) -> None:
        said = bool(self.text())
        if self.display != said:
            self.display = said
        self.repaint()

    def text(self) -> str:
        model = self.top.model
        link, board = model.link, model.board
        data = f", data from {clock(board.time)}" if board is not None else ""
        if link.final:
            return f"ENDED: {link.why}{data}"
        if not link.up and link.why != "connecting":
            retry = model.retry_seconds() or 0.0
            when = f"retry in {retry:.0f} s" if retry >= 0.5 else "trying now"
            return f"DISCONNECTED {model.lost_seconds():.0f} s, {when} ({link.why}){data}"
        if model.frozen:
            return f"FROZEN{data}, {model.age():.0f} s old; space goes on"
        if self.top.stale:
            return f"NO NEWS for {model.age():.0f} s{data}"
        return ""

    def lines(self, width: int, height: int) -> list[Line]:
        return [((f" {self.text()} ".ljust(width), "loud"),)]


class Footer(Painted):
    """Key hints, as many as fit."""

    def __init__(self) -> None:
        super().__init__(id="footer")

    def lines(self, width: int, height: int) -> list[Line]:
        if self.top.said:
            return [((f" {self.top.said}", "strong"),)]
        hints = list(in_footer(self.top.about, read_only=self.top.read_only))
        while sum(len(k.hint) + len(k.short) + 3 for k in hints) > width and len(hints) > 3:
            # Those at the end matter least, but how to get help and out stays.
            hints.remove(hints[-2])
        line: list[tuple[str, str]] = [(" ", "")]
        for key in hints:
            space = "" if key is hints[-1] else "  "  # two too many would end a full line in "..."
            line += [(key.hint, "key"), (f" {key.short}{space}", "faint")]
        return [tuple(line)]
