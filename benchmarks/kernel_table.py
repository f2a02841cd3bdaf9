"""Where a step's time goes: the kernels of a profile, added up by name.

    python benchmarks/kernel_table.py FILE    show what `decode.py --profile FILE` wrote

Goes in: what ran on a device, each with name, start and end in seconds, and the number of steps
that it was.  Comes out: a table for one step.  Kernels may overlap (programmatic dependent launch,
side streams): a moment belongs to the kernel that began first.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Kernel = tuple[str, float, float]

#: An idle gap above this lies between steps, not between kernels.
GAP_SECONDS = 5e-6


@dataclass(slots=True)
class _Sum:
    launches: int = 0
    seconds: float = 0.0
    alone: float = 0.0
    gaps: float = 0.0


@dataclass(slots=True)
class Table:
    """`rows` by name; `idle` and `between` are seconds in which nothing ran, `span` all seconds."""

    span: float
    idle: float
    between: float  # the part of `idle` in gaps above GAP_SECONDS
    rows: dict[str, _Sum] = field(default_factory=dict)

    def a_step(self, steps: int) -> dict[str, object]:
        """As JSON, in microseconds; what takes most comes first.

        us: time on the device.  alone_us: the part in which no earlier kernel ran; with the gaps
        it adds up to the step.  gap_us: average idle time before a launch.
        """
        rows = sorted(self.rows.items(), key=lambda item: -item[1].alone - item[1].gaps)
        return {
            "steps": steps,
            "step_us": round(1e6 * self.span / steps, 1),
            "idle_us": round(1e6 * self.idle / steps, 1),
            "launches": round(sum(row.launches for _, row in rows) / steps, 2),
            "kernels": [
                {
                    "name": name,
                    "launches": round(row.launches / steps, 2),
                    "us": round(1e6 * row.seconds / steps, 2),
                    "alone_us": round(1e6 * row.alone / steps, 2),
                    "gap_us": round(1e6 * row.gaps / row.launches, 3),
                }
                for name, row in rows
            ],
        }


def tabulate(kernels: Sequence[Kernel]) -> Table:
    """The table of at least one kernel."""
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    rows: defaultdict[str, _Sum] = defaultdict(_Sum)
    begin = busy_until = ordered[0][1]
    idle = between = 0.0
    for name, start, end in ordered:
        row = rows[name]
        gap = max(0.0, start - busy_until)
        row.launches += 1
        row.seconds += end - start
        row.gaps += gap
        row.alone += max(0.0, end - max(start, busy_until))
        idle += gap
        between += gap if gap > GAP_SECONDS else 0.0
        busy_until = max(busy_until, end)
    return Table(busy_until - begin, idle, between, dict(rows))


def show(case: dict[str, Any], rows: int = 30) -> str:
    """One case of a file as a table for people; microseconds a step."""
    title = (
        f"batch {case['batch']} adapters {case['adapters']}: step {case['step_us']} us under the "
        f"profiler, idle {case['idle_us']}, {case['launches']} launches"
    )
    lines = [title, f"{'alone':>9} {'us':>9} {'launches':>9} {'gap each':>9}  kernel"]
    for row in case["kernels"][:rows]:
        figures = (row["alone_us"], row["us"], row["launches"], row["gap_us"])
        lines.append(" ".join(f"{figure:>9}" for figure in figures) + f"  {row['name'][:80]}")
    if len(case["kernels"]) > rows:
        lines.append(f"and {len(case['kernels']) - rows} more")
    return "\n".join(lines)


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text())["cases"]:
        print(show(one), end="\n\n")
