"""Draw docs/images/affinity.svg from what benchmarks/affinity.py said.

    python docs/affinity_picture.py [DATA.jsonl]

Left: the share of requests that met their adapter, in every tenth of the time, one replica away for
a while.  Right: the fullest replica's load by the mean one's, and loads a minute.  Means of the
seeds of the first case in the data.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs/bench-data/2026-11-30-2cores-affinity.jsonl"
PICTURE = ROOT / "docs/images/affinity.svg"
COLOURS = {
    "affinity": "#0a7d55",
    "consistent": "#b35c00",
    "round-robin": "#4a6fb5",
    "random": "#8a8a8a",
}
#: Of the left panel, in pixels.
LEFT, TOP, WIDTH, HEIGHT = 60, 50, 420, 230
LOST = (1 / 3, 1 / 2)  # of the time

Means = Mapping[str, Mapping[str, float | Sequence[float]]]


def means(lines: Sequence[dict[str, object]]) -> Means:
    """By policy, over the seeds."""
    by_policy = defaultdict(list)
    for line in lines:
        if all(line[key] == lines[0][key] for key in ("zipf", "use")):
            by_policy[line["policy"]].append(line)
    found = {}
    for policy, runs in by_policy.items():
        mean = {
            key: sum(run[key] for run in runs) / len(runs)
            for key in ("hits", "max_to_mean", "loads_a_minute")
        }
        moments = zip(*(run["moments"] for run in runs), strict=True)
        found[policy] = {**mean, "moments": [sum(each) / len(each) for each in moments]}
    return found


def text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = "#333") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "#ddd") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}"/>'


def box(x: float, y: float, wide: float, high: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:.1f}" height="{high:g}" fill="{colour}"/>'


def over_time(found: Means) -> Iterator[str]:
    """The left panel."""
    yield text(LEFT, TOP - 20, "requests that met their adapter")
    start, end = (LEFT + WIDTH * share for share in LOST)
    yield box(start, TOP, end - start, HEIGHT, "#f6e3e3")
    yield text((start + end) / 2, TOP + 14, "one is lost", anchor="middle", fill="#a33")
    for percent in range(0, 101, 20):
        y = TOP + HEIGHT * (1 - percent / 100)
        yield line(LEFT, y, LEFT + WIDTH, y)
        yield text(LEFT - 6, y + 4, f"{percent}%", anchor="end")
    ends: list[float] = []
    for policy, mean in sorted(found.items(), key=lambda item: -item[1]["moments"][-1]):
        moments = mean["moments"]
        points = [
            (LEFT + WIDTH * (i + 0.5) / len(moments), TOP + HEIGHT * (1 - share))
            for i, share in enumerate(moments)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[policy]
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        label = max(points[-1][1] + 4, *(y + 15 for y in ends)) if ends else points[-1][1] - 8
        ends.append(label)
        yield text(LEFT + WIDTH + 2, label, policy, fill=colour)
    yield text(LEFT, TOP + HEIGHT + 20, "time: 300 s, a new adapter every 0.5 s", fill="#666")


def bars(found: Means, key: str, title: str, x: float, y: float, form: str) -> Iterator[str]:
    """One block of the right panel."""
    yield text(x, y - 20, title)
    most = max(float(mean[key]) for mean in found.values())
    for i, (policy, mean) in enumerate(found.items()):
        top, value = y + i * 24, float(mean[key])
        yield text(x + 78, top + 13, policy, anchor="end", fill=COLOURS[policy])
        wide = 150 * value / most
        yield box(x + 84, top, wide, 17, COLOURS[policy])
        yield text(x + 90 + wide, top + 13, format(value, form))


def draw(found: Means) -> str:
    parts = [
        *over_time(found),
        *bars(found, "max_to_mean", "fullest replica by the mean one", 600, TOP, ".2f"),
        *bars(found, "loads_a_minute", "loads a minute, all replicas", 600, TOP + 145, ",.0f"),
    ]
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="320" viewBox="0 0 900 320" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="900" height="320" fill="#fff"/>', *parts, "</svg>\n"])


def main() -> None:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    lines = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    PICTURE.write_text(draw(means(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
