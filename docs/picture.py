"""Draw docs/images/dashboard.svg: `loractl top` on a recording of a real daemon under churn.

    python docs/picture.py [SECONDS] [SCREEN]

The recording is the one that the tests play; SECONDS is the moment of it that is drawn.
"""

import asyncio
import html
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.cells import cell_len

from lorad.tui import replay
from lorad.tui.app import Settings, TopApp
from lorad.tui.messages import Message

ROOT = Path(__file__).parents[1]
TAPE = ROOT / "tests/tui/data/churn.jsonl.gz"
PICTURE = ROOT / "docs/images/dashboard.svg"
SIZE = (120, 36)
#: Whatever a viewer has of these keeps the columns; box drawing in a proportional font does not.
FONTS = "DejaVu Sans Mono, Menlo, Consolas, monospace"
TEXT = re.compile(
    r'<text class="(\S+)" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)" ([^>]*)>([^<]*)<'
)
#: Two spaces or more; those within a phrase stay.
GAP = "\N{NO-BREAK SPACE}{2,}"


class Until:
    """What the recording says in its first `seconds`, without its pauses; then it stays open."""

    title = "unix:/run/lorad/admin.sock"

    def __init__(self, seconds: float) -> None:
        self.said = threading.Event()
        self.given = 0  # messages
        self._seconds = seconds

    def pace(self, seconds: float) -> None:
        """There is none."""

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        for line in replay.read(TAPE):
            if line.at > self._seconds:
                break
            yield replay.as_message(line)
            self.given += 1
        self.said.set()
        stop.wait()


async def draw(seconds: float, screen: str) -> str:
    """The SVG of one screen at that moment."""
    source = Until(seconds)
    app = TopApp(source, Settings())
    async with app.run_test(size=SIZE) as pilot:
        await asyncio.to_thread(source.said.wait)
        while app.num_taken < source.given:
            await pilot.pause()
        await pilot.press(screen)
        app.paint()
        await pilot.pause()
        return app.export_screenshot(title="loractl top")


def apart(match: re.Match[str]) -> str:
    """Words at places of their own: not every viewer stretches a text to the length it is told."""
    kind, x, y, length, rest, escaped = match.groups()
    text = html.unescape(escaped)
    cell = float(length) / max(cell_len(text), 1)
    told = []
    for word in re.finditer(rf"(?:(?!{GAP}).)+", text):
        said = word[0].strip("\N{NO-BREAK SPACE}")
        if said:
            at = cell_len(text[: word.start()] + word[0][: word[0].index(said)])
            told.append(
                f'<text class="{kind}" x="{float(x) + cell * at:.1f}" y="{y}"'
                f' textLength="{cell * cell_len(said):.1f}" {rest}>{html.escape(said)}</text>'
            )
    return "".join(told).removesuffix("</text>") + "<" if told else "<text><"


def main() -> None:
    seconds, screen = (*sys.argv[1:], *("205", "1")[len(sys.argv) - 1 :])
    svg = asyncio.run(draw(float(seconds), screen))
    svg = re.sub(r"terminal-\d+", "terminal", svg)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: Fira Code.*?;", f"font-family: {FONTS};", svg)
    svg = TEXT.sub(apart, svg)
    PICTURE.write_text("\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n")


if __name__ == "__main__":
    main()
