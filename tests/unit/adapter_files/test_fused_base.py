"""Adapters on modules that the base was published with as one: shared A, B cut by its rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters.manifest import AdapterManifest, TensorRef
from engine.adapters.peft import inspect
from engine.errors import AdapterInvalid
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]

QKV, GATE_UP = "model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"


@pytest.fixture
def fused(spec: ModelSpec) -> ModelSpec:
    return replace(spec, fused_names=True)


def factors(path: str, d_out: int, rank: int = 4, **more: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    name = f"base_model.model.{path}"
    a, b = torch.randn(rank, 64, **more), torch.randn(d_out, rank, **more)
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}


def read(folder: Path, ref: TensorRef, dtype: torch.dtype) -> torch.Tensor:
    raw = (folder / "adapter_model.safetensors").read_bytes()[ref.begin : ref.end]
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(ref.shape)


def by_module(manifest: AdapterManifest) -> dict[tuple[int, str], tuple[TensorRef, ...]]:
    placed = ((m.layer, m.module) for m in manifest.modules)
    return dict(zip(placed, (held.every for held in manifest.tensors), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_part_has_the_whole_a_and_its_own_rows_of_b(
    make_folder: MakeFolder, fused: ModelSpec, dtype: torch.dtype
) -> None:
    qkv, gate_up = factors(QKV, 128, dtype=dtype), factors(GATE_UP, 192, dtype=dtype)
    folder = make_folder(qkv | gate_up)
    found = by_module(inspect(folder, fused))
    expected = {0: ["gate_proj", "up_proj"], 1: ["q_proj", "k_proj", "v_proj"]}
    assert list(found) == [(layer, part) for layer, parts in expected.items() for part in parts]
    for held, layer, parts in (
        (qkv, 1, {"q_proj": 64, "k_proj": 32, "v_proj": 32}),
        (gate_up, 0, {"gate_proj": 96, "up_proj": 96}),
    ):
        a, b = held.values()
        for part, rows in zip(parts, torch.split(b, list(parts.values())), strict=True):
            refs = found[layer, part]
            assert torch.equal(read(folder, refs[0], dtype), a)
            assert torch.equal(read(folder, refs[1], dtype), rows)


def test_patterns_are_matched_against_the_fused_name(
    make_folder: MakeFolder, fused: ModelSpec
) -> None:
    tensors = factors(QKV, 128, rank=2) | factors(GATE_UP, 192)
    manifest = inspect(
        make_folder(
            tensors,
            target_modules=["qkv_proj", "gate_up_proj"],
            rank_pattern={"qkv_proj": 2},
            alpha_pattern={"gate_up_proj": 2},
        ),
        fused,
    )
    assert [(m.rank, m.scaling) for m in manifest.modules] == [(4, 0.5)] * 2 + [(2, 4.0)] * 3
    assert manifest.warnings == ()


def test_parts_by_themselves_fit_a_fused_base_too(
    make_folder: MakeFolder, fused: ModelSpec, pair: Callable[..., dict[str, torch.Tensor]]
) -> None:
    manifest = inspect(make_folder(pair("model.layers.1.self_attn.q_proj")), fused)
    assert [(m.layer, m.module) for m in manifest.modules] == [(1, "q_proj")]


def refusal(folder: Path, spec: ModelSpec) -> AdapterInvalid:
    with pytest.raises(AdapterInvalid) as caught:
        inspect(folder, spec)
    return caught.value


def test_a_fused_module_and_its_part_are_not_added_up(
    make_folder: MakeFolder, fused: ModelSpec, pair: Callable[..., dict[str, torch.Tensor]]
) -> None:
    tensors = factors(QKV, 128) | pair("model.layers.1.self_attn.k_proj")
    error = refusal(make_folder(tensors), fused)
    assert error.reason == "E_DUPLICATE_MODULE"
    assert "qkv_proj" in error.message and "k_proj in layer 1" in error.message


@pytest.mark.parametrize(("rows", "columns"), [(127, 4), (192, 4)])
def test_a_fused_b_of_other_rows_is_refused_with_what_is_wanted(
    make_folder: MakeFolder, fused: ModelSpec, rows: int, columns: int
) -> None:
    error = refusal(make_folder(factors(QKV, rows, columns)), fused)
    assert error.reason == "E_SHAPE" and f"[{rows}, 4], wanted [128, r]" in error.message


def test_a_fused_module_without_its_b_is_named_once(
    make_folder: MakeFolder, fused: ModelSpec
) -> None:
    a = {name: t for name, t in factors(QKV, 128).items() if "lora_A" in name}
    error = refusal(make_folder(a), fused)
    assert error.reason == "E_HALF_PAIR" and error.message.count("qkv_proj") == 1


def test_an_empty_shard_of_a_fused_b_is_refused_as_one(
    make_folder: MakeFolder, fused: ModelSpec
) -> None:
    tensors = factors(QKV, 128)
    tensors["base_model.model." + QKV + ".lora_B.weight"] = torch.empty(0)
    assert refusal(make_folder(tensors), fused).reason == "E_ZERO_SHARD"


def test_a_base_of_separate_modules_has_no_fused_one(
    make_folder: MakeFolder, spec: ModelSpec, fused: ModelSpec
) -> None:
    plain = refusal(make_folder(factors(QKV, 128)), spec)
    assert plain.reason == "E_NO_MATCH"
    other = refusal(make_folder(factors("model.layers.0.self_attn.c_attn", 128)), fused)
    assert "qkv_proj, o_proj, gate_up_proj, down_proj in layers" in other.message
