"""Draw docs/images/acceptance.svg: how often drafts are right, over how far an adapter is.

    python docs/acceptance_picture.py [DATA ...]

DATA is what `benchmarks/acceptance.py` printed, all in docs/bench-data unless told.  An adapter
that is in several is drawn from the last.
"""

import html
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DATA, PICTURE = ROOT / "docs/bench-data", ROOT / "docs/images/acceptance.svg"
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 250, 46, 54, 28
#: Nats a token at the edges of a panel; nearer ones, the base itself too, lie on the left edge.
LEAST, MOST = 0.01, 16.0
TICKS = (0.01, 0.1, 1, 10)
#: A share of fewer guesses says nothing.
LEAST_TRIED = 10
MARKS = {"bible": "circle", "bofh": "square", "devil": "up", "jargon": "down", "pages": "diamond"}

Line = dict[str, Any]


class Series(NamedTuple):
    """Points of one draft in one panel: field `of` its lines."""

    name: str
    draft: str
    of: str
    colour: str


class Panel(NamedTuple):
    title: str
    temperature: float
    kind: str
    series: tuple[Series, ...]


BASE, SHORT = "#2a6fbb", "#c2571a"
PANELS = (
    Panel(
        "questions, greedy",
        0.0,
        "ask",
        (
            Series("the base drafts", "base", "right", BASE),
            Series("a short model drafts", "short", "right", SHORT),
        ),
    ),
    Panel(
        "questions, temperature 1",
        1.0,
        "ask",
        (
            Series("the base, same noise", "base", "right", BASE),
            Series("the base, likeliest", "base", "likeliest", "#7d8894"),
            Series("a short model, same noise", "short", "right", SHORT),
        ),
    ),
    Panel(
        "passages to copy, greedy",
        0.0,
        "copy",
        (
            Series("the base drafts", "base", "right", BASE),
            Series("n-grams, where any match", "ngram", "right", "#3d8b4f"),
        ),
    ),
)


def place(kl: float, share: float) -> tuple[float, float]:
    """Of a point in its panel."""
    at = math.log(min(max(kl, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return LEFT + at * (WIDTH - LEFT - 8), TOP + (1 - share) * (HEIGHT - TOP - 36)


def mark(kind: str, x: float, y: float, colour: str) -> str:
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4"',
        "square": f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"',
        "up": f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z"',
        "down": f'<path d="M{x:.1f} {y + 4:.1f}l4 -7h-8z"',
        "diamond": f'<path d="M{x:.1f} {y - 4.4:.1f}l4 4.4l-4 4.4l-4 -4.4z"',
    }
    return f'{shapes[kind]} fill="{colour}"/>'


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(words)}</text>'


def axes(panel: Panel) -> Iterator[str]:
    yield text(LEFT, 18, panel.title, 'font-weight="bold"')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), (end, _) = place(LEAST, share), place(MOST, share)
        yield f'<path d="M{x:.1f} {y:.1f}H{end:.1f}" stroke="#d5d9de"/>'
        yield text(x - 6, y + 4, f"{share:.0%}", 'text-anchor="end"')
    for kl in TICKS:
        x, y = place(kl, 0.0)
        yield f'<path d="M{x:.1f} {y:.1f}v4" stroke="#7d8894"/>'
        words = f"≤ {kl}" if kl == LEAST else f"{kl:g}"
        yield text(x, y + 17, words, 'text-anchor="middle"')
    yield text(
        WIDTH / 2 + 20, HEIGHT - 3, "KL(adapted || base), nats a token", 'text-anchor="middle"'
    )


def drawn(panel: Panel, lines: list[Line]) -> Iterator[str]:
    yield from axes(panel)
    shown = 0
    for series in panel.series:
        own = [
            line
            for line in lines
            if (line["temperature"], line["kind"], line["draft"])
            == (panel.temperature, panel.kind, series.draft)
            and line["tried"] >= LEAST_TRIED
        ]
        if not own:
            continue
        yield mark("circle", LEFT + 5 + 150 * (shown % 2), 30 + 13 * (shown // 2), series.colour)
        yield text(LEFT + 13 + 150 * (shown % 2), 34 + 13 * (shown // 2), series.name)
        shown += 1
        for adapter, shape in MARKS.items():
            points = [
                place(line["kl"], line[series.of])
                for line in sorted(own, key=lambda line: (line["scale"], line["steps"]))
                if line["adapter"] == adapter
            ]
            if not points:
                continue
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline points="{path}" fill="none" stroke="{series.colour}" opacity=".35"/>'
            yield from (mark(shape, x, y, series.colour) for x, y in points)


def picture(lines: list[Line]) -> str:
    """The SVG of all panels, and what the marks mean."""
    width = len(PANELS) * WIDTH + (len(PANELS) - 1) * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 26}"'
        ' font-family="system-ui, sans-serif" font-size="11" fill="#39424c">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for n, panel in enumerate(PANELS):
        parts.append(f'<g transform="translate({n * (WIDTH + GAP)} 0)">')
        parts += drawn(panel, lines)
        parts.append("</g>")
    for n, (adapter, shape) in enumerate(MARKS.items()):
        name = "one being trained" if adapter == "pages" else adapter
        parts.append(mark(shape, LEFT + 5 + 120 * n, HEIGHT + 14, "#39424c"))
        parts.append(text(LEFT + 14 + 120 * n, HEIGHT + 18, name))
    return "\n".join([*parts, "</svg>", ""])


def read(paths: list[Path]) -> list[Line]:
    """Each adapter's lines from the last file that has any."""
    found: dict[str, list[Line]] = {}
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        own = [line for line in lines if "draft" in line]
        for adapter in {line["adapter"] for line in own}:
            found[adapter] = [line for line in own if line["adapter"] == adapter]
    return [line for name in sorted(found) for line in found[name]]


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments]
    told = read(paths or sorted(DATA.glob("*-acceptance.jsonl")))
    PICTURE.write_text(picture(told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
