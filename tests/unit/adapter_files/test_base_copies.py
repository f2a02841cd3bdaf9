"""Copies of the base's weights beside an adapter: equal ones say nothing, others are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.adapters import base_copies
from engine.adapters.peft import inspect
from engine.errors import AdapterInvalid
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]

Q = "model.layers.0.self_attn.q_proj"
P = "base_model.model."


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tied base in bf16 with a bias on q_proj."""
    torch.manual_seed(4)
    folder = tmp_path / "base"
    folder.mkdir()
    held = {
        "model.embed_tokens.weight": torch.randn(128, 64),
        f"{Q}.weight": torch.randn(64, 64),
        f"{Q}.bias": torch.randn(64),
    }
    save_file({name: t.bfloat16() for name, t in held.items()}, folder / "model.safetensors")
    return folder


def weights(base: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(base / "model.safetensors")


COPIES = {
    "embedding": ("model.embed_tokens.base_layer.weight", "model.embed_tokens.weight"),
    "tied head": ("lm_head.base_layer.weight", "model.embed_tokens.weight"),
    "saved head": ("lm_head.weight", "model.embed_tokens.weight"),
    "untrained module to save": ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    "target": (f"{Q}.base_layer.weight", f"{Q}.weight"),
    "bias": (f"{Q}.base_layer.bias", f"{Q}.bias"),
    "multimodal": (
        "model.language_model.embed_tokens.base_layer.weight",
        "model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "source"), COPIES.values(), ids=COPIES.keys())
def test_a_copy_that_equals_the_base_is_ignored_and_any_other_refused(
    name: str,
    source: str,
    dtype: torch.dtype,
    make_folder: MakeFolder,
    pair: MakePair,
    spec: ModelSpec,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base_copies, "CHUNK_BYTES", 1000)  # the last chunk is a part of one
    copy = weights(base)[source].to(dtype)
    folder = make_folder(pair(Q) | {P + name: copy})
    assert [m.module for m in inspect(folder, spec, base=base).modules] == ["q_proj"]
    with pytest.raises(AdapterInvalid):
        inspect(folder, spec)
    copy.view(-1)[-1] += 1
    with pytest.raises(AdapterInvalid) as caught:
        inspect(make_folder(pair(Q) | {P + name: copy}), spec, base=base)
    assert caught.value.reason in ("E_BASE_COPY", "E_MODULES_TO_SAVE", "E_BIAS")
    assert name in caught.value.message


def test_a_saved_module_that_equals_the_base_is_told_from_one_that_is_not_there(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, base: Path
) -> None:
    copy = {f"{P}lm_head.weight": weights(base)["model.embed_tokens.weight"]}
    saved = ["lm_head", "score"]
    folder = make_folder(pair(Q) | copy, modules_to_save=saved)
    assert [w for w in inspect(folder, spec, base=base).warnings if "modules_to_save" in w] == [
        "modules_to_save lists lm_head: its weights are equal to the base's, ignored",
        "modules_to_save lists score, but the file holds no such weights",
    ]
    copy = {f"{P}lm_head.base_layer.weight": weights(base)["model.embed_tokens.weight"]}
    folder = make_folder(pair(Q) | copy, modules_to_save=["lm_head"])
    assert [w for w in inspect(folder, spec, base=base).warnings if "modules_to_save" in w] == [
        "modules_to_save lists lm_head, but the file holds no such weights",
    ]


def test_a_copy_of_a_larger_vocabulary_is_refused(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, base: Path
) -> None:
    copy = torch.cat((weights(base)["model.embed_tokens.weight"], torch.zeros(2, 64).bfloat16()))
    for name in ("base_layer.weight", "weight"):
        folder = make_folder(pair(Q) | {f"{P}model.embed_tokens.{name}": copy})
        with pytest.raises(AdapterInvalid) as caught:
            inspect(folder, spec, base=base)
        assert caught.value.reason == "E_VOCAB_RESIZED" and "130" in caught.value.message


def test_an_adapter_without_copies_does_not_need_the_base(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, tmp_path: Path
) -> None:
    assert inspect(make_folder(pair(Q)), spec, base=tmp_path / "nowhere").modules
