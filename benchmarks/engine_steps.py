"""Tokens a second of the engine, in process: decode and prefill, base alone and mixed adapters.

    python benchmarks/engine_steps.py [--model DIR] [--batch 1,16,64] [--adapters 0,1,4,32]

One JSON line a case on stdout.  Adapters are seeded random ones of rank 16 on all projections.
Each case is one `generate` of `--tokens` tokens a stream after a warm-up; prompts are random and
distinct, so that nothing is shared through the prefix cache.
"""

import argparse
import json
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import checkout  # noqa: F401
import torch

from engine.adapters.digest import revision_digest
from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect
from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import SamplingParams
from engine.models.spec import ModelSpec, read_spec
from lorad.demo_model import ensure
from lorad.demo_stage import random_adapters

PROMPT_TOKENS = 128


def add_adapters(engine: Engine, model: Path, spec: ModelSpec, count: int, out: Path) -> list[str]:
    layout = spec.block_layout(block_size=engine.info.block_size, dtype=engine.info.dtype)
    revs = []
    for folder in random_adapters(model, out, count, rank=16):
        manifest = inspect(folder, spec)
        rev = revision_digest(folder, manifest)
        engine.add_adapter(pack_folder(folder, manifest, layout, folder, rev))
        engine.load(rev)
        revs.append(rev)
    return revs


def measure(
    engine: Engine, batch: int, revs: list[str | None], tokens: int, vocab: int
) -> dict[str, float]:
    """Seconds of a prefill-only and a whole run; decode is the difference."""
    rng = random.Random(batch)
    mix = [revs[i % len(revs)] for i in range(batch)]

    def run(new: int) -> float:
        prompts = [[rng.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        started = time.perf_counter()
        engine.generate(prompts, sampling, mix)
        return time.perf_counter() - started

    run(4)
    prefill = min(run(1) for _ in range(3))
    whole = min(run(tokens) for _ in range(3))
    step = (whole - prefill) / (tokens - 1)
    return {
        "prefill_ms": round(1e3 * prefill, 2),
        "step_ms": round(1e3 * step, 3),
        "decode_tokens_per_s": round(batch / step, 1),
        "prefill_tokens_per_s": round(batch * PROMPT_TOKENS / prefill, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--adapters", default="0,4")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args(argv)
    model = options.model or ensure()
    spec = read_spec(model)
    counts = [int(n) for n in options.adapters.split(",")]
    batches = [int(n) for n in options.batch.split(",")]
    config = EngineConfig(
        model=str(model),
        max_num_seqs=max(batches),
        max_model_len=PROMPT_TOKENS + options.tokens,
    )
    with tempfile.TemporaryDirectory() as scratch, Engine(config) as engine:
        revs = add_adapters(engine, model, spec, max(counts), Path(scratch))
        machine = {
            "device": engine.info.device_name or platform.processor(),
            "dtype": engine.info.dtype,
            "torch": torch.__version__,
            "model": model.name,
        }
        for batch in batches:
            for count in counts:
                if count > batch:
                    continue
                mix: list[str | None] = list(revs[:count]) or [None]
                case = {"batch": batch, "adapters": count, "prompt": PROMPT_TOKENS}
                case |= measure(engine, batch, mix, options.tokens, spec.vocab_size)
                print(json.dumps(machine | case), flush=True)


if __name__ == "__main__":
    main()
