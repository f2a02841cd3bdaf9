"""Tokens of adapters' own on a card: from graphs, in mixed batches, after a reload, in each dtype.

PEFT in fp32 on the resized base says what is right, of the engine's own greedy tokens.  They may be
off by the stated share of how far apart log-probabilities lie, and that share is what
`test_varieties.py` grants every adapter in that dtype.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for tests of other files: read when kernels are imported

from engine.messages import SamplingParams
from tests.fakes.own_vocabulary import BASES, Zoo, zoo_of

pytestmark = pytest.mark.gpu

#: Of how far apart log-probabilities lie.
NEAR = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
CASES = [("Llama", "bfloat16"), ("Llama", "float32"), ("Qwen2", "float16"), ("Gemma2", "bfloat16")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(case))
def zoo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Zoo, float]]:
    kind, dtype = request.param
    with zoo_of(kind, tmp_path_factory.mktemp(kind), device="cuda", dtype=dtype) as made:
        yield made, NEAR[dtype]


def check(zoo: Zoo, near: float, work: list[tuple[str, list[int]]], **more: Any) -> None:
    said = zoo.ask(work, **more)
    apart = [zoo.apart(name, prompt, got) for (name, prompt), got in zip(work, said, strict=True)]
    print({name: round(far, 4) for (name, _), far in zip(work, apart, strict=True)})
    assert max(apart) <= near
    assert all(
        max(got.tokens) < zoo.limits[name] for (name, _), got in zip(work, said, strict=True)
    )


def test_a_mixed_batch_from_graphs_says_what_peft_says_and_again_after_a_reload(
    zoo: tuple[Zoo, float],
) -> None:
    made, near = zoo
    graphs = made.engine.core.runner.graphs
    assert graphs is not None
    work = [(name, made.prompt(name, 40 - n, n)) for n, name in enumerate([*made.revs] * 2)]
    check(made, near, work, tokens=24, prompt_logprobs=0)
    for rev in made.revs.values():
        if rev is not None:
            made.engine.evict(rev)
    before = graphs.num_replays
    check(made, near, work[::-1], tokens=40)
    assert graphs.num_replays - before > 10


def test_the_bases_rows_keep_their_bits_beside_them(zoo: tuple[Zoo, float]) -> None:
    """In steps of the same sizes, their prompts in the cache, as those of the others are."""
    made, _ = zoo
    mine = [("", made.prompt("", 20, n)) for n in range(4)]
    hot = {"temperature": 0.8, "seed": 5, "top_p": 0.9, "logprobs": 3, "prompt_logprobs": None}
    told = []
    for name in ("plain", "factors", "plain", "factors"):
        rev = made.revs[name]
        assert rev is not None
        made.engine.load(rev)
        others = [(name, made.prompt("plain", 20, n)) for n in range(3)]
        got = made.ask([*mine, *others], tokens=16, **hot)[: len(mine)]
        told.append([(one.tokens, one.logprobs) for one in got])
    assert told[2] == told[3]


def test_ids_of_its_own_are_drawn_in_steps_that_look_ahead(zoo: tuple[Zoo, float]) -> None:
    """Hot ones, of which each is fed back before the host knows it."""
    made, near = zoo
    name = "all there is room for"
    assert made.engine.core.lookahead
    work = [(name, made.prompt(name, 8, n)) for n in range(6)]
    drawn = made.ask(work, tokens=48, temperature=2.0, seed=3)
    assert max(max(one.tokens) for one in drawn) >= made.limits[""]
    for (_, prompt), got in zip(work, drawn, strict=True):
        assert made.apart(name, prompt, got) <= near


@pytest.mark.parametrize("size", [144, 131])
def test_an_engine_with_more_ids_draws_the_same(size: int, tmp_path: Path) -> None:
    """extra_vocab changes where rows of logits begin, and nothing else.  Where the base's own begin
    on borders of 64 bytes, its vocabulary being a multiple of 16, all bits are the same; else, as
    of 32,002 ids, they are read in other pieces: what is told is summed up in another order."""
    told, base = [], {"device": "cuda", "dtype": "bfloat16", "names": ["plain"]}
    wishes = [
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=4, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.9, seed=1, top_k=40, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=1, top_p=0.9, max_tokens=20, ignore_eos=True),
    ]
    for extra in (0, 64, 256, 1024):
        more = {"extra_vocab": extra, "vocab_size": size, **base}
        with zoo_of("Llama", tmp_path / str(extra), **more) as made:
            prompts = [made.prompt("", 30 + n, n) for n in range(8)]
            got = [made.engine.generate(prompts, wish, [None] * 8) for wish in wishes]
            told.append([one for each in got for one in each])
    for extra, others in enumerate(told[1:], start=1):
        for n, (one, other) in enumerate(zip(told[0], others, strict=True)):
            where = f"case {extra}, {wishes[n // 8]}, prompt {n % 8}"
            assert one.tokens == other.tokens, where
            if size % 16 == 0:
                assert one.logprobs == other.logprobs, where
            near = [each.logprob for each in other.logprobs]
            assert [each.logprob for each in one.logprobs] == pytest.approx(near, abs=1e-5), where


@pytest.mark.parametrize("kind", [*BASES])
def test_in_deterministic_mode_company_changes_no_bit(kind: str, tmp_path: Path) -> None:
    more = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    with zoo_of(kind, tmp_path, **more) as made:
        work = [(name, made.prompt(name, 20 + n, n)) for n, name in enumerate(made.revs)]
        together = made.ask(work, tokens=10, logprobs=3)
        for one, got in zip(work, together, strict=True):
            [alone] = made.ask([one], tokens=10, logprobs=3)
            assert (alone.tokens, alone.logprobs) == (got.tokens, got.logprobs), one[0]
            assert alone.prompt_logprobs == got.prompt_logprobs, one[0]
