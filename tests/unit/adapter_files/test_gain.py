"""DoRA's gains: computed from the base's own files, exact, and for these weights alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.adapters import gain as gain_module
from engine.adapters.fused_base import base_rows
from engine.adapters.gain import gain
from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect
from engine.adapters.rows import BaseRows
from engine.errors import AdapterInvalid, ConfigError, ModelUnsupported
from engine.layout import BlockLayout, RowRun, place
from engine.messages import PackedManifest
from engine.models.base_files import BaseFiles, base_id
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj"


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Of the modules in Q and UP, and one more."""
    torch.manual_seed(1)
    shapes = {Q: (64, 64), UP: (96, 64), "model.layers.1.mlp.down_proj": (64, 96)}
    return {f"{path}.weight": torch.randn(shape).to(dtype) for path, shape in shapes.items()}


def write_base(folder: Path, held: dict[str, torch.Tensor], *, shards: bool = False) -> Path:
    folder.mkdir()
    if not shards:
        save_file(held, folder / "model.safetensors")
        return folder
    index = {}
    for n, (name, tensor) in enumerate(held.items()):
        index[name] = f"model-{n}.safetensors"
        save_file({name: tensor}, folder / index[name], metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def dora(pair: MakePair) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    more = {
        f"base_model.model.{path}.lora_magnitude_vector": 1 + torch.rand(width)
        for path, width in ((Q, 64), (UP, 96))
    }
    return pair(Q) | pair(UP) | more


def expected_gain(
    held: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], path: str
) -> Any:
    a, b, m = (
        tensors[f"base_model.model.{path}.{end}"].double()
        for end in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    )
    return m / (held[f"{path}.weight"].double() + 2.0 * b @ a).norm(dim=1)  # alpha 8, rank 4


def read_rows(packed: PackedManifest, run: RowRun, layout: BlockLayout) -> torch.Tensor:
    data, dtype = Path(packed.path).read_bytes(), getattr(torch, layout.dtype)
    rows = []
    for piece in run.pieces:
        for i in range(piece.rows):
            at = piece.block * layout.block_bytes + piece.offset + i * run.stride
            raw = bytearray(data[at : at + run.width * layout.itemsize])
            rows.append(torch.frombuffer(raw, dtype=dtype))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("served", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-16), ("float16", 2**-19)]
)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_two_rows_behind_b_add_up_to_magnitude_over_norm(
    stored: torch.dtype,
    served: str,
    tolerance: float,
    make_folder: MakeFolder,
    pair: MakePair,
    spec: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gain_module, "CHUNK", 64 * 7)  # 7 rows at a time: neither width has them
    held, tensors = weights(stored), dora(pair)
    folder = make_folder(tensors, use_dora=True)
    layout = spec.block_layout(block_size=16, dtype=served)
    with BaseFiles(write_base(tmp_path / "base", held, shards=True)) as files:
        base = BaseRows(files, spec)
        packed = pack_folder(folder, inspect(folder, spec), layout, tmp_path, "a" * 64, base=base)
    assert packed.layout == f"{layout.id}w{base.id}"
    assert Path(packed.path).name == f"packed-{packed.layout}.bin"
    for placed, path in zip(place(packed.modules, layout).modules, (Q, UP), strict=True):
        rows = read_rows(packed, placed.b, layout)
        assert len(rows) == 4 + 2
        b = tensors[f"base_model.model.{path}.lora_B.weight"]
        assert torch.equal(rows[:4].T, b.to(rows.dtype))
        exact = expected_gain(held, tensors, path)
        assert ((rows[4:].double().sum(0) - exact) / exact).abs().max() < tolerance


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_norms_are_pefts_up_to_its_rounding_to_the_weights_dtype(
    dtype: torch.dtype, bound: float
) -> None:
    from peft.tuners.lora.dora import DoraLinearLayer

    torch.manual_seed(3)
    w, a, b = torch.randn(50, 70).to(dtype), torch.randn(3, 70), torch.randn(50, 3)
    theirs = DoraLinearLayer(fan_in_fan_out=False).get_weight_norm(w, (b @ a).to(dtype), 0.7)
    rows = w.float().numpy()
    ones = np.ones(50, np.float32)
    ours = 1 / gain(ones, lambda first, last: rows[first:last], a.numpy(), b.numpy(), 0.7)
    assert np.abs(ours / theirs.double().numpy() - 1).max() < bound


def test_a_row_of_zeros_has_no_gain_and_is_named(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, tmp_path: Path
) -> None:
    held, tensors = weights(), dora(pair)
    held[f"{UP}.weight"][17] = 0
    tensors[f"base_model.model.{UP}.lora_B.weight"][17] = 0
    folder = make_folder(tensors, use_dora=True)
    layout = spec.block_layout(block_size=16, dtype="float32")
    with BaseFiles(write_base(tmp_path / "base", held)) as files:
        base = BaseRows(files, spec)
        with pytest.raises(AdapterInvalid) as caught:
            pack_folder(folder, inspect(folder, spec), layout, tmp_path, "a" * 64, base=base)
    assert caught.value.reason == "E_DORA"
    assert "up_proj.lora_magnitude_vector" in caught.value.message
    assert "row 17" in caught.value.message
    assert list(tmp_path.glob("packed-*")) == []


def test_parts_of_a_fused_module_have_their_own_rows_of_it(spec: ModelSpec) -> None:
    fused = replace(spec, fused_names=True)
    assert base_rows(1, "q_proj", spec) == ("layers.1.self_attn.q_proj.weight", 0)
    assert base_rows(0, "up_proj", spec) == ("layers.0.mlp.up_proj.weight", 0)
    assert base_rows(1, "q_proj", fused) == ("layers.1.self_attn.qkv_proj.weight", 0)
    assert base_rows(1, "v_proj", fused) == ("layers.1.self_attn.qkv_proj.weight", 64 + 32)
    assert base_rows(2, "up_proj", fused) == ("layers.2.mlp.gate_up_proj.weight", 96)
    assert base_rows(2, "down_proj", fused) == ("layers.2.mlp.down_proj.weight", 0)


def test_the_id_of_a_base_is_that_of_its_weights_however_they_are_filed(tmp_path: Path) -> None:
    held = weights()
    one = base_id(write_base(tmp_path / "one", held))
    assert base_id(write_base(tmp_path / "two", held, shards=True)) == one
    longer = {name.replace("model.", "model.language_model."): t for name, t in held.items()}
    assert base_id(write_base(tmp_path / "three", longer)) == one
    tuned = {
        name: t + 1e-3 * torch.randn_like(t) if "up" in name else t for name, t in held.items()
    }
    assert base_id(write_base(tmp_path / "four", tuned)) != one
    cast = {name: t.bfloat16() for name, t in held.items()}
    assert base_id(write_base(tmp_path / "five", cast)) != one


def test_rows_of_every_dtype_are_the_files_own_numbers(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        held = weights(dtype)
        with BaseFiles(write_base(tmp_path / str(dtype), held)) as files:
            found = files.rows("layers.2.mlp.up_proj.weight", 90, 96)
        assert torch.equal(torch.from_numpy(found), held[f"{UP}.weight"][90:].float())


def test_a_base_that_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    folder = write_base(tmp_path / "base", weights())
    with BaseFiles(folder) as files, pytest.raises(ModelUnsupported, match="k_proj"):
        files.rows("layers.0.self_attn.k_proj.weight", 0, 1)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 50_000)
    with pytest.raises(ConfigError, match="ends at byte"):
        base_id(folder)
    path.write_bytes(b"\x40\0\0\0\0\0\0\0" + b"x" * 64)
    with pytest.raises(ConfigError, match="no readable safetensors header"):
        base_id(folder)


def test_a_weight_whose_norm_float32_does_not_hold_has_no_gain() -> None:
    a, b = np.full((1, 4), 1e15, np.float32), np.array([[1e15], [1.0]], np.float32)
    base = np.zeros((2, 4), np.float32)
    huge, plain = gain(np.ones(2, np.float32), lambda first, last: base[first:last], a, b, 1.0)
    assert np.isnan(huge), "over an infinite norm it would be 0, and the module would fall silent"
    assert plain == pytest.approx(1 / 2e15)


class TestProcess:
    def run(self, folder: Path, base: Path, out: Path) -> "subprocess.CompletedProcess[str]":
        fixed = ["--block-size", "16", "--dtype", "bfloat16", "--out", str(out)]
        return subprocess.run(
            [sys.executable, "-c", PACK, "--folder", str(folder), "--model", str(base), *fixed],
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_the_packer_reads_the_base_without_torch(
        self, make_folder: MakeFolder, pair: MakePair, tmp_path: Path
    ) -> None:
        base = write_base(tmp_path / "base", weights(torch.bfloat16))
        (base / "config.json").write_text(json.dumps(CONFIG))
        done = self.run(make_folder(dora(pair), use_dora=True), base, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        packed = msgspec.json.decode(done.stdout, type=PackedManifest)
        assert packed.layout.endswith(f"w{base_id(base)}") and Path(packed.path).is_file()
        assert all(m.gain for m in packed.modules)

    def test_a_base_without_its_files_is_the_packers_failure_and_not_the_adapters(
        self, make_folder: MakeFolder, pair: MakePair, tmp_path: Path
    ) -> None:
        base = tmp_path / "base"
        base.mkdir()
        (base / "config.json").write_text(json.dumps(CONFIG))
        done = self.run(make_folder(dora(pair), use_dora=True), base, tmp_path)
        assert done.returncode == 1
        assert "model.safetensors" in json.loads(done.stdout)["message"]


PACK = (
    "import sys; from engine.adapters.pack import main; status = main(sys.argv[1:]);"
    "assert 'torch' not in sys.modules; sys.exit(status)"
)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
