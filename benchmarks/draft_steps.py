"""What a step costs in which everybody has drafts, beside a plain one, and what has to be right.

    python benchmarks/draft_steps.py --model DIR [--cases 1:0,8:0,8:8,64:0] [--drafts 0,1,2,4,8]
                                     [--prompt 512] [--tokens 64] [--lookahead auto]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  A case is batch:adapters: so many greedy streams, on so many adapters in turn
(0 = the base).  Drafts are of full length in every step, are guessed at random and so nearly always
wrong: what they cost is all that is seen of them.  The limits of `engine/speculation.py` on rows
and on what is worth it are lifted.  One JSON line for each case and length on stdout:
  step_ms      median over the steps in which every stream makes a token, and its 99th percentile
  rows         of such a step
  lookahead    whether steps without drafts are launched ahead; those with drafts never are
  break_even   right drafts a step and stream at which both are as fast (step_ms over that of 0, -1)
  share        how often a draft has to be right for that, if each is as likely: None = always
               is too little

`ROWS` and `WORTH` there are meant to be chosen by these lines.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import numpy as np
from random_model import ensure_model
from rig import Rig, random_prompt

from engine import speculation
from engine.config import MOST_DRAFT_TOKENS, EngineConfig
from engine.sequence import Sequence as Stream


class Guesser:
    """Drafts of `length` ids that nothing is known of."""

    def __init__(self, vocab: int) -> None:
        self.length = 0
        self._random, self._vocab = np.random.default_rng(5), vocab

    def __call__(self, seq: Stream, most: int) -> tuple[int, ...]:
        count = min(most, self.length)
        return tuple(int(i) for i in self._random.integers(0, self._vocab, count))


def play(rig: Rig, prompts: list[list[int]], adapters: int, tokens: int) -> list[tuple[int, int]]:
    """Of each step in which every stream makes a token: when, and its rows."""
    core = rig.core
    for n, prompt in enumerate(prompts):
        core.take(rig.submit(prompt, tokens, n % adapters if adapters else None, f"r{n}"))
    left, steps = len(prompts), []
    rows = core.stats.base_steps.batch_tokens, core.stats.lora_steps.batch_tokens
    while left:
        before = sum(each.total for each in rows)
        frame = core.step()
        for delta in frame.deltas:
            left -= delta.finish_reason is not None
            if delta.finish_reason == "error":
                raise RuntimeError(delta.message or delta.code)
        made = {delta.request_id for delta in frame.deltas if delta.tokens}
        if len(made) == len(prompts):
            steps.append((time.perf_counter_ns(), int(sum(e.total for e in rows) - before)))
        elif not frame.deltas and core.idle:
            core.wait()
    while not core.idle:
        core.step()
    return steps


def measure(rig: Rig, case: tuple[int, int], prompt: int, tokens: int) -> dict[str, Any]:
    batch, adapters = case
    random, vocab = np.random.default_rng(batch), rig.core.machine.vocab_size
    prompts = [random_prompt(random, prompt + 1, vocab) for _ in range(batch)]
    play(rig, prompts, adapters, min(16, tokens))  # prompts are cached, and graphs captured
    steps = play(rig, prompts, adapters, tokens)
    gaps = sorted(b[0] - a[0] for a, b in pairwise(steps))
    return {
        "step_ms": round(statistics.median(gaps) / 1e6, 3),
        "step_p99_ms": round(gaps[int(0.99 * (len(gaps) - 1))] / 1e6, 3),
        "steps": len(gaps),
        "rows": int(statistics.median(rows for _, rows in steps)),
    }


def share_of(accepted: float, drafts: int) -> float | None:
    """The chance of each draft at which `accepted` of so many are right on average."""
    if accepted >= drafts:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**place for place in range(1, drafts + 1)) < accepted:
            low = middle
        else:
            high = middle
    return round(high, 3) if accepted > 0 else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", default="1:0,8:0,8:8,64:0,64:8")
    parser.add_argument("--drafts", default="0,1,2,4,8")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--lookahead", choices=("auto", "on", "off"), default="auto")
    options = parser.parse_args(argv)
    ensure_model(options.model)
    cases = [(int(a), int(b)) for a, _, b in (c.partition(":") for c in options.cases.split(","))]
    lengths = [int(length) for length in options.drafts.split(",")]
    if lengths[0] or max(lengths) > MOST_DRAFT_TOKENS:
        parser.error(f"--drafts: 0, which others are held against, then 1 to {MOST_DRAFT_TOKENS}")
    most = max(batch for batch, _ in cases)
    rows = max(most * (1 + max(lengths)), 64)
    speculation.ROWS, speculation.WORTH = rows, 0.0
    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        max_num_seqs=most,
        max_batch_tokens=max(2048, rows),
        mixed_tokens=rows,
        graph_tokens=min(max(512, rows), 1024),
        max_model_len=2 + options.prompt + options.tokens,
        speculation="ngram",
        speculation_tokens=max(*lengths, 1),
    )
    ahead = {"auto": None, "on": True, "off": False}[options.lookahead]
    with tempfile.TemporaryDirectory() as scratch:
        rig = Rig(config, Path(scratch), lookahead=ahead)
        guess = Guesser(rig.core.machine.vocab_size)
        rig.core.scheduler.speculation._guess = guess  # type: ignore[method-assign]
        facts = {"device": rig.core.info.device_name, "lookahead": rig.core.lookahead}
        rig.load(range(max(adapters for _, adapters in cases)))
        for batch, adapters in cases:
            plain = 0.0
            for guess.length in lengths:
                line = facts | {"batch": batch, "adapters": adapters, "drafts": guess.length}
                line |= measure(rig, (batch, adapters), options.prompt, options.tokens)
                plain = plain or line["step_ms"]
                if guess.length:
                    more = line["step_ms"] / plain - 1
                    line["break_even"] = round(more, 3)
                    line["share"] = share_of(more, guess.length)
                print(json.dumps(line), flush=True)
        rig.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
