"""A tiny base, and adapter folders written with safetensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.layout import MODULE_ID
from engine.models.spec import ModelSpec
from tests.fakes.tiny_spec import SPEC

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def spec() -> ModelSpec:
    return SPEC


@pytest.fixture
def pair() -> Callable[..., dict[str, torch.Tensor]]:
    """pair("layers.0.self_attn.q_proj", rank, ...): one module's two tensors, by PEFT's names."""

    def make(
        path: str,
        rank: int = 4,
        *,
        dtype: torch.dtype = torch.float32,
        prefix: str = "base_model.model.",
    ) -> dict[str, torch.Tensor]:
        module = path.rpartition(".")[2]
        d_in, d_out = SPEC.shapes.dims[MODULE_ID[module]]
        generator = torch.Generator().manual_seed(hash_of(path))
        a = torch.randn(rank, d_in, generator=generator).to(dtype)
        b = torch.randn(d_out, rank, generator=generator).to(dtype)
        return {f"{prefix}{path}.lora_A.weight": a, f"{prefix}{path}.lora_B.weight": b}

    return make


def hash_of(text: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % (1 << 31)


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """make_folder(tensors, **config) -> a new folder; config fields override a plain LoRA's."""
    count = 0

    def make(tensors: dict[str, torch.Tensor], **config: Any) -> Path:
        nonlocal count
        count += 1
        folder = tmp_path / f"adapter{count}"
        folder.mkdir()
        plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": None}
        kept = {k: v for k, v in (plain | config).items() if v is not ...}
        (folder / "adapter_config.json").write_text(json.dumps(kept))
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    return make
