"""What stands beside A and B: biases and magnitudes, and whether the config speaks of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect, revision_digest
from engine.errors import AdapterInvalid
from engine.layout import place
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj"


def biases(**widths: int) -> dict[str, torch.Tensor]:
    """By the module's name in Q and UP."""
    paths = {path.rpartition(".")[2]: path for path in (Q, UP)}
    return {
        f"base_model.model.{paths[module]}.lora_B.bias": torch.randn(width)
        for module, width in widths.items()
    }


@pytest.mark.parametrize("name", ["", ".default"])
def test_biases_are_rows_behind_those_of_b(
    name: str, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = pair(Q, dtype=torch.bfloat16) | pair(UP) | biases(q_proj=64, up_proj=96)
    renamed = {
        key.replace(".bias", f"{name}.bias").replace(".weight", f"{name}.weight"): t
        for key, t in tensors.items()
    }
    folder = make_folder(renamed, lora_bias=True)
    manifest = inspect(folder, spec)
    assert manifest.warnings == ()
    assert [(m.module, m.bias, m.b_rows) for m in manifest.modules] == [
        ("q_proj", True, 5),
        ("up_proj", True, 5),
    ]
    layout = spec.block_layout(block_size=16, dtype="float32")
    packed = pack_folder(folder, manifest, layout, tmp_path, "a" * 64)
    data = np.fromfile(packed.path, np.uint8)
    for placed, bias in zip(
        place(packed.modules, layout).modules, biases(q_proj=64, up_proj=96), strict=True
    ):
        piece = placed.b.pieces[-1]
        at = piece.block * layout.block_bytes + piece.offset + (piece.rows - 1) * placed.b.stride
        row = data[at : at + 4 * placed.b.width].view(np.float32)
        assert np.array_equal(row, tensors[bias].numpy())


def test_a_bias_on_fused_modules_is_cut_as_b_is(make_folder: MakeFolder, spec: ModelSpec) -> None:
    name = "base_model.model.model.layers.1.self_attn.qkv_proj"
    bias = torch.arange(128.0)
    tensors = {
        f"{name}.lora_A.weight": torch.ones(4, 64),
        f"{name}.lora_B.weight": torch.ones(128, 4),
        f"{name}.lora_B.bias": bias,
    }
    folder = make_folder(tensors, lora_bias=True)
    manifest = inspect(folder, replace(spec, fused_names=True))
    raw = (folder / "adapter_model.safetensors").read_bytes()
    refs = [held.bias for held in manifest.tensors]
    found = [
        torch.frombuffer(bytearray(raw[r.begin : r.end]), dtype=torch.float32) for r in refs if r
    ]
    assert [len(part) for part in found] == [64, 32, 32]
    assert torch.equal(torch.cat(found), bias)


def test_biases_that_are_announced_and_absent_are_zero_and_said(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    """As PEFT does it: it starts them at zero and keeps what the file lacks."""
    manifest = inspect(make_folder(pair(Q), lora_bias=True), spec)
    assert not any(m.bias for m in manifest.modules)
    assert "no biases" in manifest.warnings[0]


def test_a_bias_alone_changes_something(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    tensors = {key: torch.zeros_like(t) for key, t in pair(Q).items()}
    bias = biases(q_proj=64)
    assert inspect(make_folder(tensors | bias, lora_bias=True), spec).warnings == ()
    still = {key: torch.zeros_like(t) for key, t in bias.items()}
    (warning,) = inspect(make_folder(tensors | still, lora_bias=True), spec).warnings
    assert "changes nothing" in warning


def test_a_bias_decides_the_revision_and_a_plain_adapter_keeps_its_own(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    def rev(tensors: dict[str, torch.Tensor], **config: object) -> str:
        folder = make_folder(tensors, **config)
        return revision_digest(folder, inspect(folder, spec))

    assert rev(pair(Q)) == rev(pair(Q), lora_bias=False)
    both = pair(Q) | biases(q_proj=64)
    assert rev(both, lora_bias=True) != rev(pair(Q), lora_bias=True)


MAGNITUDES = ["", ".weight", ".default", ".default.weight"]


@pytest.mark.parametrize("ending", MAGNITUDES)
@pytest.mark.parametrize("name", ["", ".default"])
def test_magnitudes_are_known_by_all_their_names(
    ending: str, name: str, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    if name and "default" not in ending:
        ending = name + ending
    tensors = {key.replace(".weight", f"{name}.weight"): t for key, t in pair(Q).items()}
    tensors[f"base_model.model.{Q}.lora_magnitude_vector{ending}"] = torch.ones(64)
    (module,) = inspect(make_folder(tensors, use_dora=True), spec).modules
    assert (module.gain, module.bias, module.b_rows) == (True, False, 6)


def test_a_magnitude_is_never_idle_nor_too_large_for_fp16(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    """It is served as a ratio of two large numbers."""
    tensors = {key: torch.zeros_like(t) for key, t in pair(Q).items()}
    tensors[f"base_model.model.{Q}.lora_magnitude_vector"] = torch.full((64,), 1e6)
    manifest = inspect(make_folder(tensors, use_dora=True), spec, served_dtype="float16")
    assert manifest.warnings == ()


def test_a_magnitude_that_is_not_finite_is_refused(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    tensors = pair(Q) | {
        f"base_model.model.{Q}.lora_magnitude_vector": torch.full((64,), torch.inf)
    }
    with pytest.raises(AdapterInvalid) as caught:
        inspect(make_folder(tensors, use_dora=True), spec)
    assert caught.value.reason == "E_NONFINITE" and "magnitude" in caught.value.message
