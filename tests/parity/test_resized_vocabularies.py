"""Every way in which PEFT saves an adapter of a resized vocabulary, from its folder to what it
says: alone, in one batch with all the others, and again after it was evicted."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine, Generation
from engine.messages import SamplingParams
from tests.fakes.resized_peft import EITHER, EXTRA, ONE, SIZES, is_lost, make_base, tune

pytestmark = pytest.mark.late


@dataclass
class Known:
    """A revision, a prompt that holds ids of its own, and log-probabilities by PEFT."""

    rev: str | None
    prompt: list[int]
    expected: Tensor  # (positions, tokens)


def check(generation: Generation, known: Known) -> None:
    """Whether it says what PEFT does of the prompt, the drawn token and the best five."""
    expected, ids = known.expected, known.prompt
    at = [token.logprob for token in generation.prompt_logprobs or () if token is not None]
    assert at == pytest.approx([expected[i, t].item() for i, t in enumerate(ids[1:])], abs=1e-5)
    best = expected[-1].topk(5)
    top = generation.logprobs[0].top
    assert [token for token, _ in top] == best.indices.tolist()
    assert [logprob for _, logprob in top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert generation.tokens == best.indices[:1].tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_they_say_what_peft_says_of_a_base_that_was_resized(tied: bool, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tied)
    config = EngineConfig(
        model=str(base),
        device="cpu",
        dtype="float32",
        num_blocks=256,
        max_num_seqs=48,
        max_batch_tokens=384,
        max_rank=16,
        slots=48,
        ram_cache=4 << 20,
        extra_vocab=EXTRA,
    )
    wish = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, prompt_logprobs=0)
    with Engine(config) as engine:

        def ask_and_check(*known: Known) -> None:
            prompts, revs = [k.prompt for k in known], [k.rev for k in known]
            for generation, k in zip(engine.generate(prompts, wish, revs), known, strict=True):
                check(generation, k)

        every = []
        for size in SIZES:
            for name in EITHER | ONE:
                if is_lost(tied, size, name):
                    continue
                tuned = tune(base, size, name, tmp_path / f"{size} {name}")
                words = {f"own{i}": i for i in range(size)}
                text = json.dumps({"model": {"vocab": words}})
                (tuned.folder / "tokenizer.json").write_text(text)
                rev = engine.add_folder(tuned.folder, tmp_path / "store")
                prompt = [1, 5, 80, 3, min(102, size - 1), 7, size - 1]
                every.append(Known(rev, prompt, tuned.logprobs(prompt)))
        for known in every:
            ask_and_check(known)
        ask_and_check(*every)
        for known in every:
            engine.evict(known.rev or "")
        ask_and_check(*every)
