"""Activated LoRAs: their tokens reach the manifest, the packed manifest and the revision."""

from collections.abc import Callable
from pathlib import Path

import torch

from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect, revision_digest
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]
Q = "model.layers.0.self_attn.q_proj"


def test_its_tokens_are_in_both_manifests_and_another_revision(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors, revs = pair(Q), set()
    layout = spec.block_layout(block_size=16, dtype="float32")
    for given, found in ((None, ()), ([5, 6], (5, 6)), ([6, 5], (6, 5)), ([5], (5,))):
        folder = make_folder(tensors, alora_invocation_tokens=given)
        manifest = inspect(folder, spec)
        rev = revision_digest(folder, manifest)
        packed = pack_folder(folder, manifest, layout, tmp_path, rev)
        assert manifest.alora_tokens == packed.alora_tokens == found
        revs.add(rev)
    assert len(revs) == 4


def test_a_plain_adapter_keeps_the_revision_that_it_had_before_there_were_activated_ones(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    manifest = inspect(make_folder(pair(Q), alora_invocation_tokens=None), spec)
    assert "alora_invocation_tokens" not in manifest.semantic
