"""The hyperbolic tangent and the sigmoid of a tile.

Goes in and comes out: fp32.  The tangent is made of what every backend has.  A difference of
exponentials loses the digits of a small argument, and most arguments of a soft cap are small: a
score of 1 under a cap of 50 is 0.02.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Near 0 by its series, whose next term is below fp32's grain there; else by exponentials."""
    square = x * x
    series = 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = x + x * square * series
    small = tl.exp(-2.0 * tl.abs(x))  # never beyond 1
    far = (1.0 - small) / (1.0 + small)
    return tl.where(square < 0.04, near, tl.where(x < 0, -far, far))


@triton.jit
def sigmoid(x, CARD: tl.constexpr):
    """1 / (1 + exp(-x)).  With CARD by the card's own two instructions: 4 for an element where the
    compiler's, which mind what cannot come here, are 13, and gates are bound by issuing them."""
    if CARD:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        small = tl.exp(-tl.abs(x))  # never beyond 1, whatever x
        return tl.where(x >= 0, 1.0, small) / (1.0 + small)
