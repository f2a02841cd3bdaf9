"""Tile sizes of the products with weights, and which product takes which: choices as data.

Goes in: the number of rows and the weight's shape.  Comes out: a `Tile`, or None where torch's own
product is taken.  `benchmarks/gemm.py` measures tiles beside cuBLAS, alone and in the chain of a
decode step, and prints its best as lines of RULES.
"""

from typing import Literal, NamedTuple

#: "vector": few rows one after the other, the weights in registers.  "dot": tensor cores.
#: "stream": the same on Hopper alone, the weights in shared memory before x is there.
Form = Literal["vector", "dot", "stream"]


class Tile(NamedTuple):
    """One program's share of y = x Wᵀ, and how it is made."""

    form: Form
    rows: int  # of x: a power of two; of a "stream", also the sum of two of them
    outputs: int  # rows of the weight
    step: int  # inputs of one product; in the vector form all inputs of a program
    splits: int = 1  # programs that share the inputs of an output; the vector form has its own way
    warps: int = 4
    stages: int = 4  # steps on their way to shared memory (not "vector")
    tma: bool = False  # tiles come by the copy engine ("dot")

    def chunk(self, d_in: int) -> int:
        """Inputs of one split: whole steps."""
        if self.form == "vector":
            return self.step
        return -(-d_in // (self.splits * self.step)) * self.step

    def fitted(self, d_in: int, itemsize: int, shared_bytes: int) -> "Tile":
        """The same for rows of d_in inputs: no empty split, no more stages than memory for them."""
        step = min(self.step, max(16, 1 << (d_in - 1).bit_length()))
        tile = self._replace(step=step)
        chunk = tile.chunk(d_in)
        stage = (self.rows + self.outputs) * step * itemsize
        stages = max(1, min(self.stages, int(0.95 * shared_bytes) // stage))
        return tile._replace(splits=-(-d_in // chunk), stages=stages)


class Rule(NamedTuple):
    """`tile` for products of at most so many rows, outputs and inputs; None: torch."""

    rows: int
    d_out: int
    d_in: int
    tile: Tile | None


_ANY = 1 << 30
#: Smaller weights stay with torch: none has been measured.
LEAST_WEIGHTS = 8 << 20

#: False: every product is torch's.
OWN = True

#: Forms whose programs are on the card all at once: LoRA's kernel behind them runs beside them.
LEADING: tuple[Form, ...] = ("dot", "stream")

#: The first rule that fits is taken; torch, if none does.  Shapes in the comments: Llama-3-8B's.
#: Measured on an H200 in the chain of a step (docs/bench-log.md), all products by torch beside:
#: 3.69 ms against 4.15 at 1 row, 4.10 against 4.43 at 16, 4.29 against 4.49 at 32, 4.38 against
#: 4.65 at 64, 4.63 against 4.67 at 80, 4.76 against 4.86 at 96, 4.90 against 5.04 at 128.  In the
#: tiles of 128 rows 80 took 5.82, and 96 took 5.47.  "o" is as quick with torch at 16 and 64 rows;
#: it is here for the kernels before and behind it, which cannot overlap with torch's.  At 80
#: torch's is quicker, 4.54, but a mixed step on four adapters takes 6.51 ms with ours and 6.62
#: with torch's.
RULES = (
    Rule(1, 4096, 8192, Tile("vector", 1, 4, 4096)),  # o
    Rule(1, 8192, 8192, Tile("vector", 1, 4, 4096)),  # qkv
    Rule(1, 65536, 8192, Tile("vector", 1, 4, 4096, warps=8)),  # gate_up
    Rule(1, _ANY, 8192, Tile("vector", 1, 2, 4096, warps=2)),  # head
    Rule(1, _ANY, _ANY, Tile("vector", 1, 2, 16384, warps=8)),  # down
    Rule(16, 4096, 8192, Tile("dot", 16, 64, 128, 2, stages=8, tma=True)),
    Rule(16, 8192, 8192, Tile("stream", 16, 64, 128, stages=7)),
    Rule(16, 65536, 8192, Tile("stream", 16, 128, 128, warps=8, stages=3)),
    Rule(16, _ANY, 8192, Tile("stream", 16, 64, 128, stages=2)),
    Rule(16, _ANY, _ANY, Tile("stream", 16, 64, 128, 4, stages=5)),
    Rule(32, 4096, 8192, Tile("dot", 32, 64, 128, 4)),
    Rule(32, 8192, 8192, Tile("dot", 32, 64, 128, 4, stages=3)),
    Rule(32, 65536, 8192, Tile("dot", 32, 128, 64, stages=5, tma=True)),
    Rule(32, _ANY, 8192, Tile("dot", 32, 64, 128, stages=3)),
    Rule(32, _ANY, _ANY, Tile("dot", 32, 64, 128, 2, stages=8, tma=True)),
    Rule(64, 4096, 8192, Tile("stream", 64, 64, 128, 2, stages=6)),
    Rule(64, 8192, 8192, Tile("stream", 64, 64, 128, stages=6)),
    Rule(64, 65536, 8192, Tile("stream", 64, 128, 128, warps=8, stages=2)),
    Rule(64, _ANY, 8192, Tile("dot", 64, 128, 128, warps=8, stages=2, tma=True)),
    Rule(64, _ANY, _ANY, Tile("stream", 64, 64, 128, 2, stages=6)),
    Rule(80, 4096, 8192, Tile("stream", 80, 64, 128, 2, stages=5)),
    Rule(80, 8192, 8192, Tile("stream", 80, 64, 128, stages=5)),
    Rule(80, 65536, 8192, Tile("stream", 80, 128, 128, warps=8, stages=2)),
    Rule(80, _ANY, 8192, Tile("stream", 80, 128, 128, warps=8, stages=2)),
    Rule(80, _ANY, _ANY, Tile("stream", 80, 64, 128, 2, stages=5)),
    Rule(96, 4096, 8192, Tile("stream", 96, 64, 128, 2)),
    Rule(96, 8192, 8192, Tile("stream", 96, 64, 128, stages=5)),
    Rule(96, 65536, 8192, Tile("stream", 96, 128, 64, stages=3)),
    Rule(96, _ANY, 8192, Tile("stream", 96, 128, 128, warps=8, stages=2)),
    Rule(96, _ANY, _ANY, Tile("stream", 96, 64, 128, 2, stages=5)),
    Rule(128, 4096, 8192, Tile("dot", 128, 64, 128, 2, tma=True)),
    Rule(128, 8192, 8192, None),
    Rule(128, 65536, 8192, Tile("dot", 128, 128, 64, stages=3, tma=True)),
    Rule(128, _ANY, 8192, Tile("dot", 128, 128, 64, stages=3)),
    Rule(128, _ANY, _ANY, Tile("dot", 128, 64, 128, 2, tma=True)),
)


def pick(rows: int, d_out: int, d_in: int, itemsize: int) -> Tile | None:
    """The tile of x (rows, d_in) times a weight (d_out, d_in) transposed; None: torch's product."""
    if not OWN or itemsize != 2 or d_out * d_in < LEAST_WEIGHTS:
        return None
    for rule in RULES:
        if rows <= rule.rows and d_out <= rule.d_out and d_in <= rule.d_in:
            return rule.tile
    return None


#: Deterministic products have one tile whatever the rows, and splits by the weight's shape alone.
#: Measured on an H200 beside smaller tiles: 1.2-1.35 of torch's time at 2,048 rows (they took
#: 1.5-1.7), 0.94-1.2 at 64, 0.96-1.08 at one.
FIXED = Tile("dot", 128, 128, 64, warps=8)
#: fp32 goes without tensor cores: the operands lie in registers.
FIXED_WIDE = Tile("dot", 16, 32, 32, stages=2)
#: Programs that a deterministic product of few rows is split for.
FIXED_PROGRAMS = 132


def fixed(d_out: int, d_in: int, itemsize: int) -> Tile:
    """The tile of every deterministic product with a weight (d_out, d_in)."""
    tile = FIXED if itemsize == 2 else FIXED_WIDE
    most = max(1, FIXED_PROGRAMS // -(-d_out // tile.outputs))
    steps = -(-d_in // tile.step)
    even = (n for n in range(min(most, steps), 0, -1) if steps % n == 0)
    return tile._replace(splits=next(even))


def is_serial(tile: Tile, rows: int, d_out: int) -> bool:
    """Whether there are tiles enough for the card, so that one program may make all splits."""
    return -(-rows // tile.rows) * -(-d_out // tile.outputs) >= FIXED_PROGRAMS // 2
