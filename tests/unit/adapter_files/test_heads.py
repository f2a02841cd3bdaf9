"""Adapters of an encoder: published names, a head of their own, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect
from engine.errors import AdapterInvalid
from engine.layout import place
from engine.models.encoder_spec import EncoderSpec

MakeFolder = Callable[..., Path]

HIDDEN, FFN, LABELS = 64, 96, 3
SPEC = EncoderSpec(
    model_type="bert",
    vocab_size=128,
    hidden_size=HIDDEN,
    num_layers=2,
    num_heads=4,
    head_dim=16,
    ffn_size=FFN,
    max_length=64,
    norm_eps=1e-12,
    dtype="float32",
    activation="gelu",
    gated=False,
    post_norm=True,
    norm_bias=True,
    attention_bias=True,
    mlp_bias=True,
    num_types=2,
    position_rows=64,
    windows=(0, 0),
    ropes=(None, None),
)
START = "base_model.model."
QUERY, MLP = "bert.encoder.layer.1.attention.self.query", "bert.encoder.layer.0.output.dense"
POOLER = "bert.pooler.dense"


def pairs(**modules: tuple[int, int]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    found = {}
    for name, (d_in, d_out) in modules.items():
        found[f"{START}{name}.lora_A.weight"] = torch.randn(4, d_in)
        found[f"{START}{name}.lora_B.weight"] = torch.randn(d_out, 4)
    return found


def usual() -> dict[str, Tensor]:
    return pairs(**{QUERY: (HIDDEN, HIDDEN), MLP: (FFN, HIDDEN), POOLER: (HIDDEN, HIDDEN)})


def head(labels: int = LABELS) -> dict[str, Tensor]:
    return {
        f"{START}classifier.weight": torch.randn(labels, HIDDEN),
        f"{START}classifier.bias": torch.randn(labels),
    }


SAVED: dict[str, Any] = {"modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"}


def test_published_names_lead_to_modules_and_the_pooler_is_the_heads(
    make_folder: MakeFolder,
) -> None:
    manifest = inspect(make_folder(usual()), SPEC)
    assert [(m.layer, m.module) for m in manifest.modules] == [
        (0, "down_proj"),
        (1, "q_proj"),
        (2, "head.dense"),
    ]
    assert manifest.warnings == () or all("lists" in text for text in manifest.warnings)


def test_a_head_of_its_own_is_packed_as_it_is(make_folder: MakeFolder, tmp_path: Path) -> None:
    trained = head()
    folder = make_folder(usual() | trained, **SAVED)
    manifest = inspect(folder, SPEC)
    assert [m.module for m in manifest.modules[-2:]] == ["score.weight.rows", "score.bias.rows"]
    assert not any("modules_to_save" in text for text in manifest.warnings)
    layout = SPEC.block_layout(dtype="float32")
    packed = pack_folder(folder, manifest, layout, tmp_path, "rev")
    data = np.fromfile(packed.path, np.float32)
    for module, tensor in zip(
        place(packed.modules, layout).modules[-2:], trained.values(), strict=True
    ):
        [piece] = module.a.pieces
        first = (piece.block * layout.block_bytes + piece.offset) // 4
        stride = module.a.stride // 4
        rows = np.stack([data[first + i * stride :][:HIDDEN] for i in range(piece.rows)])
        flat = rows.ravel()
        assert np.array_equal(flat[: tensor.numel()], tensor.numpy().ravel())
        assert not flat[tensor.numel() :].any()


def test_more_labels_than_a_row_holds_take_more_rows_of_bias(make_folder: MakeFolder) -> None:
    manifest = inspect(make_folder(usual() | head(HIDDEN + 1), **SAVED), SPEC)
    assert [m.rank for m in manifest.modules[-2:]] == [HIDDEN + 1, 2]


def test_a_head_that_the_config_does_not_speak_of_is_refused(make_folder: MakeFolder) -> None:
    with pytest.raises(AdapterInvalid) as caught:
        inspect(make_folder(usual() | head()), SPEC)
    assert caught.value.reason in ("E_MODULES_TO_SAVE", "E_BIAS")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({f"{START}classifier.bias": None}, "E_HALF_PAIR"),
        ({f"{START}classifier.bias": torch.zeros(LABELS + 1)}, "E_SHAPE"),
        ({f"{START}classifier.weight": torch.zeros(LABELS, HIDDEN - 1)}, "E_SHAPE"),
        ({f"{START}classifier.weight": torch.zeros(LABELS, HIDDEN).long()}, "E_DTYPE"),
        ({f"{START}classifier.modules_to_save.bias": torch.zeros(LABELS)}, "E_DUPLICATE_MODULE"),
        ({f"{START}classifier.weight": torch.full((LABELS, HIDDEN), torch.nan)}, "E_NONFINITE"),
    ],
)
def test_a_head_that_cannot_be_served_is_refused(
    make_folder: MakeFolder, changes: dict[str, Tensor | None], reason: str
) -> None:
    tensors = {name: t for name, t in (usual() | head() | changes).items() if t is not None}
    with pytest.raises(AdapterInvalid) as caught:
        inspect(make_folder(tensors, **SAVED), SPEC)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("bert.encoder.layer.1.crossattention.self.query", "E_UNKNOWN_MODULE"),
        ("bert.encoder.layer.2.output.dense", "E_LAYER_RANGE"),
        ("classifier", "E_UNKNOWN_MODULE"),
    ],
)
def test_lora_elsewhere_is_refused_and_says_what_the_base_has(
    make_folder: MakeFolder, module: str, reason: str
) -> None:
    tensors = usual() | pairs(**{module: (HIDDEN, HIDDEN)})
    with pytest.raises(AdapterInvalid, match=r"up_proj, down_proj .*head\.dense") as caught:
        inspect(make_folder(tensors), SPEC)
    assert caught.value.reason == reason and "gate_proj" not in caught.value.message
