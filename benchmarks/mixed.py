"""What `mixed_tokens` trades: pauses between tokens against first tokens, by rows of a step.

    python benchmarks/mixed.py --model DIR [--budgets 0,128,192,256,2048] [--adapters 0,8,64]

The case `mixed` of `serve.py`, in this process, for every budget on one engine: --streams streams
decode, and every --every seconds a prompt of --prompt tokens arrives that wants one token.  A
budget is `mixed_tokens`; 0 is the engine's own choice.  One JSON line a case on stdout, as there,
with `mixed_tokens`: `p99_over_median` is the unevenness of pauses (the bar is 1.3), `ttft` what the
prompts pay for it.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import checkout  # noqa: F401
import torch
from offline import OfflineDriver
from random_model import ensure_model
from starting import settings
from workloads import Sizes, Workloads

from engine.config import EngineConfig
from engine.models.spec import read_spec


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--budgets", default="0,128,192,256,2048")
    parser.add_argument("--adapters", default="0,8,64")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--every", type=float, default=0.1, help="seconds")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured, a phase")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    ensure_model(options.model)
    options.tokens = 1
    counts = [int(n) for n in options.adapters.split(",")]
    chosen = settings(options, read_spec(options.model), [("mixed", (n,)) for n in counts])
    sizes = Sizes(
        prompt=options.prompt,
        tokens=1,
        room=chosen["max_model_len"],
        slots=chosen["slots"],
        seconds=options.seconds,
        every=options.every,
        streams=options.streams,
        rate=1.0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        driver = OfflineDriver(EngineConfig(model=str(options.model), **chosen), Path(scratch))
        print(driver.table, file=sys.stderr, flush=True)
        core = driver.rig.core
        machine = {"benchmark": "mixed", "torch": torch.__version__, "model": options.model.name}
        machine |= {"device": core.info.device_name, "dtype": core.info.dtype}
        workloads = Workloads(driver, sizes)
        for budget in (int(n) for n in options.budgets.split(",")):
            rows = budget or core.config.mixed_tokens
            core.scheduler.limits = replace(core.scheduler.limits, mixed_tokens=rows)
            for adapters in counts:
                for line in workloads.mixed(adapters):
                    print(json.dumps(machine | {"mixed_tokens": rows} | line), flush=True)
        driver.close()


if __name__ == "__main__":
    main()
