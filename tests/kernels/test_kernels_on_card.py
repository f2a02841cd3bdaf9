"""The attention and row kernels on a card, over arenas with the strides of real models.

The oracle is `attention_fixed` in fp32, which `test_attention.py` holds to the reference.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.kernels import elementwise
from engine.kernels.attention_fixed import fixed_attention
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_tiles import DecodeTiles, PrefillTiles

pytestmark = pytest.mark.gpu

BLOCK = 16
ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def stride(self) -> int:
        """Elements of one block."""
        return self.layers * 2 * BLOCK * self.kv_heads * self.head_dim


SMOLLM2 = Shape(30, 9, 3, 64)
LLAMA3 = Shape(32, 32, 8, 128)
#: Each costs two compilations.
CASES = [
    (SMOLLM2, torch.bfloat16, 0),
    (SMOLLM2, torch.float16, 100),
    (SMOLLM2, torch.float32, 0),
    (LLAMA3, torch.bfloat16, 0),
    (LLAMA3, torch.bfloat16, 100),
    (Shape(4, 4, 4, 80), torch.bfloat16, 0),
    (Shape(4, 8, 2, 96), torch.float16, 0),
    (Shape(4, 8, 4, 256), torch.bfloat16, 0),
]


@dataclass
class Step:
    q: Tensor
    kv: Tensor
    meta: AttentionMeta
    lens: Tensor
    starts: Tensor

    def expected(self, window: int = 0) -> Tensor:
        return fixed_attention(self.q.float(), self.kv, self.meta, scale=0.1, window=window)


def step_of(
    shape: Shape, sequences: Sequence[tuple[int, int]], dtype: torch.dtype, *, far: bool = False
) -> Step:
    """Sequences of (context, rows); `far`: their blocks lie beyond 2^31 elements of the arena."""
    torch.manual_seed(0)
    lens = [context + rows for context, rows in sequences]
    counts = [-(-n // BLOCK) for n in lens]
    first = (1 << 31) // shape.stride + 1 if far else 0
    num_blocks = first + sum(counts)
    flat = torch.empty(num_blocks * shape.stride, dtype=dtype, device="cuda")
    half = BLOCK * shape.kv_heads * shape.head_dim
    kv = flat.as_strided(
        (num_blocks, 2, BLOCK, shape.kv_heads, shape.head_dim),
        (shape.stride, half, shape.kv_heads * shape.head_dim, shape.head_dim, 1),
        (shape.layers - 1) * 2 * half,
    )
    kv[first:] = torch.nan
    order = (first + torch.randperm(sum(counts))).tolist()
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for s, (length, count) in enumerate(zip(lens, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[s, :count] = torch.tensor(blocks)
        rows = torch.randn(count, 2, BLOCK, shape.kv_heads, shape.head_dim, device="cuda")
        if length % BLOCK:
            rows[-1, :, length % BLOCK :] = torch.nan
        kv[torch.tensor(blocks, device="cuda")] = rows.to(dtype)
    starts = list(itertools.accumulate((rows for _, rows in sequences), initial=0))
    q = torch.randn(starts[-1], shape.heads, shape.head_dim, device="cuda").to(dtype)
    device_lens, device_starts = (
        torch.tensor(values, dtype=torch.int32, device="cuda") for values in (lens, starts)
    )
    slots = torch.empty(0, dtype=torch.int64, device="cuda")
    meta = AttentionMeta(tuple(starts), tuple(lens), slots, tables.cuda(), BLOCK)
    return Step(q, kv, meta, device_lens, device_starts)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.isfinite().all()
    assert float((got.float() - want).norm() / want.norm()) <= ERRORS[dtype]


def attend(step: Step, window: int = 0) -> Tensor:
    from engine.kernels.attention_device import device_attention

    meta = replace(step.meta, derived={})
    return device_attention(step.q, step.kv, meta, scale=0.1, window=window)


MIXED = [(0, 1), (14, 1), (15, 1), (700, 1), (3000, 1), (0, 130), (500, 70), (33, 2)]


@pytest.mark.parametrize(("shape", "dtype", "window"), CASES)
def test_a_mixed_step_equals_the_reference(shape: Shape, dtype: torch.dtype, window: int) -> None:
    step = step_of(shape, MIXED, dtype)
    close(attend(step, window), step.expected(window), dtype)


@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA3])
def test_a_step_far_behind_in_a_large_arena(shape: Shape) -> None:
    step = step_of(shape, MIXED, torch.bfloat16, far=True)
    assert (
        step.kv.storage_offset() + step.kv.stride(0) * int(step.meta.block_tables.max()) > 1 << 31
    )
    close(attend(step), step.expected(), torch.bfloat16)


@pytest.mark.parametrize(
    "tiles",
    [
        DecodeTiles(64, 4, 3, 1, whole=4),
        DecodeTiles(64, 4, 4, apart=0),
        DecodeTiles(64, 4, 3, apart=0, turns=True, whole=4),
        DecodeTiles(128, 4, 2, least=1, early=False),
        DecodeTiles(128, 8, 3, 1, registers=128, apart=0),
        DecodeTiles(32, 2, 4, 4, least=1, turns=True),
    ],
)
def test_decode_with_other_tiles_gives_the_same_bits_every_time(tiles: DecodeTiles) -> None:
    """As the layers of a step have it: the first use of a plan, then many."""
    from engine.kernels.decode_plan import plan_decode
    from engine.kernels.paged_decode import decode_attention

    step = step_of(LLAMA3, [(0, 1), (700, 1), (3000, 1), (900, 1), (64, 1)], torch.bfloat16)
    plan = plan_decode(step.lens, None, heads=32, kv=step.kv, tiles=tiles)
    tables, outs = step.meta.block_tables, [torch.full_like(step.q, torch.nan) for _ in range(40)]
    for layer, out in enumerate(outs):
        decode_attention(step.q, step.kv, tables, plan, out, settled=layer > 0, scale=0.1)
    close(outs[0], step.expected(), torch.bfloat16)
    assert int(plan.sequences[2, 2]) >= 2, "the longest was not cut"
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(
    "tiles",
    [PrefillTiles(128, 128, 8, 2), PrefillTiles(128, 64, 8, 3), PrefillTiles(64, 64, 4, 3)],
)
def test_prefill_with_other_tiles(tiles: PrefillTiles) -> None:
    from engine.kernels.paged_prefill import prefill_attention
    from engine.kernels.prefill_plan import plan_prefill

    step = step_of(LLAMA3, [(0, 130), (500, 70), (33, 2)], torch.bfloat16)
    out = torch.full_like(step.q, torch.nan)
    plan = plan_prefill(
        step.lens, step.starts, num_rows=len(step.q), heads=32, kv=step.kv, tiles=tiles
    )
    tables = step.meta.block_tables
    prefill_attention(step.q, step.kv, tables, step.lens, step.starts, plan, out, scale=0.1)
    close(out, step.expected(), torch.bfloat16)


@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA3, Shape(4, 8, 4, 256)])
def test_a_chunk_behind_a_long_prefix_gives_the_same_bits_every_time(shape: Shape) -> None:
    """Its keys are cut into pieces, which arrive in another order each time."""
    from engine.kernels.attention_device import device_attention

    step = step_of(shape, [(3000, 16), (700, 5), (10, 3)], torch.bfloat16)
    meta = replace(step.meta, derived={})
    outs = [device_attention(step.q, step.kv, meta, scale=0.1, window=0) for _ in range(40)]
    close(outs[0], step.expected(), torch.bfloat16)
    plan = meta.derived["routes", 0].prefill
    assert int(plan.arrived.max()) >= 2 * len(outs), "nothing was cut"
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA3, Shape(4, 8, 4, 256)])
def test_the_fixed_way_gives_a_row_the_same_bits_however_it_comes(
    shape: Shape, dtype: torch.dtype, window: int
) -> None:
    """In a batch, alone, and in chunks that end anywhere, down to rows one by one."""
    from engine.kernels.attention_device import device_attention

    step = step_of(shape, [(700, 1), (0, 130), (500, 70), (33, 2)], dtype)

    def fixed(q: Tensor, meta: AttentionMeta) -> Tensor:
        meta = replace(meta, derived={})
        return device_attention(q, step.kv, meta, scale=0.1, window=window, deterministic=True)

    together = fixed(step.q, step.meta)
    close(together, step.expected(window), dtype)
    for s, (start, end) in enumerate(itertools.pairwise(step.meta.query_starts)):
        length, row = step.meta.seq_lens[s], start
        for count in itertools.cycle((1, 16, 7, 1, 64)):
            stop = min(row + count, end)
            meta = replace(
                step.meta,
                query_starts=(0, stop - row),
                seq_lens=(length - (end - stop),),
                block_tables=step.meta.block_tables[s : s + 1],
            )
            assert torch.equal(fixed(step.q[row:stop], meta), together[row:stop])
            row = stop
            if row == end:
                break


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_capped_scores_follow_tanh(head_dim: int) -> None:
    from engine.kernels.attention_device import device_attention
    from engine.kernels.reference import reference_attention

    step = step_of(Shape(4, 4, 2, head_dim), [(20, 1), (0, 6)], torch.bfloat16)
    meta = replace(step.meta, derived={})
    got = device_attention(step.q, step.kv, meta, scale=0.5, window=0, softcap=2.0)
    host = replace(meta, block_tables=meta.block_tables.cpu(), derived={})
    want = reference_attention(
        step.q.float().cpu(), step.kv.float().cpu(), host, scale=0.5, window=0, softcap=2.0
    )
    close(got, want.cuda(), torch.bfloat16)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_captured_step_follows_lengths_that_change(mixed: bool) -> None:
    """Same graph, other lengths, row ranges and padding: the eager kernels' bits."""
    from engine.kernels.attention_device import device_attention

    big = [(900, 1), (0, 1), (40, 1), (2000, 1)] + ([(30, 44), (0, 16)] if mixed else [])
    step = step_of(LLAMA3, big, torch.bfloat16)
    lens, starts = step.lens.clone(), step.starts.clone()
    captured = replace(
        step.meta,
        query_starts=() if mixed else step.meta.query_starts,
        seq_lens=() if mixed else step.meta.seq_lens,
        seq_lens_device=lens,
        query_starts_device=starts,
        single_rows=not mixed,
        derived={},
    )

    def forward() -> Tensor:
        captured.derived.clear()
        for _ in range(3):  # layers: a plan's first use differs from those behind it
            out = device_attention(step.q, step.kv, captured, scale=0.1, window=0)
        return out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = forward()
    cases = [step.lens.tolist(), [300, 0, 41, 1], [1, 1, 0, 2001]]
    for case in cases:
        counts = [rows for _, rows in big]
        if mixed:
            case, counts = [*case[:4], 50, 0], [*counts[:4], 50, 0]
        ranges = list(itertools.accumulate(counts, initial=0))
        lens.copy_(torch.tensor(case, dtype=torch.int32))
        starts.copy_(torch.tensor(ranges, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        again = forward()
        live = [
            row
            for s, length in enumerate(case)
            for row in range(ranges[s], ranges[s + 1])
            if length
        ]
        assert torch.equal(out[live], again[live])
        kept = [s for s, length in enumerate(case) if length and counts[s]]
        meta = replace(
            step.meta,
            query_starts=tuple(itertools.accumulate((counts[s] for s in kept), initial=0)),
            seq_lens=tuple(case[s] for s in kept),
            block_tables=step.meta.block_tables[kept],
            derived={},
        )
        want = fixed_attention(step.q[live].float(), step.kv, meta, scale=0.1, window=0)
        close(out[live], want, torch.bfloat16)


@pytest.mark.parametrize("rows", [2048, 3072])
def test_a_whole_prompt_through_sdpa_equals_the_kernel(rows: int) -> None:
    from engine.kernels.attention_device import device_attention

    step = step_of(LLAMA3, [(0, rows), (40, 1)], torch.bfloat16)
    table = step.meta.block_tables[0, : -(-rows // BLOCK)].long()
    k, v = (step.kv[table, side].flatten(0, 1)[:rows] for side in (0, 1))
    k, v = (torch.nn.functional.pad(part, (0, 0, 0, 0, 0, 1)) for part in (k, v))
    meta = replace(step.meta, derived={})
    got = device_attention(step.q, step.kv, meta, scale=0.1, window=0, fresh=(k, v))
    assert meta.derived["routes", 0].prompts == ((0, rows),)
    close(got, step.expected(), torch.bfloat16)
    close(attend(step), step.expected(), torch.bfloat16)


@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_the_row_kernels_equal_torchs(rows: int, dtype: torch.dtype) -> None:
    from engine.kernels import fused

    torch.manual_seed(0)
    for columns in (576, 4096, 8192):
        x, delta = (torch.randn(rows, columns, device="cuda").to(dtype) for _ in range(2))
        weight = torch.randn(columns, device="cuda").to(dtype)
        total = x + delta
        close(
            fused.rms_norm(x, weight, 1e-5, delta),
            elementwise.rms_norm(total, weight, 1e-5).float(),
            dtype,
        )
        assert torch.equal(x, total)
    gate_up = torch.randn(rows, 2 * 14336, device="cuda").to(dtype) * 4
    close(fused.silu_mul(gate_up), elementwise.silu_mul(gate_up, deterministic=True).float(), dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA3])
def test_rotation_writes_far_behind_in_a_large_arena(
    shape: Shape, dtype: torch.dtype, normed: bool
) -> None:
    from engine.kernels import fused_heads

    step = step_of(shape, [(0, 50)], dtype, far=True)
    heads, dim = shape.heads, shape.head_dim
    sizes = [heads * dim, shape.kv_heads * dim, shape.kv_heads * dim]
    qkv = torch.randn(50, sum(sizes), device="cuda").to(dtype)
    block = step.meta.block_tables[0].long()
    position = torch.arange(50, device="cuda")
    slots = block[position // BLOCK] * BLOCK + position % BLOCK
    inv_freq = torch.rand(dim // 2, device="cuda")
    angles = elementwise.angles(position, inv_freq, 1.0, deterministic=False)
    weights = [torch.randn(dim, device="cuda").to(dtype) for _ in range(2)]
    parts = torch.split(qkv.clone(), sizes, dim=1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
    if normed:
        q, k = (elementwise.rms_norm(a, w, 1e-6) for a, w in zip((q, k), weights, strict=True))
    q, k = elementwise.rotate(q, *angles), elementwise.rotate(k, *angles)
    got = fused_heads.rotate_and_write(
        qkv,
        step.kv,
        slots,
        angles,
        heads=heads,
        q_weight=weights[0] if normed else None,
        k_weight=weights[1] if normed else None,
        eps=1e-6,
    )
    for part, want in zip(got, (q, k, v), strict=True):
        close(part, want.float(), dtype)
    written = step.kv[slots // BLOCK, :, slots % BLOCK]
    close(written[:, 0], k.float(), dtype)
    assert torch.equal(written[:, 1], v)
