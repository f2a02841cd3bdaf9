"""A revision is its content: one whatever the file around it, another with any bit that acts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.adapters.peft import inspect, revision_digest
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]
Q = "model.layers.0.self_attn.q_proj"
A = f"base_model.model.{Q}.lora_A.weight"


@pytest.fixture
def rev(spec: ModelSpec) -> Callable[[Path], str]:
    return lambda folder: revision_digest(folder, inspect(folder, spec))


@pytest.fixture
def tensors(pair: MakePair) -> dict[str, torch.Tensor]:
    return pair(Q)


def test_paths_names_and_metadata_are_not_content(
    rev: Callable[[Path], str], make_folder: MakeFolder, tensors: dict[str, torch.Tensor]
) -> None:
    plain = rev(make_folder(tensors))
    other = make_folder(tensors, base_model_name_or_path="x/y", lora_dropout=0.1, peft_version="9")
    save_file(tensors, other / "adapter_model.safetensors", metadata={"format": "pt"})
    (other / "README.md").write_text("hello")
    assert rev(other) == plain
    assert rev(make_folder(tensors, lora_alpha=8.0)) == plain


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"k_proj": 1}},
        {"rank_pattern": {"q_proj": 4}},
    ],
    ids=str,
)
def test_a_change_of_the_arithmetic_is_another_revision(
    change: dict[str, object],
    rev: Callable[[Path], str],
    make_folder: MakeFolder,
    tensors: dict[str, torch.Tensor],
) -> None:
    assert rev(make_folder(tensors, **change)) != rev(make_folder(tensors))


def test_the_order_of_patterns_is_content(
    rev: Callable[[Path], str], make_folder: MakeFolder, tensors: dict[str, torch.Tensor]
) -> None:
    one = rev(make_folder(tensors, alpha_pattern={"q_proj": 1, "layers.0.self_attn.q_proj": 2}))
    two = rev(make_folder(tensors, alpha_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 1}))
    assert one != two


def test_one_bit_of_one_tensor_is_another_revision(
    rev: Callable[[Path], str], make_folder: MakeFolder, tensors: dict[str, torch.Tensor]
) -> None:
    plain = rev(make_folder(tensors))
    changed = {key: t.clone() for key, t in tensors.items()}
    changed[A].view(torch.int32)[0, 0] ^= 1
    assert rev(make_folder(changed)) != plain
    assert rev(make_folder({key: t.bfloat16() for key, t in tensors.items()})) != plain


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "chat_template.json", "tokenizer.json", "added_tokens.json"]
)
def test_text_files_that_lorad_reads_are_content(
    name: str,
    rev: Callable[[Path], str],
    make_folder: MakeFolder,
    tensors: dict[str, torch.Tensor],
) -> None:
    empty = {"tokenizer.json": {"model": {"vocab": {}}}, "added_tokens.json": {}}
    folder = make_folder(tensors)
    plain = rev(folder)
    (folder / name).write_text(json.dumps(empty.get(name, "x")))
    once = rev(folder)
    (folder / name).write_text(json.dumps(empty.get(name, "y")) + "\n")
    assert len({plain, once, rev(folder)}) == 3


def test_the_digest_is_as_documented(
    rev: Callable[[Path], str], make_folder: MakeFolder, tensors: dict[str, torch.Tensor]
) -> None:
    """Stored revisions must keep their digest, so its definition is written out here once more."""
    import hashlib

    folder = make_folder(tensors)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    semantic = (
        '{"alpha_pattern":[],"lora_alpha":8.0,"peft_type":"LORA","r":4,"rank_pattern":[],'
        '"use_rslora":false}\n'
    )
    digest = hashlib.sha256(semantic.encode())
    for name in sorted(tensors):
        shape = ",".join(str(n) for n in tensors[name].shape)
        digest.update(f'["{name}","F32",[{shape}]]\n'.encode())
        digest.update(tensors[name].numpy().tobytes())
    digest.update(b'["chat_template.jinja",14]\n{{ messages }}')
    assert rev(folder) == digest.hexdigest()
