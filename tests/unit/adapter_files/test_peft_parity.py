"""Adapters as PEFT saves them: rank, scaling and the packed product equal PEFT's own numbers."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect, revision_digest
from engine.layout import RowRun, place
from engine.models.spec import ModelSpec

FORMS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "r": 6},
    "one layer": {"target_modules": ["up_proj"], "layers_to_transform": [1], "r": 1},
    "regex targets": {"target_modules": r".*layers\.[02]\.self_attn\.(q|v)_proj"},
    "rank pattern": {
        "target_modules": ["q_proj", "v_proj", "gate_proj"],
        "rank_pattern": {"q_proj": 3, "model.layers.1.self_attn.v_proj": 7},
    },
    "alpha pattern": {
        "target_modules": ["q_proj", "o_proj"],
        "alpha_pattern": {"layers.0.self_attn.q_proj": 2.5, "o_proj": 32},
    },
    "first key in file order": {
        "target_modules": ["k_proj"],
        "rank_pattern": {r"^model\.layers\.1\..*": 2, "k_proj": 5},
        "alpha_pattern": {"k_proj": 3, r"^model\.layers\.0\.self_attn\.k_proj": 99},
    },
    "anchors and classes": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {
            r"^model\.layers\.[12]\.mlp\.(gate|up)_proj": 5,
            r"layers\.\d+\.mlp\.\w+": 2,
        },
        "alpha_pattern": {"proj": 77, "self.attn.v.proj": 11, r"layers\.(?:0|1)\.mlp\..*?proj": 1},
    },
}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, form: dict[str, Any]) -> Any:
    """Save an adapter of this form, and give it back as PEFT loads it from the folder.  (PEFT sorts
    the patterns when it saves them, so the trained model can differ from every loaded one.)"""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base)
    settings = {
        "r": 4,
        "lora_alpha": 9,
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    } | form
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT remarks on patterns and on its own dependencies
        adapted = get_peft_model(model, LoraConfig(**settings))
        adapted.save_pretrained(folder)
        return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)


def peft_layers(model: Any) -> dict[tuple[int, str], Any]:
    """(layer, module) -> PEFT's LoRA layer, for those that have a pair."""
    found = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            parts = name.split(".")
            found[int(parts[2]), parts[-1]] = module
    return found


def read_rows(data: np.ndarray, run: RowRun, block_bytes: int) -> torch.Tensor:
    """(rows, width) of a float32 packed file."""
    rows = []
    for piece in run.pieces:
        start = piece.block * block_bytes + piece.offset
        for i in range(piece.rows):
            at = start + i * run.stride
            rows.append(data[at : at + 4 * run.width].view(np.float32))
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_ranks_scaling_and_packed_products_equal_pefts(
    form: dict[str, Any], base_folder: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    model = save_adapter(base_folder, tmp_path / "adapter", form)
    manifest = inspect(tmp_path / "adapter", spec)
    layers = peft_layers(model)
    assert {(m.layer, m.module) for m in manifest.modules} == set(layers)
    for module in manifest.modules:
        theirs = layers[module.layer, module.module]
        assert module.rank == theirs.r["default"]
        assert module.scaling == theirs.scaling["default"]

    layout = spec.block_layout(block_size=16, dtype="float32")
    rev = revision_digest(tmp_path / "adapter", manifest)
    packed = pack_folder(tmp_path / "adapter", manifest, layout, tmp_path, rev)
    data = np.fromfile(packed.path, np.uint8)
    assert len(data) == packed.num_blocks * layout.block_bytes
    for placed in place(packed.modules, layout).modules:
        theirs = layers[placed.layer, placed.module]
        a = read_rows(data, placed.a, layout.block_bytes)  # (rank, d_in)
        b = read_rows(data, placed.b, layout.block_bytes)  # (rank, d_out)
        assert torch.equal(a, theirs.lora_A["default"].weight.detach())
        assert torch.equal(b.T, theirs.lora_B["default"].weight.detach())
        product = placed.scaling * (b.T @ a)
        expected = theirs.get_delta_weight("default").detach()
        torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)


def test_what_peft_saves_gives_no_warning(
    base_folder: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    save_adapter(base_folder, tmp_path / "adapter", FORMS["attention"])
    manifest = inspect(tmp_path / "adapter", spec)
    assert manifest.warnings == ()
    assert manifest.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (manifest.rank, manifest.num_layers, manifest.dtype) == (4, 3, "float32")


def test_saving_the_same_adapter_twice_gives_one_revision(
    base_folder: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    model = save_adapter(base_folder, tmp_path / "one", FORMS["anchors and classes"])
    model.save_pretrained(tmp_path / "two")
    revs = [revision_digest(tmp_path / n, inspect(tmp_path / n, spec)) for n in ("one", "two")]
    assert revs[0] == revs[1]
    assert len(revs[0]) == 64
