"""Programmatic dependent launch: a kernel is on the card before the one ahead of it has ended.

Every kernel that is launched with `launch_pdl` calls `follow` before it touches memory that
another kernel writes, in every program and before any return: it then ends after all that came
before it, which is what the kernel behind it relies on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def follow(PDL: tl.constexpr):
    """Let the next kernel come, then wait until the one ahead has ended and its writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
