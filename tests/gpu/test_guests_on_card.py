"""Adapters of long prompts as guests of the base's products, through the whole engine in bf16.

What is compared are the log probabilities of a prompt's tokens: with guests, and without, where the
correction follows the product.  Both round; the stated tolerance is a fifth more than what bf16
costs an engine without guests against fp32.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for tests of other files: read when kernels are imported

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels import lora_augment, tiles
from engine.messages import SamplingParams
from tests.fakes.random_lora import write_lora

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},  # whose qkv has a bias
    "Gemma2": {"sliding_window": 700, "query_pre_attn_scalar": 64},
}
RANKS = (16, 5, 40, 33)
#: What all of them lack.
WITHOUT = ((1, "k_proj"), (2, "up_proj"), (0, "down_proj"))
SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
#: (adapter or None, prompt tokens) of requests that are together in one step.
STEPS = {
    "one": [(0, 1300)],
    "some": [(0, 500), (1, 700), (0, 77)],
    "a wide one": [(2, 1100), (1, 40)],
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{request.param}Config")(**SIZES | FAMILIES[request.param])
    built = getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16)
    built.save_pretrained(tmp_path / "model")
    for number, rank in enumerate(RANKS):
        write_lora(tmp_path / f"adapter-{number}", tmp_path / "model", rank, without=WITHOUT)
    return tmp_path / "model"


def answers(
    model: Path, steps: Sequence[Sequence[tuple[int | None, int]]], dtype: str = "bfloat16"
) -> list[list[list[float]]]:
    """For each step, for each request, the log probability of each token but the first."""
    store = model.parent / dtype
    store.mkdir(exist_ok=True)
    config = EngineConfig(
        model=str(model),
        device="cuda",
        dtype=dtype,  # type: ignore[arg-type]
        num_blocks=600,
        max_num_seqs=8,
        max_batch_tokens=2048,
        max_rank=64,
        slots=4,
    )
    found = []
    with Engine(config) as engine:
        folders = [model.parent / f"adapter-{number}" for number in range(len(RANKS))]
        revs = [engine.add_folder(folder, store) for folder in folders]
        for rev in revs:
            engine.load(rev)
        for step in steps:
            made = torch.Generator().manual_seed(len(found))
            prompts = [torch.randint(3, 331, (n,), generator=made).tolist() for _, n in step]
            owners = [None if who is None else revs[who] for who, _ in step]
            generated = engine.generate(prompts, SAMPLING, owners)
            found.append([[t.logprob for t in g.prompt_logprobs[1:] if t] for g in generated])
            assert [len(told) for told in found[-1]] == [n - 1 for _, n in step]
    return found


def apart(got: list[list[float]], want: list[list[float]]) -> float:
    """Root mean square of the differences."""
    mine, theirs = (torch.tensor([one for told in each for one in told]) for each in (got, want))
    return float((mine - theirs).pow(2).mean().sqrt())


def test_prompts_with_guests_are_as_near_to_fp32_as_without(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[int] = []
    augment = lora_augment.augment

    def counted(*args: Any) -> int:
        took.append(args[-1].kind.columns)
        return augment(*args)

    monkeypatch.setattr(lora_augment, "augment", counted)
    exact = answers(model, list(STEPS.values()), "float32")
    assert not took  # fp32 has none
    with_guests = answers(model, list(STEPS.values()))
    assert {16, 32, 64} <= set(took)
    took.clear()
    monkeypatch.setattr(tiles, "AUGMENTED", False)
    without = answers(model, list(STEPS.values()))
    assert not took
    for name, got, usual, want in zip(STEPS, with_guests, without, exact, strict=True):
        assert apart(usual, want) > 1e-4, f"{name}: nothing was rounded"
        assert apart(got, want) <= 1.2 * apart(usual, want), name


def test_rows_of_the_base_beside_prompts_keep_their_bits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No guests come where the base has rows: its own are those of a step without guests."""
    step: list[tuple[int | None, int]] = [(None, 600), (0, 700)]
    got = answers(model, [step])
    monkeypatch.setattr(tiles, "AUGMENTED", False)
    assert answers(model, [step])[0][0] == got[0][0]
