"""Requests that wish for anything at all, on revisions of every vocabulary: each ends with an
answer or in a line, no token is none of its vocabulary, and the engine goes on.

Of such mixes one ended the engine: a prompt that is told of, and nothing left to draw.
"""

import dataclasses
import random
from typing import Any

import pytest
from msgspec import structs

from engine import grammar
from engine.messages import Abort, Evict, SamplingParams, Submit

EXTRA, V, DRAWN = 40, 256, 253
#: Around the ends of all the vocabularies, and beyond what words hold.
IDS = (-1, 0, 1, 2, 3, 199, 200, 252, 255, 256, 258, 259, 295, 296, 10**6, 2**31, 2**40)


@pytest.fixture(scope="module")
def fleet(make_adapter) -> list[Any]:
    """The last is the base."""
    few = (*range(5, 99, 7), 256, 257, 258)
    rows = {"embed_tokens": few, "lm_head": few}
    own = make_adapter("few", rows=rows, num_tokens=259, extra_vocab=EXTRA, seed=1)
    invoked = make_adapter("alora", num_tokens=255, extra_vocab=EXTRA, seed=2)
    manifest = structs.replace(invoked.manifest, alora_tokens=(1, 2))
    others = [
        make_adapter("shrunk", num_tokens=200, extra_vocab=EXTRA, seed=3),
        make_adapter("tiny", num_tokens=3, extra_vocab=EXTRA, seed=4),
        make_adapter("plain", extra_vocab=EXTRA, seed=5),
    ]
    return [own, dataclasses.replace(invoked, manifest=manifest), *others, None]


def wish(draw: random.Random, grammars: list[str]) -> SamplingParams:
    choices: dict[str, list[Any]] = {
        "logprobs": [0, 1, 20, 300],
        "prompt_logprobs": [0, 1, 20, 300],
        "top_k": [1, 3, 199, 256, 300, 10**9],
        "top_p": [0.0, 0.1, 1.0],
        "min_p": [0.5, 1.0],
        "repetition_penalty": [0.5, 1.5],
        "presence_penalty": [-2.0, 2.0],
        "logit_bias": [{token: 3.0 for token in draw.sample(IDS, 5)}, {draw.choice(IDS): 1e9}],
        "allowed_token_ids": [tuple(draw.sample(IDS, 2)), (draw.choice(IDS),), (0, 1), (2,)],
        "stop_token_ids": [tuple(draw.sample(IDS, 3))],
        "min_tokens": [1, 5],
        "ignore_eos": [True],
        "seed": [0, -5, 2**63 - 1],
        "grammar": grammars,
    }
    picked = {name: draw.choice(these) for name, these in choices.items() if draw.random() < 0.3}
    heat = draw.choice([0.0, 1.0, 1e-9, 50.0])
    return SamplingParams(temperature=heat, max_tokens=draw.randint(1, 8), **picked)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_one_is_answered_and_the_engine_goes_on(
    start_core, fleet, worded_dir, seed: int
) -> None:
    pytest.importorskip("llguidance")
    grammars = [grammar.regex("[a-d]{4}"), grammar.regex("(<s>)?a*"), grammar.json_object()]
    draw = random.Random(seed)
    drafts = "ngram" if seed % 3 == 2 else "off"
    sizes = {"slots": 3, "num_blocks": 60, "max_batch_tokens": 48}
    driver = start_core(
        worded_dir, lookahead=bool(seed % 2), extra_vocab=EXTRA, speculation=drafts, **sizes
    )
    driver.add(*fleet[:-1])
    limits = []
    for n in range(80):
        adapter = draw.choice(fleet)
        held = (adapter.manifest.num_tokens if adapter else 0) or V
        prompt = [draw.randrange(held) for _ in range(draw.randint(1, 30))]
        prompt += draw.choice([[], [], [1, 2], [draw.choice(IDS)]])
        driver.follow(
            Submit(
                request_id=f"r{n}",
                prompt=prompt,
                sampling=wish(draw, grammars),
                rev=adapter and adapter.rev,
                alora_fallback=draw.choice(["", "base"]),
            )
        )
        limits.append((adapter.manifest.num_tokens if adapter else 0) or DRAWN)
        for _ in range(draw.randrange(4)):
            driver.step()
        if draw.random() < 0.1:
            driver.core.take(Abort(request_id=f"r{draw.randint(0, n)}"))
        if draw.random() < 0.1:
            driver.core.take(Evict(command_id=10_000 + n, rev=draw.choice(fleet[:-1]).rev))
    driver.finish()
    stories = [driver.stories[f"r{n}"] for n in range(80)]
    for story, limit in zip(stories, limits, strict=True):
        assert all(0 <= token < limit for token in story.tokens)
        assert story.code != "internal_error", story.message
        assert (story.finish == "error") == bool(story.code) == bool(story.message), story
    assert sum(story.finish == "length" for story in stories) > 20
