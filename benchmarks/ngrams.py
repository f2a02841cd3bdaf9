"""How often guesses from a text's own words are right, by kind of request and by adapter.

    python benchmarks/ngrams.py --model DIR [--adapters DIR,DIR] [--tokens 96] [--each 4] [--check]

Greedy answers come first, from the engine on this machine's CPU.  What speculation makes of them is
then played through with the engine's own rules: answers are the same with drafts and without, so
that nothing is computed again, and none of it hangs on the machine.  Requests of three kinds: to
say a text again with one word changed, to repeat code with one name changed, and plain questions.
One JSON line for each adapter, kind and longest draft on stdout:
  tokens, draws      what was answered, and in how many draws of one sequence
  tokens_a_draw      their ratio: what a step is worth at best
  drafted, accepted  tokens of drafts, and those that were right
and with `always` for drafts of full length, whatever the share of right ones.  `words` lines say
the same for matches of 2, 3, 4 and 6 tokens at the least.  Then, of this machine, the least of many
turns: microseconds to begin a sequence, to learn 512 places, and to guess 8 tokens where nothing is
found, where a text repeats itself, and where every place has to be looked at.  --check answers
all again with drafts of 4, and ends with exit status 1 if an answer differs.
"""

import argparse
import inspect
import json
import random
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checkout

from engine import ngram, speculation
from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import SamplingParams
from engine.ngram import NgramIndex
from engine.sequence import Sequence
from engine.speculation import Speculation
from lorad.text.template import ChatTemplate
from lorad.text.tokenizer import Tokenizer, read_specials

CODE = (textwrap.dedent, textwrap.indent, textwrap.shorten, textwrap.fill, textwrap.wrap)
THINGS = ("a server", "patience", "the moon", "a compiler", "honesty", "a key", "bread", "winter")
DRAFTS = (1, 2, 4, 8)


class Answered(NamedTuple):
    adapter: str
    kind: str
    prompt: list[int]
    answer: list[int]


def requests(each: int) -> Iterator[tuple[str, str]]:
    """(kind, text)."""
    parts = (checkout.ROOT / "LICENSE").read_text().split("\n\n")
    passages = [" ".join(part.split()) for part in parts if 300 < len(part) < 900]
    for passage in passages[:each]:
        yield "copy", f'Repeat this text word by word, but write "Boss" for "License".\n\n{passage}'
    for function in CODE[:each]:
        source = inspect.getsource(function)[:900]
        yield "code", f"Repeat this code, with the argument `text` renamed to `words`:\n\n{source}"
    for thing in THINGS[:each]:
        yield "ask", f"What is {thing}?"


def answer(options: argparse.Namespace, drafts: int = 0) -> list[Answered]:
    """All requests on the base and on each adapter, all at once."""
    tokenizer, template = Tokenizer.load(options.model), ChatTemplate.load(options.model)
    assert template is not None, "a model with a chat template"
    specials = read_specials(options.model)
    asked = []
    for kind, text in requests(options.each):
        rendered = template.render([{"role": "user", "content": text}], **specials)
        asked.append((kind, tokenizer.encode(rendered, add_special=False)))
    more: dict[str, Any] = {"speculation": "ngram", "speculation_tokens": drafts} if drafts else {}
    config = EngineConfig(model=str(options.model), device="cpu", max_num_seqs=24, **more)
    with tempfile.TemporaryDirectory() as store, Engine(config) as engine:
        revs: dict[str, str | None] = {"base": None}
        for folder in options.adapters:
            revs[folder.name] = engine.add_folder(folder, store)
        everything = [(name, kind, prompt) for name in revs for kind, prompt in asked]
        told = engine.generate(
            [prompt for _, _, prompt in everything],
            SamplingParams(temperature=0.0, max_tokens=options.tokens),
            [revs[name] for name, _, _ in everything],
        )
    return [Answered(*one, out.tokens) for one, out in zip(everything, told, strict=True)]


def played(answers: list[Answered], most: int) -> dict[str, object]:
    """One answer after another, by the engine's rules, from what it thinks of a new revision on."""
    rules = Speculation(most, speculation.ROWS)
    draws = drafted = accepted = 0
    for one in answers:
        whole = [*one.prompt, *one.answer]
        seq = Sequence(
            request_id="r",
            tokens=list(one.prompt),
            num_prompt=len(one.prompt),
            sampling=SamplingParams(),
            rev=None,
            identity="base",
            salt="",
            priority=50,
            order=0,
            longest=len(whole),
        )
        while len(seq.tokens) < len(whole):
            begun = len(seq.tokens) == seq.num_prompt  # the prompt's step draws one, with no draft
            draft = () if begun else rules.drafts(seq, rules.open(1))
            right = 0
            while right < len(draft) and whole[len(seq.tokens) + right] == draft[right]:
                right += 1
            if draft:
                rules.note(seq, len(draft), right, right=right)
            seq.tokens += whole[len(seq.tokens) : len(seq.tokens) + right + 1]
            draws, drafted, accepted = draws + 1, drafted + len(draft), accepted + right
        rules.forget(seq)
    tokens = sum(len(one.answer) for one in answers)
    return {
        "tokens": tokens,
        "draws": draws,
        "tokens_a_draw": round(tokens / draws, 2),
        "drafted": drafted,
        "accepted": accepted,
    }


def by_words(answers: list[Answered], least: int) -> dict[str, object]:
    """How often the token behind the longest match of `least` tokens or more is the right one."""
    places = matches = right = 0
    for one in answers:
        whole = [*one.prompt, *one.answer]
        for end in range(len(one.prompt) + 1, len(whole)):
            places += 1
            guess = _behind_longest(whole[:end], least)
            matches += guess is not None
            right += guess == whole[end]
    return {"least": least, "places": places, "matches": matches, "right": right}


def _behind_longest(tokens: list[int], least: int) -> int | None:
    last, best, longest = len(tokens) - 1, -1, least - 1
    for place in range(last - 1, -1, -1):
        shared = 0
        while shared <= place and tokens[place - shared] == tokens[last - shared]:
            shared += 1
        if min(shared, ngram.LONGEST) > longest:
            best, longest = place, shared
    return tokens[best + 1] if best >= 0 else None


def report(answers: list[Answered]) -> None:
    groups: dict[tuple[str, str], list[Answered]] = {}
    for one in answers:
        groups.setdefault((one.adapter, one.kind), []).append(one)
    usual = speculation.WORTH
    for (adapter, kind), own in groups.items():
        for always in (False, True):
            speculation.WORTH = 0.0 if always else usual
            for most in DRAFTS:
                line = {"adapter": adapter, "kind": kind, "longest": most, "always": always}
                print(json.dumps(line | played(own, most)), flush=True)
        for least in (2, 3, 4, 6):
            line = {"adapter": adapter, "kind": kind} | by_words(own, least)
            print(json.dumps({"words": line}), flush=True)
    speculation.WORTH = usual


def microseconds() -> dict[str, float]:
    """The host's share of it."""
    plain = random.Random(0).choices(range(50_000), k=20_000)
    repeated = [1, 2, 3, 4, 5] * 2000
    shared = [*range(1, ngram.LONGEST)]  # one less than ends the search at once
    similar = [t for n in range(500) for t in (1000 + n, *shared)] + [7000, *shared]
    known = {"nothing": plain, "repeated": repeated, "similar": similar}
    told = {
        "begin": _least(NgramIndex),
        "learn_512": _least(lambda: NgramIndex().learn(plain, 512)),
    }
    for name, tokens in known.items():
        index = NgramIndex()
        index.learn(tokens, len(tokens))
        told[f"guess_{name}"] = _least(lambda i=index, t=tokens: i.guess(t, 8))  # type: ignore[misc]
    return told


def _least(act: Callable[[], object], turns: int = 300) -> float:
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return round(min(times) * 1e6, 1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=lambda s: [Path(p) for p in s.split(",")], default=[])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--each", type=int, default=4, help="requests of a kind")
    parser.add_argument("--check", action="store_true", help="answer all again, with drafts")
    options = parser.parse_args(arguments)
    answers = answer(options)
    report(answers)
    print(json.dumps({"microseconds": microseconds()}), flush=True)
    if not options.check:
        return 0
    again = answer(options, drafts=4)
    different = sum(a != b for a, b in zip(answers, again, strict=True))
    print(json.dumps({"answers": len(answers), "different": different}))
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
