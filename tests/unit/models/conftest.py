"""Model folders that hold a config and no more than the header of a weights file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.models.families import FAMILIES

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """`folder(model_type="qwen2", ...)`: a folder whose config is BASE with these changes.

    A value of `...` removes the field; `generation` becomes generation_config.json.
    """

    def make(generation: dict[str, Any] | None = None, **changes: Any) -> Path:
        config = BASE | changes
        family = str(config["model_type"])
        if "architectures" not in changes:
            known = FAMILIES.get(family)
            config["architectures"] = [known.architecture if known else "Unheard"]
        config = {name: value for name, value in config.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return make
