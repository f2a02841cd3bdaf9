"""What a metric is, and the constants that its name, labels and bounds are made of."""

from dataclasses import dataclass
from typing import Literal

Type = Literal["counter", "gauge", "histogram"]
Bounds = tuple[float, ...]
PREFIX = "lorad_"
#: Adapters without a label of their own, summed up; no adapter can be called so.
OTHER = "__other__"
#: Bounds that depend on the engine's block size: 0, then (2**n - 1) blocks.
BY_BLOCKS: Bounds = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """`group` is a heading of the reference page."""

    name: str
    type: Type
    labels: tuple[str, ...]
    help: str
    group: str
    bounds: Bounds = ()


def group(
    heading: str, *rows: tuple[str, Type, str, str] | tuple[str, Type, str, str, Bounds]
) -> tuple[Metric, ...]:
    """Rows of name, type, labels with spaces between, meaning, and bounds of a histogram."""
    return tuple(
        Metric(
            name if ":" in name else PREFIX + name,
            kind,
            tuple(labels.split()),
            text,
            heading,
            *bounds,
        )
        for name, kind, labels, text, *bounds in rows
    )
