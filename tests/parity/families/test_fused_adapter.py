"""PEFT adapters on Phi's fused modules, which inspection cuts into their parts."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adapters.manifest import TensorRef
from engine.adapters.peft import inspect
from engine.kernels.lora_meta import LoraRows
from engine.models.spec import read_spec

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "rank_pattern": {"gate_up_proj": 7, r"layers\.0\.self_attn\.qkv_proj": 2},
        "alpha_pattern": {"qkv_proj": 12},
    },
    "rslora": {"r": 3, "lora_alpha": 5, "target_modules": ["qkv_proj"], "use_rslora": True},
}


@dataclass
class Tuned:
    base: Path
    slots: dict[int, dict[tuple[int, str], LoraRows]]
    prompts: list[list[int]]
    expected: list[list[Tensor]]  # by slot


def read(folder: Path) -> dict[tuple[int, str], LoraRows]:
    """The adapter as the packer would lay it: what the manifest points at."""
    manifest = inspect(folder, read_spec(folder.parent / "base"))
    data = (folder / "adapter_model.safetensors").read_bytes()

    def tensor(ref: TensorRef) -> Tensor:
        raw = bytearray(data[ref.begin : ref.end])
        return torch.frombuffer(raw, dtype=torch.float32).view(ref.shape)

    return {
        (m.layer, m.module): LoraRows(
            m.scaling, m.rank, (tensor(a),), (tensor(b).t().contiguous(),)
        )
        for m, held in zip(manifest.modules, manifest.tensors, strict=True)
        for a, b in (held.every,)
    }


@pytest.fixture(scope="module")
def tuned(longrope_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    import peft

    folder, model = longrope_model
    root = tmp_path_factory.mktemp("tuned")
    (root / "base").symlink_to(folder)
    torch.manual_seed(3)
    prompts = [torch.randint(0, 131, (n,)).tolist() for n in (31, 1, 18)]
    slots, expected = {}, []
    for slot, (name, options) in enumerate(ADAPTERS.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT on configs without a Hub name
            adapted = peft.get_peft_model(
                copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **options)
            ).eval()
            for key, parameter in adapted.named_parameters():
                if "lora_" in key:
                    torch.nn.init.normal_(parameter, 0, 0.2)
            adapted.save_pretrained(root / name)
            # PEFT sorts patterns as it saves them: what counts is the saved adapter.
            adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), root / name).eval()
        slots[slot] = read(root / name)
        with torch.no_grad():
            expected.append([adapted(input_ids=torch.tensor([p])).logits[0] for p in prompts])
    return Tuned(root / "base", slots, prompts, expected)


def test_an_adapter_on_fused_modules_equals_peft_in_a_mixed_batch(
    tuned: Tuned, rig: Callable[..., Any]
) -> None:
    ours = rig(tuned.base, slots=tuned.slots)
    base = [ours.logits(prompt) for prompt in tuned.prompts]
    for assigned in ([0, 1, -1], [1, 0, 0], [-1, -1, 1]):
        results = ours.together(tuned.prompts, assigned)
        for i, (slot, got) in enumerate(zip(assigned, results, strict=True)):
            want = base[i] if slot < 0 else tuned.expected[slot][i]
            assert (got - want).abs().max() < 1e-4
    for slot in tuned.slots:
        assert (tuned.expected[slot][0] - base[0]).abs().max() > 0.1
