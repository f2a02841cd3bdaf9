"""The memory plan: what the device's bytes are for, and what the arena's share can hold.

Goes in: bytes that were measured at start.  Comes out: one table that a person can read.
Measures nothing and allocates nothing.
"""

from dataclasses import dataclass

from engine.layout import MODULES, BlockLayout, place, stream_order
from engine.messages import PackedModule

#: The adapter that the plan counts in: this rank on all projections of all layers.
USUAL_RANK = 16

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device.  `total` 0: memory is not the device's own, and only parts are known."""

    device: str
    rank: str = ""  # of several, as the title has it
    total: int = 0
    utilization: float = 0.0  # the share of `total` that the engine may take, all in all
    weights: int
    other: int = 0  # the driver, and whoever else is on the device
    steps: int = 0  # what the largest step needs beside all this
    step_text: str = ""
    graphs: int = 0
    graph_text: str = ""
    num_blocks: int
    block_bytes: int
    block_size: int
    adapter_blocks: int  # of one usual adapter
    draft_weights: int = 0  # of a model that drafts
    draft_block_bytes: int = 0  # its share of a block

    @property
    def arena(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def reserve(self) -> int:
        """What nobody has."""
        used = self.weights + self.draft_weights + self.other + self.steps + self.graphs
        return max(self.total - used - self.arena, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens that the arena holds if it holds nothing else."""
        return self.num_blocks * self.block_size

    @property
    def num_adapters(self) -> int:
        """Usual adapters that the arena holds if it holds nothing else."""
        return self.num_blocks // self.adapter_blocks

    def table(self) -> str:
        """Several lines, without an end of line."""
        title = f"memory plan of {self.rank}{self.device}"
        if self.total:
            title += f": {shown_size(self.total)}, gpu_memory_utilization {self.utilization:.2f}"
        arena = (
            f"{self.num_blocks:,} blocks of {shown_size(self.block_bytes)}: "
            f"{self.num_tokens:,} tokens or {self.num_adapters:,} adapters of rank {USUAL_RANK}"
        )
        share = shown_size(self.draft_block_bytes)
        lines = [
            ("weights", self.weights, ""),
            ("draft", self.draft_weights, f"the model that drafts, with {share} of each block"),
            ("other", self.other, "the driver, and other processes"),
            ("steps", self.steps, self.step_text),
            ("graphs", self.graphs, self.graph_text),
            ("arena", self.arena, arena),
            ("reserve", self.reserve, "left free"),
        ]
        return "\n".join([title, *(shown_row(*line) for line in lines if line[1])])


def usual_adapter_blocks(layout: BlockLayout) -> int:
    """Blocks that an adapter of USUAL_RANK on all projections takes."""
    modules = stream_order(
        PackedModule(layer, module, USUAL_RANK, 1.0)
        for layer in range(layout.shapes.num_layers)
        for module in MODULES
    )
    return place(modules, layout).num_blocks


def shown_row(name: str, num_bytes: int, text: str) -> str:
    """A line of a table of memory."""
    return f"  {name:<8}{shown_size(num_bytes):>11}  {text}".rstrip()


def shown_size(num_bytes: int) -> str:
    """For people."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / 1024:.1f} KiB"
