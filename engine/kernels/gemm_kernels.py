"""The kernels of y = x Wᵀ + b, which read the weights once.

`vector_product` holds a tile of weights in registers, asked for before x is there, and takes a few
rows one after the other.  `tiled_product` goes through the tensor cores with the weights as the
tall side of the product, so that few rows waste nothing.  `gemm_device.py` launches them.

Split inputs: each program writes its partial sums to a workspace (splits, rows, d_out) of fp32, and
the one that comes last adds them up, always from the first split to the last.  Which program that
is changes nothing; a counter tells, and is zero again when the kernel ends.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from engine.kernels.dependent import let_next_come, wait_for_earlier


@triton.jit
def _store(out, bias, y, m, n, here, stride_out, BIAS: tl.constexpr):
    """Rows m[:, None], outputs n[None, :] of y."""
    if BIAS:
        y += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * stride_out + n, y.to(out.dtype.element_ty), mask=here)


@triton.jit
def _hand_in(
    out,
    bias,
    partial,
    counter,
    y,
    m,
    n,
    split,
    rows,
    d_out,
    stride_out,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Store y, or this split's part of it, and the whole if the others' parts are there by now."""
    here = (m < rows) & (n < d_out)
    if SPLITS == 1:
        _store(out, bias, y, m, n, here, stride_out, BIAS)
    else:
        size = rows.to(tl.int64) * d_out
        at = m.to(tl.int64) * d_out + n
        tl.store(partial + split * size + at, y, mask=here)
        tl.debug_barrier()  # the atomic is one thread's: it stands for what all of them have stored
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total = tl.zeros(y.shape, tl.float32)
            for first in range(0, SPLITS, AT_ONCE):
                for part in tl.static_range(AT_ONCE):  # from L2: other multiprocessors wrote them
                    at_part = partial + (first + part) * size + at
                    total += tl.load(at_part, mask=here, other=0.0, cache_modifier=".cg")
            _store(out, bias, total, m, n, here, stride_out, BIAS)
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["rows"])
def vector_product(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    rows,
    d_out,
    d_in,
    stride_x,
    stride_w,
    stride_out,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    CLOSELY: tl.constexpr,  # what comes behind may read x ahead of its own wait
):
    """OUTPUTS outputs (axis 0) of up to ROWS rows over STEP inputs (axis 1)."""
    let_next_come(PDL and not CLOSELY)
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    k = split * STEP + tl.arange(0, STEP)
    at = tl.minimum(n, d_out - 1).to(tl.int64)[:, None] * stride_w + k[None, :]
    if EVEN:
        w = tl.load(weight + at, eviction_policy="evict_first")
    else:
        w = tl.load(weight + at, mask=(k < d_in)[None, :], other=0.0, eviction_policy="evict_first")
    # w (OUTPUTS, STEP) is on its way while the kernel ahead ends.
    wait_for_earlier(PDL)
    let_next_come(PDL and CLOSELY)
    m = tl.arange(0, ROWS)[:, None]
    y = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for row in tl.static_range(ROWS):
        mask = row < rows if EVEN else (row < rows) & (k < d_in)
        xk = tl.load(x + row * stride_x + k, mask=mask, other=0.0)
        product = tl.sum(w.to(tl.float32) * xk.to(tl.float32)[None, :], axis=1)
        y = tl.where(m == row, product[None, :], y)
    _hand_in(
        out, bias, partial, arrived + tile, y, m, n[None, :], split, rows, d_out, stride_out,
        SPLITS, AT_ONCE, BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def tiled_product(
    x,
    weight,
    x_tiles,  # TMA: descriptors, else x and weight again
    weight_tiles,
    bias,
    out,
    partial,
    arrived,
    rows,
    d_out,
    d_in,
    stride_x,
    stride_w,
    stride_out,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,  # inputs of a split, whole steps
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # partial sums that are loaded together, divides SPLITS
    SERIAL: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    CLOSELY: tl.constexpr,  # as above
):
    """ROWS rows (axis 0) and OUTPUTS outputs (axis 1) over one split (axis 2), or over all of them.

    SERIAL: the splits' sums are made one after the other and added up in the same order, so the
    bits are those of the other way.
    """
    let_next_come(PDL and not CLOSELY)
    block, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    m = block * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(n, d_out - 1)
    wait_for_earlier(PDL)
    let_next_come(PDL and CLOSELY)
    k = tl.arange(0, STEP)
    wp = weight + inside.to(tl.int64)[:, None] * stride_w + k[None, :]
    xp = x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    live = (m < rows)[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    zero = 0.0
    if SPLITS > 1 and CHUNK == STEP:
        # No compiler knows it.  Where a split is one step, triton made total + (w x + 0.0) a
        # product that begins at the total, which tensor cores round otherwise than the sum.
        zero = tl.minimum(rows, 0).to(tl.float32)
    for turn in range(SPLITS if SERIAL else 1):
        k0 = (turn if SERIAL else split) * CHUNK
        acc = tl.full([OUTPUTS, ROWS], zero, tl.float32)
        for done in tl.range(0, CHUNK, STEP, num_stages=STAGES):
            at = k0 + done
            if TMA:
                w = weight_tiles.load([tile * OUTPUTS, at])
                xt = x_tiles.load([block * ROWS, at])
            elif EVEN:
                w = tl.load(wp + at, eviction_policy="evict_first")
                xt = tl.load(xp + at, mask=live, other=0.0)
            else:
                width = (k < d_in - at)[None, :]
                w = tl.load(wp + at, mask=width, other=0.0, eviction_policy="evict_first")
                xt = tl.load(xp + at, mask=live & width, other=0.0)
            acc = tl.dot(w, tl.trans(xt), acc, input_precision="ieee")
        total += acc
    counter = arrived + tile * tl.num_programs(0) + block
    _hand_in(
        out, bias, partial, counter, tl.trans(total), m[:, None], n[None, :], split, rows, d_out,
        stride_out, 1 if SERIAL else SPLITS, AT_ONCE, BIAS,
    )  # fmt: skip
