"""Where each row of an adapter lies: the packed row stream over whole pool blocks.

An adapter is a stream of rows.  Module by module, in order of layer and then of `MODULES`, come
its A rows (`rank` rows of d_in) and its B rows, rank-major (`rank` rows of d_out: row j is column j
of PEFT's lora_B).  Behind those lie, where the module has them, a row of bias, and two rows whose
sum is its gain: one alone would cut it to the arena's dtype.  A row starts on a 256-byte border and
never straddles two blocks; a row that does not fit in what is left of a block starts the next one.

What is at the model's ends comes last, as modules of a layer behind the last one.  Their rows are
as long as the vocabulary, which is more than a block for a small model: such a row is folded into
rows of equal width, the last one padded with zeros.  All others are read by kernels that want them
whole.
The packer writes the stream, the engine copies it block by block, and both find rows with `place`;
offsets are never stored.

Torch-free.  Sizes in bytes unless a name says otherwise.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import AdapterInvalid
from engine.messages import EngineInfo, PackedModule

#: Fused groups, in the order in which a layer computes them; a module's place in MODULES is its id.
GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
#: Groups whose weights may have room for guests behind them (`guests.py`).  One of our own kernels
#: writes their input; attention's output comes from libraries that leave no room.
ROOMY_GROUPS = ("qkv", "gate_up", "down")
#: 128 bytes in bf16: where rows of weights begin between such borders, the products of a step of 16
#: rows take 2 to 3% longer on an H200, with any other room 1%.
ROOM_ALIGN = 64

#: Groups that some families publish as one module, its parts side by side in the group's order.
FUSED_NAMES: dict[str, str] = {"qkv_proj": "qkv", "gate_up_proj": "gate_up"}
MODULES: tuple[str, ...] = tuple(m for group in GROUPS.values() for m in group)
#: Modules at the model's ends, in the layer behind the last one.  With `.rows`, rows that replace
#: the base's: A alone, of which each row is a token's.
PAIRED_ENDS: tuple[str, ...] = ("embed_tokens", "lm_head")
#: Of a classification head: an encoder's pair, and what replaces the base's.
HEAD_DENSE = "head.dense"
HEAD_ENDS: tuple[str, ...] = (
    HEAD_DENSE,
    *(f"head.{part}.{kind}.rows" for part in ("dense", "norm") for kind in ("weight", "bias")),
    "score.weight.rows",
    "score.bias.rows",
)
ENDS: tuple[str, ...] = (*PAIRED_ENDS, *(f"{end}.rows" for end in PAIRED_ENDS), *HEAD_ENDS)
MODULE_ID: dict[str, int] = {name: i for i, name in enumerate((*MODULES, *ENDS))}

#: 256-byte borders keep every row aligned for 16-byte loads and whole 32-byte sectors.
ROW_ALIGN = 256
#: Raise it when the meaning of the stream changes: packed files of another version are repacked.
VERSION = 4

#: A block of adapters alone: rows are whole in one, and a small adapter should not fill much more.
_LEAST_BLOCK_BYTES = 64 << 10
_ROWS_A_BLOCK = 4

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def room_of(columns: int, modules: int) -> int:
    """Elements behind each row of a weight of so many modules; 0 for no columns."""
    return -(-columns * modules // ROOM_ALIGN) * ROOM_ALIGN


@dataclass(frozen=True, slots=True)
class Shapes:
    """(d_in, d_out) of each module in MODULES; every layer is alike in the dense families."""

    num_layers: int
    dims: tuple[tuple[int, int], ...]
    vocab: int = 0

    def of(self, module: str) -> tuple[int, int]:
        """(d_in, d_out) of any module, those at the ends included."""
        if module in ENDS:  # a token is a vector of one 1 and zeros
            hidden = self.dims[0][0]
            if module.endswith(".rows") or module == HEAD_DENSE:
                return hidden, hidden
            return (self.vocab, hidden) if module == "embed_tokens" else (hidden, self.vocab)
        return self.dims[MODULE_ID[module]]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Everything that decides the bytes of a packed file.  `dtype` is the arena's.

    With `shards` above 1 a packed file has so many streams, one behind the other: each rank's own,
    in blocks of its arena.  All are laid out alike, by the `shapes` that one rank has.
    """

    shapes: Shapes
    dtype: str
    block_bytes: int
    shards: int = 1

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def id(self) -> str:
        """Twelve hex digits that name the layout; part of the packed file's name."""
        text = f"{VERSION}|{self.shapes}|{self.dtype}|{self.block_bytes}|{ROW_ALIGN}|{MODULES}"
        if self.shards > 1:
            text += f"|{self.shards}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `first..first+rows` of a run, back to back in one block of the adapter."""

    block: int  # index into the adapter's own block list
    offset: int  # bytes from the start of that block
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class RowRun:
    """`rows` rows of `width` elements; consecutive rows are `stride` bytes apart within a block.

    With `folds` above 1 so many of them are one row of the tensor, side by side.
    """

    rows: int
    width: int
    stride: int
    pieces: tuple[Piece, ...]
    folds: int = 1


@dataclass(frozen=True, slots=True)
class PlacedModule:
    """One LoRA pair with its place.  `a` rows have width d_in, `b` rows width d_out: B's own, then
    the bias, then the halves of the gain."""

    layer: int
    module: str
    rank: int
    scaling: float
    a: RowRun
    b: RowRun
    bias: bool = False
    gain: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The whole stream: `num_blocks` blocks hold `modules`."""

    modules: tuple[PlacedModule, ...]
    num_blocks: int
    true_bytes: int


def kv_block_bytes(
    *, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str
) -> int:
    """Bytes of one pool block: K and V of `block_size` tokens in all layers."""
    return block_size * num_layers * 2 * num_kv_heads * head_dim * ITEMSIZE[dtype]


def adapter_block_bytes(shapes: Shapes, dtype: str) -> int:
    """Bytes of a block that no KV shares: a power of two that holds some of the widest rows."""
    widest = max(width for dims in shapes.dims for width in dims) * ITEMSIZE[dtype]
    return max(_LEAST_BLOCK_BYTES, 1 << (_ROWS_A_BLOCK * widest - 1).bit_length())


def needs_base(modules: Iterable[PackedModule]) -> bool:
    """Whether packed files of `modules` are made with the base's weights: the same adapter has
    other gains, and other rows that differ, on another base of the same shape."""
    return any(m.gain or m.tokens for m in modules)


def stream_id(layout: str, base: str, modules: Iterable[PackedModule]) -> str:
    """What packed files of `modules` are for: the layout, and the base's weights too where these
    decide what is in them.  Part of their name."""
    return f"{layout}w{base}" if needs_base(modules) else layout


def stream_order(modules: Iterable[PackedModule]) -> tuple[PackedModule, ...]:
    """Sort into the order in which rows are laid."""
    return tuple(sorted(modules, key=lambda m: (m.layer, MODULE_ID[m.module])))


def layout_of(info: EngineInfo) -> BlockLayout:
    """That of packed adapters of a running engine: its `id` is `info.layout`."""
    shapes = Shapes(info.num_layers, info.module_dims, info.num_ids)
    return BlockLayout(shapes, info.dtype, info.block_bytes, info.tensor_parallel)


def place(modules: Sequence[PackedModule], layout: BlockLayout) -> Placement:
    """Lay out `modules` (in stream order).  AdapterInvalid if a single row exceeds a block."""
    cursor = _Cursor(layout.block_bytes)
    placed = []
    true_bytes = 0
    for m in modules:
        d_in, d_out = layout.shapes.of(m.module)
        may_fold = m.module in ENDS and not m.replaces
        a = cursor.take(m.rank, d_in, layout.itemsize, may_fold)
        b = cursor.take(m.b_rows, d_out, layout.itemsize, may_fold)
        placed.append(PlacedModule(m.layer, m.module, m.rank, m.scaling, a, b, m.bias, m.gain))
        true_bytes += (m.rank * d_in + m.b_rows * d_out) * layout.itemsize
    return Placement(tuple(placed), cursor.num_blocks, true_bytes)


class _Cursor:
    """Walks the stream; dies with the pass."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.block = 0
        self.offset = 0

    @property
    def num_blocks(self) -> int:
        return self.block + (self.offset > 0)

    def take(self, rows: int, width: int, itemsize: int, may_fold: bool) -> RowRun:
        whole = self.block_bytes // ROW_ALIGN * ROW_ALIGN
        folds = -(-width * itemsize // whole) if may_fold and whole else 1
        rows, width = rows * folds, -(-width // folds)
        stride = -(-width * itemsize // ROW_ALIGN) * ROW_ALIGN
        if stride > self.block_bytes:
            raise AdapterInvalid(
                "E_ROW_TOO_LARGE",
                f"a row of {width} elements ({stride} bytes) exceeds a block of {self.block_bytes}",
                hint="raise block_size",
            )
        pieces = []
        first = 0
        while first < rows:
            room = (self.block_bytes - self.offset) // stride
            if room == 0:
                self.block, self.offset = self.block + 1, 0
                continue
            count = min(room, rows - first)
            pieces.append(Piece(self.block, self.offset, first, count))
            self.offset += count * stride
            first += count
        return RowRun(rows, width, stride, tuple(pieces), folds)
