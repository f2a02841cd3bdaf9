"""Adapters as mlx-lm saves them: the same modules, numbers and revision rules as PEFT's."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect, revision_digest
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj"


@pytest.fixture
def mlx_folder(tmp_path: Path) -> MakeFolder:
    """mlx_folder(PEFT's tensors, rank=..., **config) -> what mlx-lm has in their place."""

    def make(
        tensors: dict[str, torch.Tensor], name: str = "mlx", file: str = "adapters", **config: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        plain = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0}}
        (folder / "adapter_config.json").write_text(json.dumps(plain | config))
        ours = {
            key.replace("base_model.model.", "")
            .replace("lora_A.weight", "lora_a")
            .replace("lora_B.weight", "lora_b"): t.T.contiguous()
            for key, t in tensors.items()
        }
        save_file(ours, folder / f"{file}.safetensors")
        return folder

    return make


@pytest.mark.parametrize("file", ["adapters", "adapter_model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_packed_into_the_bytes_of_the_same_adapter_from_peft(
    file: str,
    dtype: torch.dtype,
    make_folder: MakeFolder,
    mlx_folder: MakeFolder,
    pair: MakePair,
    spec: ModelSpec,
    tmp_path: Path,
) -> None:
    tensors = pair(Q, dtype=dtype) | pair(UP)
    layout = spec.block_layout(block_size=16, dtype="float16")
    data = []
    for n, folder in enumerate((make_folder(tensors), mlx_folder(tensors, file=file))):
        manifest = inspect(folder, spec)
        assert [(m.layer, m.module, m.rank, m.scaling) for m in manifest.modules] == [
            (0, "q_proj", 4, 2.0),
            (2, "up_proj", 4, 2.0),
        ]
        out = tmp_path / str(n)
        out.mkdir()
        data.append(Path(pack_folder(folder, manifest, layout, out, "a" * 64).path).read_bytes())
    assert data[0] == data[1]


def test_parts_of_a_fused_module_are_cut_from_columns(
    make_folder: MakeFolder, mlx_folder: MakeFolder, spec: ModelSpec, tmp_path: Path
) -> None:
    fused = replace(spec, fused_names=True)
    name = "base_model.model.model.layers.1.self_attn.qkv_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(4, 64),
        f"{name}.lora_B.weight": torch.randn(128, 4),
    }
    layout = spec.block_layout(block_size=16, dtype="float32")
    data = []
    for folder in (make_folder(tensors), mlx_folder(tensors)):
        packed = pack_folder(folder, inspect(folder, fused), layout, tmp_path, "a" * 64)
        data.append(Path(packed.path).read_bytes())
    assert data[0] == data[1]


def test_scale_is_not_divided_by_the_rank_and_its_absence_is_said(
    mlx_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    said = inspect(mlx_folder(pair(Q, 2), "one", lora_parameters={"scale": 7.5}), spec)
    assert (said.modules[0].scaling, said.alpha) == (7.5, 7.5)
    silent = inspect(mlx_folder(pair(Q), "two", lora_parameters={"rank": 4}), spec)
    assert silent.modules[0].scaling == 20.0
    assert any("no scale" in warning for warning in silent.warnings)


def test_listed_keys_without_tensors_are_named(
    mlx_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    folder = mlx_folder(pair(Q), lora_parameters={"rank": 4, "scale": 2.0, "keys": keys})
    (warning,) = inspect(folder, spec).warnings
    assert "self_attn.v_proj" in warning and "self_attn.q_proj" not in warning


def test_options_of_the_training_run_change_neither_manifest_nor_revision(
    mlx_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    one = mlx_folder(pair(Q), "one")
    two = mlx_folder(pair(Q), "two", iters=600, seed=1, optimizer="adam", num_layers=-1)
    three = mlx_folder(pair(Q), "three", lora_parameters={"rank": 4, "scale": 3.0})
    manifests = [inspect(folder, spec) for folder in (one, two, three)]
    revs = [revision_digest(f, m) for f, m in zip((one, two, three), manifests, strict=True)]
    assert manifests[0] == manifests[1]
    assert revs[0] == revs[1] != revs[2]


def test_beside_both_files_each_config_has_its_own(
    mlx_folder: MakeFolder, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    ours, theirs = mlx_folder(pair(Q)), make_folder(pair(UP))
    for name, folder in (("adapters", ours), ("adapter_model", theirs)):
        other = theirs if folder is ours else ours
        data = (folder / f"{name}.safetensors").read_bytes()
        (other / f"{name}.safetensors").write_bytes(data)
    assert [m.module for m in inspect(ours, spec).modules] == ["q_proj"]
    assert [m.module for m in inspect(theirs, spec).modules] == ["up_proj"]
