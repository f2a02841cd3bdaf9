"""SmolLM2-135M with the demo's four adapters against transformers and PEFT, in fp32."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.model

BASE = ""
NAMES = (BASE, "bible", "devil", "jargon", "bofh")
SLOT = {name: i - 1 for i, name in enumerate(NAMES)}
TOLERANCE = 1e-3
QUESTIONS = (
    "What is a computer?",
    "Tell me about love.",
    "Why is the sky blue? Explain it to a child in a few sentences.",
    "My printer does not work.",
    "Give me one good reason to get up in the morning, and one to stay in bed until noon.",
)


class Reference:
    """transformers' model with PEFT's adapters; asked one prompt at a time."""

    def __init__(self, folder: Path, adapters: dict[str, Path]) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        first, *others = adapters
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT asks transformers for deprecated attributes
            self.model = peft.PeftModel.from_pretrained(base, adapters[first], adapter_name=first)
            for name in others:
                self.model.load_adapter(adapters[name], adapter_name=name)
        self.model.eval()

    @torch.no_grad()
    def logits(self, name: str, tokens: list[int]) -> Tensor:
        """(n, vocab) in fp32."""
        ids = torch.tensor([tokens])
        if name == BASE:
            with self.model.disable_adapter():
                return self.model(input_ids=ids).logits[0]
        self.model.set_adapter(name)
        return self.model(input_ids=ids).logits[0]


@dataclass
class Real:
    reference: Reference
    ours: Any
    prompts: dict[str, list[int]]  # by adapter
    expected: dict[str, Tensor]


@pytest.fixture(scope="module")
def real(
    smollm2_folder: Path,
    demo_adapters: dict[str, Path],
    rig: Callable[..., Any],
    peft_reader: Callable[..., Any],
) -> Real:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    prompts = {
        name: tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for name, question in zip(NAMES, QUESTIONS, strict=True)
    }
    reference = Reference(smollm2_folder, demo_adapters)
    slots = {SLOT[name]: peft_reader(folder) for name, folder in demo_adapters.items()}
    expected = {name: reference.logits(name, prompts[name]) for name in NAMES}
    return Real(reference, rig(smollm2_folder, slots=slots), prompts, expected)


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name or "base")
def test_logits_alone_equal_transformers_and_peft(real: Real, name: str) -> None:
    close(real.ours.logits(real.prompts[name], SLOT[name]), real.expected[name])


def test_adapters_change_the_answer(real: Real) -> None:
    """Otherwise base weights would pass every other test here."""
    for name in NAMES[1:]:
        base = real.ours.logits(real.prompts[name])
        assert (base - real.expected[name]).abs().max() > 1.0


def test_base_and_four_adapters_in_one_batch_equal_peft(real: Real) -> None:
    results = real.ours.together(
        [real.prompts[name] for name in NAMES], [SLOT[name] for name in NAMES]
    )
    for name, got in zip(NAMES, results, strict=True):
        close(got, real.expected[name])


@pytest.mark.parametrize("name", NAMES[1:])
def test_an_adapter_equals_its_merged_weights(
    real: Real, with_merged: Callable[..., Any], name: str
) -> None:
    with with_merged(real.ours.decoder, real.ours.slots[SLOT[name]]):
        close(real.ours.logits(real.prompts[name]), real.expected[name])


def test_chunked_prefill_with_an_adapter_equals_whole(real: Real) -> None:
    prompt = real.prompts["bofh"]
    got = real.ours.in_chunks(prompt, [7, 16, len(prompt) - 25], SLOT["bofh"])
    close(got, real.expected["bofh"])


@pytest.mark.parametrize("count", [10, pytest.param(64, marks=pytest.mark.late)])
def test_greedy_tokens_alone_and_mixed_equal_the_references(real: Real, count: int) -> None:
    """Each token is the reference's best one, or within the tolerance of it."""
    mixed = real.ours.greedy(
        [real.prompts[name] for name in NAMES], [SLOT[name] for name in NAMES], count
    )
    for name, tokens in zip(NAMES, mixed, strict=True):
        check_greedy(real, name, tokens, count)
        (alone,) = real.ours.greedy([real.prompts[name]], [SLOT[name]], count)
        if alone != tokens:
            check_greedy(real, name, alone, count)


def check_greedy(real: Real, name: str, tokens: list[int], count: int) -> None:
    assert len(tokens) == count
    prompt = real.prompts[name]
    rows = real.reference.logits(name, prompt + tokens)[len(prompt) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    assert (rows.amax(1) - chosen).max() <= TOLERANCE
