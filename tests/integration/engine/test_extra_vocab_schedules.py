"""Random schedules of adapters with and without tokens of their own, through too few slots and
blocks, with drafts, evictions and aborts: each answer is what it is alone, to the bit."""

import random

import pytest

from engine.messages import Abort, Evict
from tests.fakes.resized_llama import own_prompt

EXTRA = 40


@pytest.fixture(scope="module")
def fleet(make_adapter):
    def make(name, **more):
        return make_adapter(name, extra_vocab=EXTRA, **more)

    few, many = (5, 12, 99, 256, 257, 258), (0, *range(240, 290))
    return [
        make("few", rows={"embed_tokens": few, "lm_head": few}, num_tokens=259, seed=1),
        make("many", rows={"embed_tokens": many, "lm_head": many}, num_tokens=290, seed=2, rank=2),
        make(
            "whole",
            modules=("o_proj",),
            rows={"embed_tokens": (), "lm_head": ()},
            num_tokens=270,
            seed=3,
            strength=0.3,
        ),
        make("shrunk", num_tokens=200, seed=4, rank=3),
        make("plain", seed=5, rank=3),
        None,
    ]


def wish(draw: random.Random, limit: int) -> dict:
    return {
        "max_tokens": draw.choice([3, 30, 60]),
        "ignore_eos": draw.random() < 0.7,
        **draw.choice(
            [
                {},
                {"logprobs": 2},
                {"prompt_logprobs": 1, "logprobs": 0},
                {"temperature": 1.5, "seed": draw.randrange(99)},
                {"temperature": 0.8, "seed": 4, "top_p": 0.9, "logprobs": 1},
                {"temperature": 1.0, "seed": 5, "top_k": 30, "repetition_penalty": 1.2},
                {"logit_bias": {limit - 1: 4.0, 7: 2.0}, "min_tokens": 3},
                {"allowed_token_ids": (limit - 1, limit - 2, 9), "temperature": 1.0, "seed": 6},
            ]
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("seed", range(4))
def test_company_changes_nothing(start_core, fleet, seed, speculation) -> None:
    draw = random.Random(seed)
    usual = {"extra_vocab": EXTRA, "speculation": speculation, "max_batch_tokens": 40}
    crowd = start_core(slots=2, num_blocks=27, lookahead=bool(seed % 2), **usual)
    quiet = start_core(**usual)
    crowd.add(*fleet[:-1])
    quiet.add(*fleet[:-1])
    asked = []
    for n in range(24):
        adapter = draw.choice(fleet)
        limit = (adapter.manifest.num_tokens if adapter else 0) or 256
        prompt = own_prompt(adapter, draw.choice([4, 17, 33]), n)
        if draw.random() < 0.4:
            prompt = (prompt * 3)[:60]
        params = wish(draw, limit)
        story = crowd.submit(f"c{n}", prompt, adapter and adapter.rev, **params)
        asked.append((n, adapter, prompt, params, story))
        for _ in range(draw.randrange(3)):
            crowd.step()
        if draw.random() < 0.1:
            crowd.core.take(Abort(f"c{draw.randrange(n + 1)}"))
        if draw.random() < 0.1:
            rev = draw.choice(fleet[:-1]).rev
            crowd.core.take(Evict(command_id=10_000 + n, rev=rev, to="disk"))
    crowd.finish()
    for n, adapter, prompt, params, story in asked:
        alone = quiet.submit(f"q{n}", prompt, adapter and adapter.rev, **params)
        quiet.finish()
        if story.finish == "abort":
            assert story.tokens == alone.tokens[: len(story.tokens)]
            continue
        assert (story.finish, story.tokens) == (alone.finish, alone.tokens), (
            n,
            params,
            story.code,
            story.message,
        )
        assert story.logprobs == alone.logprobs and story.prompt_logprobs == alone.prompt_logprobs
    assert crowd.core.scheduler.num_preemptions > 0, "there was room for all"
