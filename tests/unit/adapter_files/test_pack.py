"""The packed file: every byte where the layout says, in the arena's dtype, whole or not there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.adapters import pack
from engine.adapters.pack import pack_folder, stored_ratio
from engine.adapters.peft import inspect
from engine.adapters.rows import convert
from engine.errors import AdapterInvalid
from engine.layout import BlockLayout, RowRun, Shapes, place, stream_order
from engine.messages import PackedManifest, PackedModule
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]

PATHS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.2.self_attn.k_proj",
    "model.layers.2.mlp.gate_proj",
]
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def some_adapter(pair: MakePair, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {key: t for path in PATHS for key, t in pair(path, 37, dtype=dtype).items()}


def rows_at(data: bytes, run: RowRun, layout: BlockLayout, used: np.ndarray) -> torch.Tensor:
    """(rows, width) as torch reads them; marks the bytes in `used`."""
    size = run.width * layout.itemsize
    rows = []
    for piece in run.pieces:
        for i in range(piece.rows):
            at = piece.block * layout.block_bytes + piece.offset + i * run.stride
            used[at : at + size] = True
            rows.append(
                torch.frombuffer(bytearray(data[at : at + size]), dtype=TORCH[layout.dtype])
            )
    return torch.stack(rows)


@pytest.mark.parametrize("served", TORCH)
@pytest.mark.parametrize("stored", TORCH)
def test_rows_read_back_are_the_tensors_rounded_once_and_the_rest_is_zero(
    stored: str,
    served: str,
    make_folder: MakeFolder,
    pair: MakePair,
    spec: ModelSpec,
    tmp_path: Path,
) -> None:
    tensors = some_adapter(pair, TORCH[stored])
    folder = make_folder(tensors, r=37)
    layout = spec.block_layout(block_size=8, dtype=served)
    manifest = inspect(folder, spec, served_dtype=served)
    packed = pack_folder(folder, manifest, layout, tmp_path, "f" * 64)
    assert packed.num_blocks > 3  # rows of one module lie in several blocks
    data = Path(packed.path).read_bytes()
    assert len(data) == packed.num_blocks * layout.block_bytes
    used = np.zeros(len(data), bool)
    for placed, path in zip(place(packed.modules, layout).modules, PATHS, strict=True):
        key = f"base_model.model.{path}"
        a, b = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
        assert torch.equal(rows_at(data, placed.a, layout, used), a.to(TORCH[served]))
        assert torch.equal(rows_at(data, placed.b, layout, used), b.T.to(TORCH[served]))
    assert not np.frombuffer(data, np.uint8)[~used].any()
    assert int(used.sum()) == packed.true_bytes


def test_rounding_equals_torchs_on_ties_subnormals_and_extremes() -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    bits[:4096] = (bits[:4096] & 0xFFFF_0000) | 0x8000  # exactly between two bfloat16 values
    bits[4096:8192] &= 0x807F_FFFF  # subnormal
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3.38e38)]
    ours = convert(values, "float32", "bfloat16")
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours, theirs)
    small = values[np.abs(values) < 65504]
    half = torch.from_numpy(small).to(torch.float16).numpy()
    assert np.array_equal(
        convert(small, "float32", "float16").view(np.uint16), half.view(np.uint16)
    )


def test_the_manifest_says_what_the_engine_must_know(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, tmp_path: Path
) -> None:
    folder = make_folder(some_adapter(pair), r=37, use_rslora=True)
    layout = spec.block_layout(block_size=16, dtype="float32")
    manifest = inspect(folder, spec)
    packed = pack_folder(folder, manifest, layout, tmp_path, "a" * 64)
    assert packed.path == str(tmp_path / f"packed-{layout.id}.bin")
    assert (packed.rev, packed.layout, packed.max_rank) == ("a" * 64, layout.id, 37)
    assert packed.modules == stream_order(packed.modules) == manifest.modules
    assert packed.changes_kv
    assert packed.modules[0].scaling == 8 / 37**0.5


def llama_8b(rank: int, modules: tuple[str, ...]) -> tuple[tuple[PackedModule, ...], BlockLayout]:
    hidden, ffn, kv = 4096, 14336, 1024
    dims = ((hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden))
    mlp = ((hidden, ffn), (hidden, ffn), (ffn, hidden))
    layout = BlockLayout(Shapes(32, dims + mlp), "bfloat16", 2 << 20)
    every = [PackedModule(layer, module, rank, 1.0) for layer in range(32) for module in modules]
    return stream_order(every), layout


@pytest.mark.parametrize("rank", [4, 5, 8, 16, 33, 64, 256])
@pytest.mark.parametrize(
    "modules",
    [
        ("q_proj", "v_proj"),
        ("k_proj",),
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ("gate_proj", "up_proj", "down_proj"),
    ],
    ids=["qv", "k", "all", "mlp"],
)
def test_an_8b_adapter_is_stored_within_five_percent_and_one_block(
    rank: int, modules: tuple[str, ...]
) -> None:
    stream, layout = llama_8b(rank, modules)
    placement = place(stream, layout)
    stored = placement.num_blocks * layout.block_bytes
    assert stored <= 1.05 * placement.true_bytes + layout.block_bytes


class TestFailures:
    def test_a_full_disk_leaves_nothing_behind(
        self,
        make_folder: MakeFolder,
        pair: MakePair,
        spec: ModelSpec,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder = make_folder(some_adapter(pair), r=37)
        layout = spec.block_layout(block_size=16, dtype="float32")
        out = tmp_path / "out"
        out.mkdir()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space"):
            pack_folder(folder, inspect(folder, spec), layout, out, "a" * 64)
        assert list(out.iterdir()) == []

    def test_a_file_cut_after_inspection_is_refused_and_the_older_file_stays(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, tmp_path: Path
    ) -> None:
        folder = make_folder(some_adapter(pair), r=37)
        layout = spec.block_layout(block_size=16, dtype="float32")
        manifest = inspect(folder, spec)
        packed = pack_folder(folder, manifest, layout, tmp_path, "a" * 64)
        before = Path(packed.path).read_bytes()
        os.truncate(folder / "adapter_model.safetensors", manifest.file_bytes - 1)
        with pytest.raises(AdapterInvalid) as caught:
            pack_folder(folder, manifest, layout, tmp_path, "a" * 64)
        assert caught.value.reason == "E_TRUNCATED"
        assert Path(packed.path).read_bytes() == before
        assert [p.name for p in tmp_path.glob("*.tmp")] == []

    def test_what_a_killed_packer_left_is_swept_and_a_running_ones_is_not(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, tmp_path: Path
    ) -> None:
        folder = make_folder(some_adapter(pair), r=37)
        layout = spec.block_layout(block_size=16, dtype="float32")
        gone = subprocess.run(
            ["sh", "-c", "echo $$"], capture_output=True, text=True
        ).stdout.strip()
        left, alive = (tmp_path / f"packed-{layout.id}.bin.{pid}.tmp" for pid in (gone, "1"))
        left.touch()
        alive.touch()
        pack_folder(folder, inspect(folder, spec), layout, tmp_path, "a" * 64)
        assert not left.exists()
        assert alive.exists()

    def test_a_layout_of_another_model_is_refused(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, tmp_path: Path
    ) -> None:
        folder = make_folder(some_adapter(pair), r=37)
        with pytest.raises(AdapterInvalid) as caught:
            pack_folder(folder, inspect(folder, spec), llama_8b(4, ())[1], tmp_path, "a" * 64)
        assert caught.value.reason == "E_SHAPE"


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
    "torch_dtype": "float32",
}


class TestProcess:
    @pytest.fixture
    def command(self, tmp_path: Path) -> Callable[..., list[str]]:
        base = tmp_path / "base"
        base.mkdir()
        (base / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / "out").mkdir()

        def make(folder: Path, *more: str) -> list[str]:
            fixed = ["--model", str(base), "--block-size", "16", "--dtype", "float32"]
            return ["--folder", str(folder), *fixed, "--out", str(tmp_path / "out"), *more]

        return make

    def run(self, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "engine.adapters.pack", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_it_prints_the_packed_manifest_and_the_ratio(
        self, command: Callable[..., list[str]], make_folder: MakeFolder, pair: MakePair
    ) -> None:
        import msgspec

        done = self.run(command(make_folder(some_adapter(pair), r=37)))
        assert done.returncode == 0, done.stderr
        packed = msgspec.json.decode(done.stdout, type=PackedManifest)
        assert len(packed.rev) == 64
        assert os.path.getsize(packed.path) == packed.num_blocks * 16 * 3 * 2 * 2 * 16 * 4
        assert "ratio" in done.stderr

    def test_a_refusal_is_one_json_object_and_status_8(
        self, command: Callable[..., list[str]], make_folder: MakeFolder, pair: MakePair
    ) -> None:
        done = self.run(command(make_folder(some_adapter(pair), r=37), "--max-rank", "8"))
        assert done.returncode == 8
        answer = json.loads(done.stdout)
        assert answer["reason"] == "E_RANK_TOO_LARGE"
        assert "max_rank" in answer["hint"]
        assert done.stderr == ""

    def test_other_failures_have_their_own_status(
        self,
        command: Callable[..., list[str]],
        make_folder: MakeFolder,
        pair: MakePair,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.setattr(os, "nice", lambda _: 0)
        arguments = command(make_folder(some_adapter(pair), r=37))
        (tmp_path / "out").rmdir()
        assert pack.main(arguments) == 1
        assert json.loads(capsys.readouterr().out)["reason"] == "load_failed"
        (tmp_path / "out").mkdir()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        assert pack.main(arguments) == 9
        assert json.loads(capsys.readouterr().out)["reason"] == "no_room"

    def test_neither_inspection_nor_packing_imports_torch(self) -> None:
        code = (
            "import sys, engine.adapters.peft, engine.adapters.pack;"
            "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'safetensors')))"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_ratio_is_stored_over_true_bytes() -> None:
    layout = llama_8b(4, ())[1]
    fields: dict[str, Any] = {"rev": "", "path": "", "layout": "", "max_rank": 1, "modules": ()}
    packed = PackedManifest(num_blocks=3, true_bytes=4 << 20, changes_kv=True, **fields)
    assert stored_ratio(packed, layout) == 1.5
