"""Programmatic dependent launch: a kernel is on the card before the one ahead of it has ended.

Every kernel that is launched with `launch_pdl` calls `follow`, `follow_closely` or both halves of
`follow`, once in every program and before any return: it then ends after all that came before it,
which is what the kernel behind it relies on.  Before the wait it touches nothing that an unfinished
kernel may write.

Behind a kernel that follows closely nothing is unfinished but that kernel itself: what all before
it wrote may be read, and what they read may be overwritten, ahead of the wait.  Reads take L2
(`.cg`): a multiprocessor may have lines in L1 from before, but none that are stale of weights, the
base's and adapters', which nobody writes between a step's upload and its end.  Programs of
`lora_joint.py`, and of a mixed step's attention, may end without a wait; others of the same launch
wait, so it still ends after all that came before.  The decode rows' kernel beside prompts waits at
its end, and lets the next come at its beginning: that one finds both unfinished.
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


@triton.jit
def wait_for_sums(arrived, awaited, PDL: tl.constexpr):
    """Until `awaited` programs of this very kernel have been counted, and what they wrote is seen.

    They come first in the grid and wait for nobody, so none of them is kept from the card by those
    that wait here.  The interpreter runs programs one after the other: they are through.
    """
    if PDL:
        seen = _acquire(arrived)
        while seen < awaited:
            seen = _acquire(arrived)


@triton.jit
def _acquire(p):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [p], dtype=tl.int32, is_pure=False, pack=1
    )
