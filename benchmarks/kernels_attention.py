"""Time of the attention kernels and of the fused row kernels, against torch, on one card.

    python benchmarks/kernels_attention.py [--only decode,chain,prefill,...] [--seconds 90]

decode   the decode kernel alone, its tiles and their rivals, over eight mixes of lengths
chain    what it adds to a chain of projections, as in a step: qkv, rotation, attention, o
prefill  whole prompts and chunks behind a cached prefix: own kernel, cuDNN, flash
plans    what the first prompt of a length costs in cuDNN, and the next ones
mixed    64 decodes beside a chunk of 512 rows, as an eager step and as a captured one
fixed    deterministic mode beside the usual way
rows     norm, rotation and gate

One JSON line a case and variant, at the end the fastest of each case.  Every variant is checked
first (`error`: norm of the difference from plain fp32 attention over norm of the result); then a
CUDA graph of all 32 layers is replayed, so that no two calls in a row read the same bytes, and the
median is taken.  `us` is one layer's; what is done once a step is shared among its layers.  A
variant that fails prints its error and the others go on; the exit code is 1 if any did.  Variants
that the time no longer allows print `left_out`.
"""

import argparse
import sys

import attention_decode
import attention_prefill
import attention_rows
import attention_steps
import torch
from attention_rig import BLOCK, Cache, Report

CASES = "decode,chain,prefill,plans,mixed,fixed,rows"


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=CASES)
    parser.add_argument("--seconds", type=float, default=90.0)
    arguments = parser.parse_args()
    report, only = Report(arguments.seconds), arguments.only.split(",")
    if unknown := set(only) - set(CASES.split(",")):
        parser.error(f"--only {','.join(sorted(unknown))}: not among {CASES}")
    torch.manual_seed(0)
    if {"decode", "chain"} & set(only):
        large = Cache(64 * 4096 // BLOCK)
        if "decode" in only:
            attention_decode.alone(report, large)
        if "chain" in only:
            attention_decode.in_a_chain(report, large)
        del large
        torch.cuda.empty_cache()
    small = Cache(4608)
    if "prefill" in only:
        attention_prefill.ways(report, small)
    if "plans" in only:
        attention_prefill.plans(report)
    if "mixed" in only:
        attention_steps.mixed(report, small)
    if "fixed" in only:
        attention_steps.fixed(report, small)
    if "rows" in only:
        attention_rows.run(report, small)
    report.best()
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
