"""The whole engine over each family: scheduler, prefix cache; on a card graphs and lookahead."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import SamplingParams

TOKENS = 12  # past the window of 9 from any prompt


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_answers_equal_transformers_cached_or_not(case: Any, device: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    prompts = [prompt[:20] for prompt in case.prompts]  # a cached block, and the original length
    config = EngineConfig(
        model=str(case.folder),
        device=device,
        dtype="float32",
        max_model_len=case.max_len,
        max_num_seqs=4,
        max_batch_tokens=64,  # as few kernels as there are, since each family compiles its own
        graph_tokens=64,
        num_blocks=40,
        slots=1,
        max_rank=8,
        ram_cache=1 << 20,
    )
    with Engine(config) as engine:
        first = engine.generate(prompts, sampling)
        again = engine.generate(prompts, sampling)
    assert [one.cached_tokens for one in again] == [16, 0, 0, 16]
    for prompt, *runs in zip(prompts, first, again, strict=True):
        for run in runs:
            table = case.theirs(prompt + run.tokens).log_softmax(-1)[len(prompt) - 1 : -1]
            for token, told, row in zip(run.tokens, run.logprobs, table, strict=True):
                assert row[token] > row.max() - 1e-4  # where two tie, either is right
                assert told.logprob == pytest.approx(float(row[token]), abs=2e-4)
