"""One engine that generates and pools, against transformers, while both are asked for at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, PoolsToo
from engine.engine import Engine
from engine.messages import SamplingParams, Submit
from engine.pooling.requests import PoolRequest, PoolResult, unpacked

STEPS = 12
GREEDY = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
#: A prefix of three blocks that inputs share; whole steps hold far fewer rows than inputs have.
SHARED, SMALL = 24, {"block_size": 8, "max_batch_tokens": 40, "mixed_tokens": 24, "max_num_seqs": 8}
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("llama", "qwen2", "mistral", "gemma2", "phi3", "smollm3", "gemma3")
]


@torch.no_grad()
def continued(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(STEPS):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def run(engine: Engine, prompts: list[list[int]], asked: list[PoolRequest]) -> Any:
    """Everything at once: tokens of each prompt, and the result of each request."""
    core = engine.core
    for n, prompt in enumerate(prompts):
        core.take(Submit(request_id=f"g{n}", prompt=prompt, sampling=GREEDY))
    told: dict[str, list[int]] = {}
    results: dict[str, PoolResult] = {}
    beside = 0  # steps in which somebody got a token and an input went on
    for request in asked[: len(asked) // 2]:
        core.take(request)
    later = asked[len(asked) // 2 :]
    while core.scheduler.has_work or later or not core.idle:
        rows = core.stats.prompt_tokens
        frame = core.step()
        for delta in frame.deltas:
            told.setdefault(delta.request_id, []).extend(delta.tokens)
        results |= {one.request_id: unpacked(one) for one in frame.pooled}
        beside += bool(frame.deltas) and core.stats.prompt_tokens > rows
        if later and frame.deltas:
            core.take(later.pop(0))
    assert beside > len(asked) // 2, "they hardly met"
    return [told[f"g{n}"] for n in range(len(prompts))], [results[r.request_id] for r in asked]


@pytest.mark.parametrize("name", ["qwen3", *OTHERS])
def test_vectors_made_beside_answers_equal_transformers(
    make: Callable[..., Any], name: str
) -> None:
    case = make(name)
    prefix = (case.batch[2] * 2)[:SHARED]
    inputs = [*case.batch, *(prefix + tokens for tokens in case.batch if len(tokens) < 40)]
    prompts = [prefix + tokens[:3] for tokens in case.batch[1:4]]
    wanted = [continued(case.model, prompt) for prompt in prompts]
    for kind in ("last", "mean"):
        pools = PoolsToo(root=str(case.folder), pooling=kind)
        sizes: dict[str, Any] = {**SMALL, "cpu_pool": 4 << 20, "pooled_tokens": 8}
        config = EngineConfig(model=str(case.folder), device="cpu", pools=pools, **sizes)
        asked = [PoolRequest(request_id=f"p{n}", tokens=tokens) for n, tokens in enumerate(inputs)]
        with Engine(config) as engine:
            told, results = run(engine, prompts, asked)
        assert told == wanted
        for result, tokens in zip(results, inputs, strict=True):
            rows = case.hidden(tokens)
            expected = rows[-1] if kind == "last" else rows.mean(0)
            assert result.values is not None
            assert np.abs(result.values - expected).max() < 1e-5
        found = sum(result.num_cached for result in results)
        assert (found > 0) == (kind == "last")


def test_scores_by_words_whose_query_is_shared_equal_transformers(
    make: Callable[..., Any],
) -> None:
    case = make("qwen2")  # its output head is not its embedding
    query = (case.batch[2] * 2)[:SHARED]
    pairs = [query + tokens for tokens in case.batch if len(tokens) < 40]
    pools = PoolsToo(root=str(case.folder), score_tokens=(11, 12))
    config = EngineConfig(
        model=str(case.folder), device="cpu", block_size=8, cpu_pool=4 << 20, pools=pools
    )
    with Engine(config) as engine:
        results = engine.classify(pairs)
        prefix = engine.snapshot().prefix
    for result, tokens in zip(results, pairs, strict=True):
        last = case.logits(tokens)[-1]
        assert result.logits is not None
        assert abs(result.logits[0] - (last[11] - last[12])) < 1e-5
    assert prefix.hit_tokens == (len(pairs) - 1) * SHARED
