"""What guesses are worth from end to end: the same answers with and without, on a real model.

    python benchmarks/speculation.py --model DIR [--draft DIR] [--batches 1,8,64] [--device auto]
                                     [--tokens 128] [--rounds 3] [--longest 4,8]

DIR is SmolLM2-135M-Instruct (`python -m lorad.demo_model`), --draft a smaller model of the same
vocabulary (`acceptance.py --keep DIR` makes one).  Requests are those of `ngrams.py`: to say a text
again with one word changed ("copy"), to repeat code with one name changed ("code"), and plain
questions ("ask"); each batch is filled with them in turn, on the base alone and on the demo's
adapters, one a row in turn.  Each way of drafting has an engine of its own, and is left to its own
rules, which stop drafting where it does not pay.  Best of --rounds, greedily.

One JSON line for each way, longest draft, batch, kind and `on` (base, adapters) on stdout:
  tokens, seconds      of all answers of a round, prompts included (they are cached after the first)
  tokens_per_s         and over_off, its ratio to the same without drafts
  drafted, accepted    in that round; tokens_a_draw: what a draw of one sequence told on the average
  same                 of answers: those whose tokens are the same as without drafts.  In bf16 a row
                       beside others may round otherwise, and a near tie falls the other way
  shared               tokens up to the first that differs, over all tokens
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checkout
from ngrams import requests

from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import SamplingParams
from lorad.text.template import ChatTemplate
from lorad.text.tokenizer import Tokenizer, read_specials

ADAPTERS = ("bible", "bofh", "devil", "jargon")
#: Requests of each kind, all different.
EACH = 4


class Case(NamedTuple):
    batch: int
    kind: str
    on: str


class Told(NamedTuple):
    answers: list[list[int]]
    seconds: float


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--draft", type=Path, metavar="DIR")
    parser.add_argument("--batches", type=whole, default=[1, 8, 64])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at the most [128]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=whole, default=[4, 8], help="drafts' tokens [4,8]")
    options = parser.parse_args(arguments)
    prompts = read_prompts(options.model)
    without: dict[Case, Told] = {}
    whole_run = True
    for way, longest in ways(options):
        try:
            for case, told, facts in run(options, way, longest, prompts):
                line = {"way": way, "longest": longest, **case._asdict(), **figures(told), **facts}
                if way == "off":
                    without[case] = told
                elif case in without:
                    line |= beside(told, without[case])
                print(json.dumps(line), flush=True)
        except Exception as error:  # a benchmark's border: the other ways go on
            print(json.dumps({"way": way, "longest": longest, "error": repr(error)}), flush=True)
            whole_run = False
    return 0 if whole_run else 1


def ways(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    yield "off", 0
    for longest in options.longest:
        yield "ngram", longest
        if options.draft is not None:
            yield "draft", longest


def read_prompts(model: Path) -> dict[str, list[list[int]]]:
    """Of each kind, as chats."""
    tokenizer, template = Tokenizer.load(model), ChatTemplate.load(model)
    assert template is not None, "a model with a chat template"
    specials, found = read_specials(model), dict[str, list[list[int]]]()
    for kind, text in requests(EACH):
        chat = template.render([{"role": "user", "content": text}], **specials)
        found.setdefault(kind, []).append(tokenizer.encode(chat, add_special=False))
    return found


def run(
    options: argparse.Namespace, way: str, longest: int, prompts: dict[str, list[list[int]]]
) -> Iterator[tuple[Case, Told, dict[str, Any]]]:
    """All cases on one engine."""
    drafts: dict[str, Any] = {} if way == "off" else {"speculation": way}
    if longest:
        drafts["speculation_tokens"] = longest
    if way == "draft":
        drafts["draft_model"] = str(options.draft)
    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        max_num_seqs=max(options.batches),
        max_model_len=1024,
        gpu_memory_utilization=0.3,
        **drafts,
    )
    with tempfile.TemporaryDirectory() as store, Engine(config) as engine:
        revs = [engine.add_folder(checkout.ROOT / "demo/adapters" / a, store) for a in ADAPTERS]
        for batch in options.batches:
            for kind, own in prompts.items():
                asked = [own[n % len(own)] for n in range(batch)]
                for on in ("base", "adapters"):
                    worn = [revs[n % len(revs)] if on == "adapters" else None for n in range(batch)]
                    yield Case(batch, kind, on), *best(engine, options, asked, worn)


def best(
    engine: Engine, options: argparse.Namespace, asked: list[list[int]], worn: list[str | None]
) -> tuple[Told, dict[str, Any]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    stats = engine.core.stats
    rounds = []
    for _ in range(options.rounds + 1):  # the first fills the prefix cache
        drafted, accepted = stats.drafted_by_rev.total(), stats.accepted_by_rev.total()
        began = time.perf_counter()
        told = engine.generate(asked, sampling, worn)
        seconds = time.perf_counter() - began
        facts = {
            "drafted": stats.drafted_by_rev.total() - drafted,
            "accepted": stats.accepted_by_rev.total() - accepted,
        }
        rounds.append((seconds, [one.tokens for one in told], facts))
    seconds, answers, facts = min(rounds[1:], key=lambda one: one[0])
    tokens = sum(map(len, answers))
    facts["tokens_a_draw"] = round(tokens / max(tokens - facts["accepted"], 1), 2)
    return Told(answers, seconds), facts


def figures(told: Told) -> dict[str, Any]:
    tokens = sum(map(len, told.answers))
    return {
        "tokens": tokens,
        "seconds": round(told.seconds, 4),
        "tokens_per_s": round(tokens / told.seconds, 1),
    }


def beside(told: Told, off: Told) -> dict[str, Any]:
    pairs = list(zip(told.answers, off.answers, strict=True))
    per_s, per_s_off = (sum(map(len, one.answers)) / one.seconds for one in (told, off))
    shared = sum(_shared(ours, theirs) for ours, theirs in pairs)
    return {
        "over_off": round(per_s / per_s_off, 3),
        "same": sum(ours == theirs for ours, theirs in pairs),
        "of": len(pairs),
        "shared": round(shared / max(sum(len(theirs) for _, theirs in pairs), 1), 4),
    }


def _shared(one: list[int], other: list[int]) -> int:
    for place, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return place
    return min(len(one), len(other))


def whole(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
