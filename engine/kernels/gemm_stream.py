"""The tensor-core kernel of y = x Wᵀ + b whose weights are in shared memory before x is there.

As `tiled_product` in `gemm_kernels.py`, with the copies written out: each stage's weights are asked
for before the wait for the kernel ahead, its x behind it.  A card of Hopper's kind is needed, and
rows that begin at multiples of 16 bytes; `gemm_device.py` takes `tiled_product` elsewhere.

Rows between two powers of two are two products with the same weights, which are copied once: 80
rows are 64 and 16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from functools import cache

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

#: Its name changed between triton 3.6 and 3.7.
_together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _store(out, bias, y, m, n, here, stride_out, BIAS: gl.constexpr):
    """Rows m[None, :], outputs n[:, None] of y."""
    if BIAS:
        y += gl.load(bias + n, mask=here, other=0.0).to(gl.float32)
    gl.store(out + m.to(gl.int64) * stride_out + n, y.to(out.dtype.element_ty), mask=here)


@gluon.jit
def _places(m0, n0, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows (1, ROWS) from m0 on, outputs (OUTPUTS, 1) from n0 on."""
    n = (n0 + gl.arange(0, OUTPUTS, gl.SliceLayout(1, LAYOUT)))[:, None]
    m = (m0 + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)))[None, :]
    return m, n


@gluon.jit
def _keep(partial, y, m, n, split, rows, d_out):
    """This split's part of rows m and outputs n."""
    at = split * (rows.to(gl.int64) * d_out) + m.to(gl.int64) * d_out + n
    gl.store(partial + at, y, mask=(m < rows) & (n < d_out))


@gluon.jit
def _add_up(
    out,
    bias,
    partial,
    y,
    m,
    n,
    rows,
    d_out,
    stride_out,
    SPLITS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    BIAS: gl.constexpr,
):
    """All splits' parts, in their order."""
    here = (m < rows) & (n < d_out)
    size = rows.to(gl.int64) * d_out
    at = m.to(gl.int64) * d_out + n
    total = gl.zeros_like(y)
    for first in range(0, SPLITS, AT_ONCE):
        for part in gl.static_range(AT_ONCE):  # from L2: other multiprocessors wrote them
            at_part = partial + (first + part) * size + at
            total += gl.load(at_part, mask=here, other=0.0, cache_modifier=".cg")
    _store(out, bias, total, m, n, here, stride_out, BIAS)


@gluon.jit(do_not_specialize=["rows"])
def streamed_product(
    x_tiles,
    rest_tiles,  # of the last REST rows of a program's; without them x_tiles again
    weight_tiles,
    bias,
    out,
    partial,
    arrived,
    rows,
    d_out,
    stride_out,
    ROWS: gl.constexpr,
    REST: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    CLOSELY: gl.constexpr,  # what comes behind may read x ahead of its own wait
):
    """ROWS + REST rows (axis 0), either a power of two, and OUTPUTS outputs (axis 1) over STEPS
    steps of inputs (axis 2)."""
    if PDL and not CLOSELY:
        tl.extra.cuda.gdc_launch_dependents()
    block, tile, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    dtype: gl.constexpr = weight_tiles.dtype
    w_at = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, STEP], weight_tiles.layout)
    x_at = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], x_tiles.layout)
    if REST:
        rest_at = gl.allocate_shared_memory(dtype, [STAGES, REST, STEP], rest_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()  # the copy engine sees them so
    SIZE: gl.constexpr = (OUTPUTS + ROWS + REST) * STEP * dtype.primitive_bitwidth // 8
    FIRST: gl.constexpr = min(STAGES, STEPS)
    n0, m0, k0 = tile * OUTPUTS, block * (ROWS + REST), split * STEPS * STEP
    for stage in gl.static_range(FIRST):
        mbarrier.expect(ready.index(stage), SIZE)
        tma.async_copy_global_to_shared(
            weight_tiles, [n0, k0 + stage * STEP], ready.index(stage), w_at.index(stage)
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL and CLOSELY:
        tl.extra.cuda.gdc_launch_dependents()
    for stage in gl.static_range(FIRST):
        tma.async_copy_global_to_shared(
            x_tiles, [m0, k0 + stage * STEP], ready.index(stage), x_at.index(stage)
        )
        if REST:
            tma.async_copy_global_to_shared(
                rest_tiles, [m0 + ROWS, k0 + stage * STEP], ready.index(stage), rest_at.index(stage)
            )
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, ROWS, 16]
    )
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    if REST:
        narrow: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, REST, 16]
        )
        rest = gl.zeros([OUTPUTS, REST], gl.float32, narrow)
    for step in range(STEPS):
        here, done = step % STAGES, ready.index(step % STAGES)
        mbarrier.wait(done, (step // STAGES) & 1)
        xt = x_at.index(here).permute((1, 0))
        acc = warpgroup_mma(w_at.index(here), xt, acc, is_async=True)
        if REST:
            xt = rest_at.index(here).permute((1, 0))
            rest = warpgroup_mma(w_at.index(here), xt, rest, is_async=True)
            acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        more = step + STAGES < STEPS
        k = k0 + (step + STAGES) * STEP
        mbarrier.expect(done, SIZE, pred=more)
        tma.async_copy_global_to_shared(weight_tiles, [n0, k], done, w_at.index(here), pred=more)
        tma.async_copy_global_to_shared(x_tiles, [m0, k], done, x_at.index(here), pred=more)
        if REST:
            tma.async_copy_global_to_shared(
                rest_tiles, [m0 + ROWS, k], done, rest_at.index(here), pred=more
            )
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(stage))
    flat: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    y = gl.convert_layout(acc, flat)
    m, n = _places(m0, n0, ROWS, OUTPUTS, flat)
    if REST:
        last = gl.convert_layout(rest, flat)
        m_last, _ = _places(m0 + ROWS, n0, REST, OUTPUTS, flat)
    if SPLITS == 1:
        _store(out, bias, y, m, n, (m < rows) & (n < d_out), stride_out, BIAS)
        if REST:
            here_last = (m_last < rows) & (n < d_out)
            _store(out, bias, last, m_last, n, here_last, stride_out, BIAS)
    else:
        counter = arrived + tile * gl.num_programs(0) + block
        _keep(partial, y, m, n, split, rows, d_out)
        if REST:
            _keep(partial, last, m_last, n, split, rows, d_out)
        _together()  # the atomic is one thread's: it stands for what all of them have stored
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            _add_up(out, bias, partial, y, m, n, rows, d_out, stride_out, SPLITS, AT_ONCE, BIAS)
            if REST:
                _add_up(
                    out, bias, partial, last, m_last, n, rows, d_out, stride_out, SPLITS, AT_ONCE,
                    BIAS,
                )  # fmt: skip
            gl.store(counter, 0)


@cache
def _layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


def described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine has to know of a matrix (n, k) to fetch (rows, columns) of it."""
    layout = _layout(matrix.dtype, rows, columns)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)
