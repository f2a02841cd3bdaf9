"""Random PEFT adapters on a two-layer model: ranks, patterns, rsLoRA, some layers, some modules."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ALL,
        "rank_pattern": {"down_proj": 7, r"layers\.0\.self_attn\.q_proj": 2},
        "alpha_pattern": {"down_proj": 12},
    },
    "rslora": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "one-layer": {
        "r": 5,
        "lora_alpha": 10,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "layers_to_transform": [1],
    },
    "rank-1": {"r": 1, "lora_alpha": 1, "target_modules": ["o_proj", "k_proj"]},
}
SLOT = {name: 3 + 2 * i for i, name in enumerate(ADAPTERS)}


@dataclass
class Zoo:
    """A model folder, its adapters, and what transformers and PEFT say to every prompt."""

    base: Path
    adapters: dict[str, Path]
    prompts: list[list[int]]
    expected: dict[str, list[Tensor]]  # by adapter, "" = base


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    import peft
    from transformers import Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("zoo")
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=131,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(root / "base")
    prompts = [torch.randint(0, 131, (n,)).tolist() for n in (31, 1, 18, 12, 23)]
    expected = {"": answers(model, prompts)}
    adapters = {}
    for name, options in ADAPTERS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT on configs without a Hub name
            tuned = peft.get_peft_model(
                copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **options)
            ).eval()
            for key, parameter in tuned.named_parameters():
                if "lora_" in key:
                    torch.nn.init.normal_(parameter, 0, 0.2)
            adapters[name] = root / name
            tuned.save_pretrained(adapters[name])
        expected[name] = answers(tuned, prompts)
    return Zoo(root / "base", adapters, prompts, expected)


def answers(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([p])).logits[0] for p in prompts]


@pytest.fixture(scope="module", params=[0, 2], ids=["whole", "pieces"])
def ours(
    request: pytest.FixtureRequest,
    zoo: Zoo,
    rig: Callable[..., Any],
    peft_reader: Callable[..., Any],
) -> Any:
    slots = {SLOT[n]: peft_reader(f, cut=request.param) for n, f in zoo.adapters.items()}
    return rig(zoo.base, slots=slots)


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_alone_equals_peft(zoo: Zoo, ours: Any, name: str) -> None:
    for prompt, expected, base in zip(
        zoo.prompts, zoo.expected[name], zoo.expected[""], strict=True
    ):
        close(ours.logits(prompt, SLOT[name]), expected)
        assert (expected - base).abs().max() > 0.1  # the adapter says something else than the base


def test_a_mixed_batch_equals_peft_row_by_row(zoo: Zoo, ours: Any) -> None:
    names = ["", *ADAPTERS]
    results = ours.together(zoo.prompts, [SLOT.get(name, -1) for name in names])
    for i, (name, got) in enumerate(zip(names, results, strict=True)):
        close(got, zoo.expected[name][i])


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_equals_its_merged_weights(
    zoo: Zoo, ours: Any, with_merged: Callable[..., Any], name: str
) -> None:
    alone = ours.logits(zoo.prompts[0], SLOT[name])
    with with_merged(ours.decoder, ours.slots[SLOT[name]]):
        close(ours.logits(zoo.prompts[0]), alone)
    close(ours.logits(zoo.prompts[0]), zoo.expected[""][0])


def test_chunked_with_an_adapter_equals_whole(zoo: Zoo, ours: Any) -> None:
    for name in ADAPTERS:
        got = ours.in_chunks(zoo.prompts[0], [5, 16], SLOT[name])
        close(got, zoo.expected[name][0])


def test_base_rows_keep_their_bits_when_their_neighbours_take_adapters(zoo: Zoo, ours: Any) -> None:
    """The batch is the same, row for row; only the adapters come and go."""
    with_adapters = ours.together(zoo.prompts, [-1, SLOT["patterns"], SLOT["rslora"], -1, -1])
    all_base = ours.together(zoo.prompts, [-1] * 5)
    for i in (0, 3, 4):
        assert torch.equal(with_adapters[i], all_base[i])
    for i in (1, 2):
        assert not torch.equal(with_adapters[i], all_base[i])


def test_the_same_batch_twice_gives_the_same_bits(zoo: Zoo, ours: Any) -> None:
    slots = [-1, *SLOT.values()]
    first, second = (ours.together(zoo.prompts, slots) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
