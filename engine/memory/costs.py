"""Costs: how many seconds it takes to bring back what gives way.

Goes in: prefill steps, reads, copies, and whether host memory still had what came back.  Comes
out: seconds for cached tokens and for adapters of any size, from either tier.  Starts from
assumptions, which measurements replace.  Knows nothing of who gives way (`memory/reclaim.py`).
"""

from dataclasses import dataclass, field

#: How fast a measurement replaces the assumption that it corrects.
_BLEND = 0.1
#: Rows of a prefill that count as one measurement: few rows cost more each, and say less.
_ROWS = 512


@dataclass(slots=True)
class Line:
    """Seconds of a move: `fixed`, whatever its size, and `each` for every block.

    The fixed part (a step until somebody looks, a file to open) makes small adapters the dearer
    ones by the byte: with seconds that only grow with blocks, size would cancel out of the cost.
    """

    fixed: float
    each: float
    usual: float = 40.0  # blocks of a move, a running mean

    def of(self, blocks: int) -> float:
        """Expected seconds for `blocks` blocks."""
        return self.fixed + self.each * blocks

    def observe(self, seconds: float, blocks: int) -> None:
        """A move of `blocks` blocks took `seconds`: a normalised step towards that (NLMS)."""
        self.usual += _BLEND * (blocks - self.usual)
        size = blocks / self.usual
        step = _BLEND * (seconds - self.of(blocks)) / (1.0 + size * size)
        self.fixed = max(self.fixed + step, 0.0)
        self.each = max(self.each + step * size / self.usual, 0.0)


def _copy() -> Line:
    """40 blocks of 2 MiB took 1.64 ms (DESIGN 4)."""
    return Line(fixed=0.0, each=41e-6)


def _read() -> Line:
    """A file in the page cache, at some 3 GB/s; nothing was measured for this."""
    return Line(fixed=0.0, each=0.7e-3)


@dataclass(slots=True)
class Costs:
    """Starts from an 8B model on an H200."""

    token_seconds: float = 25e-6  # prefill, per token
    copy: Line = field(default_factory=_copy)  # host memory to GPU
    read: Line = field(default_factory=_read)  # store to host memory
    kept: float = 1.0  # how often host memory still has what left the GPU, when it comes back

    def observe_prefill(self, seconds: float, rows: int) -> None:
        """A step of `rows` rows, most of them of prompts, took `seconds`."""
        blend = 1.0 - (1.0 - _BLEND) ** (rows / _ROWS)
        self.token_seconds += blend * (seconds / rows - self.token_seconds)

    def observe_return(self, kept: bool) -> None:
        """One that had a host copy when it left the GPU comes back: is the copy still there?"""
        self.kept += _BLEND * (kept - self.kept)

    def to_load(self, blocks: int, *, in_ram: bool) -> float:
        """Seconds until an adapter is on the GPU, from the tier below it now."""
        return self.copy.of(blocks) + (0.0 if in_ram else self.read.of(blocks))

    def to_return(self, blocks: int, *, in_ram: bool) -> float:
        """The same for one that leaves now, expected: its host copy may be dropped meanwhile.

        Without that, a small host cache would make those that passed through it last look cheap,
        whom it will have dropped when they come back.
        """
        lost = 1.0 - self.kept if in_ram else 1.0
        return self.copy.of(blocks) + lost * self.read.of(blocks)

    def to_compute(self, tokens: int) -> float:
        """Seconds of prefill."""
        return self.token_seconds * tokens
