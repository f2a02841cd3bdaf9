"""What guided answers cost: compiling a grammar, making masks, and the step beside free answers.

    python benchmarks/guides.py --model DIR [--cases 64:0,64:1,64:16,64:64] [--masks-only]
                                [--prompt 512] [--tokens 128] [--lookahead auto]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  First come the masks alone, on DIR's tokenizer: for each kind of grammar a
random walk of --walk tokens through what it allows (`compile_ms`, `mask_us` and its p99 and
maximum, with the step to the next token in it).  Then a case is batch:guided: so many greedy
streams, of which so many follow a schema that does not end.  One JSON line each on stdout:
  step_ms    median over the steps in which every free stream makes a token (every stream, if none
             is free), and its 99th percentile
  guided_rate  tokens of a guided stream for each such step: below 1 by what its masks were late
  late       draws that were put off, of all of guided streams
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import msgspec
import numpy as np
from random_model import ensure_model
from rig import Rig, random_prompt

from engine import grammar
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.spec import read_spec
from engine.startup import tokenizer_size

CASES = "64:0,64:1,64:16,64:64"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
#: More than any stream of a benchmark gets to.
ENDLESS = {"type": "array", "items": PERSON, "minItems": 1000}


def grammars() -> dict[str, str]:
    """By kind, from the usual to one that was made to be dear."""
    wide = {
        "anyOf": [
            {"type": "object", "properties": {f"k{j}": {"type": "integer", "minimum": i}}}
            for i in range(10)
            for j in range(15)
        ]
    }
    return {
        "json_object": grammar.json_object(),
        "person": grammar.json_schema(json.dumps(PERSON)),
        "endless": grammar.json_schema(json.dumps(ENDLESS)),
        "wide": grammar.json_schema(json.dumps(wide)),
        "regex": grammar.regex("([a-z]{1,8} ){5,50}[a-z]+\\."),
        "choice": grammar.choice([f"answer number {n}" for n in range(200)]),
    }


def walk(known: grammar.Grammars, text: str, tokens: int, ends: set[int]) -> list[float]:
    """Seconds of each mask along a random answer, begun anew when it ends."""
    random, spent = np.random.default_rng(0), []
    matcher, drawn = known.matcher(text), list[int]()
    for _ in range(tokens):
        started = time.perf_counter()
        matcher.take(drawn)
        mask = matcher.mask()
        spent.append(time.perf_counter() - started)
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        drawn = [int(random.choice(ids))]
        if drawn[0] in ends:
            matcher, drawn = known.matcher(text), []
    return spent


def measure_masks(model: Path, tokens: int) -> None:
    spec = read_spec(model)
    vocab = min(spec.vocab_size, tokenizer_size(model) or spec.vocab_size)
    started = time.perf_counter()
    known = grammar.Grammars(model / "tokenizer.json", vocab, spec.eos_token_ids)
    seconds = time.perf_counter() - started
    print(json.dumps({"vocab": vocab, "tokenizer_ms": round(1e3 * seconds, 1)}), flush=True)
    for kind, text in grammars().items():
        started = time.perf_counter()
        known.check(text)
        compiled = time.perf_counter() - started
        spent = sorted(walk(known, text, tokens, set(spec.eos_token_ids)))
        line = {
            "grammar": kind,
            "compile_ms": round(1e3 * compiled, 2),
            "mask_us": round(1e6 * statistics.median(spent), 1),
            "mask_p99_us": round(1e6 * spent[int(0.99 * (len(spent) - 1))], 1),
            "mask_max_us": round(1e6 * spent[-1], 1),
        }
        print(json.dumps(line), flush=True)


def play(rig: Rig, prompts: list[list[int]], guided: int, tokens: int) -> list[dict[str, int]]:
    """Tokens by stream, step by step; the time stands under ""."""
    core: EngineCore = rig.core
    text = grammar.json_schema(json.dumps(ENDLESS))
    for n, prompt in enumerate(prompts):
        submit = rig.submit(prompt, tokens, None, f"r{n}")
        if n < guided:
            sampling = msgspec.structs.replace(submit.sampling, grammar=text)
            submit = msgspec.structs.replace(submit, sampling=sampling)
        core.take(submit)
    left, steps = len(prompts), []
    while left:
        frame = core.step()
        for delta in frame.deltas:
            left -= delta.finish_reason is not None
            if delta.finish_reason == "error":
                raise RuntimeError(delta.message or delta.code)
        made = {delta.request_id: len(delta.tokens) for delta in frame.deltas if delta.tokens}
        if made:
            steps.append(made | {"": time.perf_counter_ns()})
        elif core.idle:
            core.wait()
    while not core.idle:
        core.step()
    return steps


def measure_steps(rig: Rig, batch: int, guided: int, prompt: int, tokens: int) -> dict[str, Any]:
    random, vocab = np.random.default_rng(batch), rig.core.machine.vocab_size
    prompts = [random_prompt(random, prompt + 1, vocab) for _ in range(batch)]
    play(rig, prompts, guided, min(40, tokens))  # prompts are cached, kernels and grammar compiled
    before = rig.core.guides.num_late
    steps = play(rig, prompts, guided, tokens)
    free = {f"r{n}" for n in range(guided if guided < batch else 0, batch)}
    whole = [(a, b) for a, b in pairwise(steps) if free <= a.keys() and free <= b.keys()]
    gaps = sorted(b[""] - a[""] for a, b in whole)
    written = sum(f"r{n}" in b for _, b in whole for n in range(guided))
    case: dict[str, Any] = {
        "step_ms": round(statistics.median(gaps) / 1e6, 3),
        "step_p99_ms": round(gaps[int(0.99 * (len(gaps) - 1))] / 1e6, 3),
        "steps": len(gaps),
    }
    if guided:
        case["guided_rate"] = round(written / guided / len(whole), 3)
        case["late"] = rig.core.guides.num_late - before
        case["draws"] = guided * tokens
    return case


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--masks-only", action="store_true")
    parser.add_argument("--walk", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--lookahead", choices=("auto", "on", "off"), default="auto")
    options = parser.parse_args(argv)
    if not grammar.available():
        print("error: llguidance is missing\n  try: install lorad[guided]", file=sys.stderr)
        return 2
    ensure_model(options.model)
    measure_masks(options.model, options.walk)
    if options.masks_only:
        return 0
    cases = [tuple(map(int, case.split(":"))) for case in options.cases.split(",")]
    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        max_num_seqs=max(batch for batch, _ in cases),
        max_model_len=2 + options.prompt + options.tokens,
    )
    ahead = {"auto": None, "on": True, "off": False}[options.lookahead]
    with tempfile.TemporaryDirectory() as scratch:
        rig = Rig(config, Path(scratch), lookahead=ahead)
        for batch, guided in cases:
            figures = measure_steps(rig, batch, guided, options.prompt, options.tokens)
            line = {"device": rig.core.info.device_name, "batch": batch, "guided": guided}
            print(json.dumps(line | figures), flush=True)
        rig.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
