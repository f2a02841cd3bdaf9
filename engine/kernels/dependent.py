"""Programmatic dependent launch: a kernel is on the card before the one ahead of it has ended.

Every kernel that is launched with `launch_pdl` calls `follow`, `follow_closely` or both halves of
`follow`, once in every program and before any return: it then ends after all that came before it,
which is what the kernel behind it relies on.  Before the wait it touches nothing that an unfinished
kernel may write.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def let_next_come(PDL: tl.constexpr):
    """The kernel behind may be brought to the card."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Everything ahead has ended, and what it wrote is seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def follow(PDL: tl.constexpr):
    """Let the next kernel come, then wait until the one ahead has ended and its writes are seen.

    Kernels that only do this may all be on the card at once, the first of them unfinished.
    """
    let_next_come(PDL)
    wait_for_earlier(PDL)


@triton.jit
def follow_closely(PDL: tl.constexpr):
    """Wait first, then let the next kernel come.

    Whatever comes behind such a kernel may read, ahead of its own wait, what was written ahead of
    such a kernel.
    """
    wait_for_earlier(PDL)
    let_next_come(PDL)
