"""What the sampling kernels share: a row's record, its noise, and how the last program is known.

Device functions only; `sample_reference.py` says what they compute.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

#: Beyond any token id.
BEYOND: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_float(at):
    """The fp32 whose bits lie in an int32 word."""
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _ln(x, CARD: tl.constexpr):
    """On a card by its own unit: 2^-22 off where |ln x| < 1, in a third of the instructions."""
    if CARD:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def gumbel(ids, low, high, CARD: tl.constexpr):
    """-ln E of tokens `ids` under a key of two words; see `sample_reference.gumbel`."""
    bits = _mix(_mix(ids.to(tl.uint32) ^ low.to(tl.uint32)) ^ high.to(tl.uint32))
    u = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    series = 0.25 + u * (0.2 + u * 0.16666666666666666)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * series)))
    exact = -_ln(tl.maximum(1.0 - u, 2.3283064365386963e-10), CARD)
    return -_ln(tl.where(u < 0.0625, series, exact), CARD)


@triton.jit
def first_best(score, ids):
    """The largest score, and the lowest id that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, ids, BEYOND), 0)


@triton.jit
def ordered(x):
    """int32 that are in the order of the fp32 x; -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(key):
    """The fp32 of such an int32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_last(arrived, row, programs):
    """Whether this program is the last of the row's to come here; then it sees what all wrote.

    `arrived` is zero for every row before and after.
    """
    tl.debug_barrier()  # what this program's other threads wrote goes before the count
    last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrived + row, 0)
    return last


@triton.jit
def write_token(tokens, told, row, token):
    """For the next step a token that exists, for the host the truth."""
    tl.store(tokens + row, tl.maximum(token, 0).to(tl.int64))
    tl.store(told + row, token.to(tl.float64))
