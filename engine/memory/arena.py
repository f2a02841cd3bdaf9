"""The arena: the one tensor that holds cached keys and values and adapters alike.

Goes in: a layout, a number of blocks, a device.  Comes out: strided views, one a layer for
attention and one a row run for LoRA.  Knows nothing of who owns which block (`memory/pool.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.layout import BlockLayout, RowRun
from engine.models.bases import BaseSpec
from engine.models.spec import ModelSpec

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Arena:
    """`num_blocks` blocks of `layout.block_bytes` on `device`, zeroed.

    A block is the K and V of `block_size` tokens in all layers, layer after layer, or a piece of
    one adapter; an encoder has the latter alone.  Where a model drafts, its own K and V of the same
    tokens follow, in frames of its own shape.  Zeroed because attention may read, and mask, rows
    that nobody has written yet.
    """

    def __init__(
        self,
        spec: BaseSpec,
        layout: BlockLayout,
        *,
        block_size: int,
        num_blocks: int,
        device: torch.device,
        draft: ModelSpec | None = None,
    ) -> None:
        self.layout = layout
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.bytes = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self._flat = self.bytes.view(-1).view(DTYPES[layout.dtype])
        self._spec, self._draft = spec, draft

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def kv(self, layer: int) -> Tensor:
        """(num_blocks, 2, block_size, kv_heads, head_dim): keys at index 0, values at 1."""
        assert isinstance(self._spec, ModelSpec), "an encoder keeps no KV"
        return self._frame(self._spec, layer, 0)

    def draft_kv(self, layer: int) -> Tensor:
        """The same of the model that drafts."""
        assert isinstance(self._spec, ModelSpec) and self._draft is not None, "no model drafts"
        return self._frame(self._draft, layer, self._elements(self._spec))

    def _frame(self, spec: ModelSpec, layer: int, before: int) -> Tensor:
        """The KV of one layer; `before`: elements of a block that are another model's."""
        heads, dim = spec.num_kv_heads, spec.head_dim
        half = self.block_size * heads * dim
        block = self.block_bytes // self.layout.itemsize
        return self._flat.as_strided(
            (self.num_blocks, 2, self.block_size, heads, dim),
            (block, half, heads * dim, dim, 1),
            before + layer * 2 * half,
        )

    def _elements(self, spec: ModelSpec) -> int:
        """Of a block's KV."""
        return spec.kv_block_bytes(self.block_size, self.layout.dtype) // self.layout.itemsize

    def rows(self, block: int, offset: int, rows: int, width: int, stride: int) -> Tensor:
        """(rows, width) inside `block`; `offset` and `stride` are bytes."""
        start = (block * self.block_bytes + offset) // self.layout.itemsize
        return self._flat.as_strided((rows, width), (stride // self.layout.itemsize, 1), start)

    def pieces(self, run: RowRun, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """The views of a whole run, in rank order; `blocks` is the adapter's own block list."""
        return tuple(
            self.rows(blocks[p.block], p.offset, p.rows, run.width, run.stride) for p in run.pieces
        )
