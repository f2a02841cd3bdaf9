"""Rivals of what adapters cost, timed in turns on one card: mixed ranks, prompts, rank 8 beside 64.

    python benchmarks/lora_rivals.py [--only alone,few,kernels,prompt,chain,beside] [--seconds 110]
                                     [--workers 14]

Llama-3-8B's shape in bf16, adapters as in `lora_kernels.py`.  Every rival is checked against torch
in fp32 and captured; then all of a part are replayed one after the other, round by round, so that
a card that grows warm slows all of them alike; medians.  Prints JSON lines:

- `alone`: LoRA alone, two launches a module, 64 rows of 64 adapters; `ratio` to the bytes' floor;
- `few`: the same of steps whose adapters share rows;
- `kernels`: the kernels of a prompt of 2,048 rows, one by one, microseconds;
- `prompt`: such a prompt on one adapter, 8 layers of a chain as in `lora_chain.py`, times 4; each
  in pairs with the base.  `shrink` and `shrink and expand ...` leave the rest out: where the time
  goes.  `with_47.9` is the ratio that `added_ms` would make of the engine's 47.9 ms;
- `chain`: what 64 adapters add to a step's products, in one launch a module, or in two;
- `beside`: 32 adapters of rank 8 among 32 of rank 64, and either alone.  `marginal` is what the
  rank-8 ones add, over what they take alone, `to_floor` the same over their bytes; bar 1.10.

A rival that fails says so, and the others go on; the exit code is 1 if any did.
"""

import argparse
import sys
import time
from collections.abc import Callable

import checkout  # noqa: F401
import lora_rivals_alone
import lora_rivals_chain
import lora_rivals_prompt
import torch
from lora_cases import LAYOUT
from lora_chain import Chain
from lora_compile import Compiler
from lora_fleet import Fleet, placed
from lora_rivals_alone import MIXED, SAME
from lora_rivals_chain import BOTH
from lora_turns import KEPT, say

from engine.kernels import gemm_tiles
from engine.kernels import tiles as choices
from engine.memory.arena import Arena

PARTS = ("alone", "few", "kernels", "prompt", "chain", "beside")
EVERY = (*choices.ALL, *lora_rivals_alone.TILES, *lora_rivals_prompt.TILES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--seconds", type=float, default=110, help="no part begins later")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts).difference(PARTS):
        parser.error(f"no part is called {min(unknown)!r}; there are: {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        sys.exit("kernels are timed on a CUDA device, and torch sees none; try: nvidia-smi")
    torch.manual_seed(0)
    import triton

    start = time.monotonic()
    say(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
    )
    compiler = Compiler(options.workers)
    for module in (lora_rivals_alone, lora_rivals_chain, lora_rivals_prompt):
        module.compile_ahead(compiler, parts)
    fleets_of = {case.ranks for case in (MIXED, SAME, BOTH)}
    blocks = max(sum(placed(rank).num_blocks for rank in ranks) for ranks in fleets_of)
    arena = Arena(
        None,  # type: ignore[arg-type]  # asked for cached keys and values alone
        LAYOUT,
        block_size=16,
        num_blocks=blocks,
        device=torch.device("cuda"),
    )
    arena.bytes.view(-1).view(torch.bfloat16).normal_(0, 0.02)
    fleets = {ranks: Fleet(arena, ranks, EVERY) for ranks in fleets_of}
    compiler.wait()
    compiler.close()
    say(kind="compiled", seconds=round(time.monotonic() - start, 1))
    gemm_tiles.LEADING = ("vector", "dot", "stream")
    chain = Chain() if "chain" in parts or "beside" in parts else None
    runs: dict[str, Callable[[], bool]] = {
        "alone": lambda: lora_rivals_alone.alone(fleets),
        "few": lambda: lora_rivals_alone.few(fleets),
        "kernels": lambda: lora_rivals_prompt.kernels(fleets),
        "prompt": lambda: lora_rivals_prompt.prompts(fleets),
        "chain": lambda: chain is not None and lora_rivals_chain.chained(fleets, chain),
        "beside": lambda: lora_rivals_chain.beside(fleets, chain),
    }
    failed = False
    for part, run in runs.items():
        if part not in parts:
            continue
        if time.monotonic() - start > options.seconds:
            say(kind="left out", part=part)
            continue
        try:
            failed |= run()
        except Exception as error:  # the other parts go on
            failed = True
            say(kind="failed", part=part, error=f"{type(error).__name__}: {error}"[:600])
        KEPT.clear()
        torch.cuda.synchronize()
        say(kind="part ended", part=part, seconds=round(time.monotonic() - start, 1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
