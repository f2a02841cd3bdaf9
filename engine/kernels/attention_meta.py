"""What the attention ops are told of a step.  Plain data; `engine/batch.py` builds it."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Where the S sequences of a step lie among its T rows and in the arena.

    A mixed step that is captured in a graph leaves the two tuples empty: there, lengths and row
    ranges are known at replay only.  On the device, rows beyond the last range are padding too.
    """

    query_starts: tuple[int, ...]  # S + 1: sequence s has rows [starts[s], starts[s + 1])
    seq_lens: tuple[int, ...]  # S: keys visible at the sequence's last row of this step
    slot_mapping: Tensor  # (T,) int64: block * block_size + offset of the row's K and V; -1 = none
    block_tables: Tensor  # (S, max_blocks) int32, padded with 0
    block_size: int
    #: The same on the device, at fixed addresses, for kernels; None on the CPU.
    seq_lens_device: Tensor | None = None  # (S,) int32; 0 = padding: no keys, and nothing to write
    query_starts_device: Tensor | None = None  # (S + 1,) int32
    #: Every sequence has one row: row i is sequence i's.
    single_rows: bool = False
    #: What a backend derives from the rest once a step, by its own keys.
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
