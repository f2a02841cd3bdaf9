"""A random adapter on a decoder's modules, in PEFT's layout.

Goes in: a base's folder.  Comes out: an adapter's, whose effect is as large as the base's own.
"""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.layout import MODULE_ID, MODULES
from engine.models.spec import read_spec


def write_lora(
    folder: Path,
    base: Path,
    rank: int,
    *,
    alpha: float | None = None,
    without: Collection[tuple[int, str]] = (),
    labels: int = 0,
) -> Path:
    """On all modules but those (layer, module) that it is `without`; scaled by 1 unless `alpha` is
    given; with `labels` it has a `score` head of its own."""
    spec, tensors = read_spec(base), {}
    for layer in range(spec.num_layers):
        for module in MODULES:
            if (layer, module) in without:
                continue
            d_in, d_out = spec.shapes.dims[MODULE_ID[module]]
            part = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, d_in) * d_in**-0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(d_out, rank) * rank**-0.5
    config: dict[str, object] = {"peft_type": "LORA", "r": rank, "target_modules": list(MODULES)}
    config["lora_alpha"] = rank if alpha is None else alpha
    if labels:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
        tensors["base_model.model.score.weight"] = torch.randn(labels, spec.hidden_size)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
