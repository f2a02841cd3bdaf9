"""The ways in which tools write tensor names: all of these are the same adapter."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.adapters.peft import inspect
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj"

LAYOUTS: dict[str, Callable[[str], str]] = {
    "as PEFT saves it": lambda key: key,
    "AutoModel": lambda key: key.replace("model.model.model.", "model.model."),
    "no prefix": lambda key: key.removeprefix("base_model.model."),
    "no prefix, no head": lambda key: key.removeprefix("base_model.model.model."),
    "adapter name left in": lambda key: key.replace(".weight", ".default.weight"),
    "adapter named like a marker": lambda key: key.replace(".weight", ".lora.weight"),
    "doubled prefix": lambda key: "base_model.model." + key,
    "DDP": lambda key: "module." + key,
    "compiled": lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."),
    "FSDP": lambda key: key.replace("layers.", "_fsdp_wrapped_module.layers."),
    "wrapped everywhere": lambda key: "module._orig_mod." + key.replace(".lora", ".module.lora"),
    "multimodal": lambda key: key.replace("model.layers", "model.language_model.layers"),
    "older multimodal": lambda key: key.replace("model.layers", "language_model.model.layers"),
    "text model": lambda key: key.replace("model.layers", "model.text_model.layers"),
}


@pytest.mark.parametrize("rename", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_of_names_gives_the_same_modules(
    rename: Callable[[str], str], make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    tensors = pair(Q) | pair(UP)
    plain = inspect(make_folder(tensors), spec)
    renamed = inspect(make_folder({rename(key): t for key, t in tensors.items()}), spec)
    assert renamed.modules == plain.modules
    assert [[ref.shape for ref in held.every] for held in renamed.tensors] == [
        [ref.shape for ref in held.every] for held in plain.tensors
    ]


@pytest.mark.parametrize("name", ["lm_head", "model.lm_head", "model.unembed_tokens"])
def test_the_output_head_is_known_by_each_of_its_names(
    name: str, make_folder: MakeFolder, spec: ModelSpec
) -> None:
    head = f"base_model.model.{name}"
    tensors = {
        f"{head}.lora_A.weight": torch.ones(4, spec.hidden_size),
        f"{head}.lora_B.weight": torch.ones(spec.vocab_size, 4),
    }
    (module,) = inspect(make_folder(tensors, target_modules="all-linear"), spec).modules
    assert (module.module, module.layer, module.rank) == ("lm_head", spec.num_layers, 4)


def test_modules_come_in_stream_order_whatever_the_files_order(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    paths = [f"model.layers.{n}.self_attn.{m}_proj" for n in (2, 0) for m in "ovqk"]
    tensors = {key: t for path in paths for key, t in pair(path).items()}
    modules = inspect(make_folder(tensors), spec).modules
    assert [(m.layer, m.module) for m in modules] == [
        (layer, f"{m}_proj") for layer in (0, 2) for m in "qkvo"
    ]


def test_patterns_are_matched_against_the_name_in_the_trained_model(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    path = "model.language_model.layers.0.self_attn.q_proj"
    pattern = {r"^model\.language_model\.layers\.0\..*": 2}
    manifest = inspect(make_folder(pair(path), alpha_pattern=pattern), spec)
    assert manifest.modules[0].scaling == 0.5


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "rope_freqs.weight"])
def test_buffers_of_old_checkpoints_are_ignored(
    name: str, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    tensors = pair(Q) | {f"base_model.model.model.{name}": torch.ones(8)}
    assert len(inspect(make_folder(tensors), spec).modules) == 1


def test_layers_and_modules_without_tensors_are_legal(
    make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    manifest = inspect(make_folder(pair(UP), target_modules=["up_proj"]), spec)
    assert [(m.layer, m.module) for m in manifest.modules] == [(2, "up_proj")]
    assert manifest.warnings == ()


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("model.layers.2.self_attn.q_proj", False),
        ("model.layers.2.self_attn.o_proj", False),
        ("model.layers.2.mlp.down_proj", False),
        ("model.layers.2.self_attn.k_proj", True),
        ("model.layers.2.self_attn.v_proj", True),
        ("model.layers.1.mlp.down_proj", True),
        ("model.layers.0.self_attn.q_proj", True),
    ],
)
def test_only_the_last_layers_q_o_and_mlp_leave_kv_as_it_is(
    path: str, changes: bool, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    assert inspect(make_folder(pair(path)), spec).changes_kv is changes


class TestWarnings:
    def test_a_listed_target_without_any_tensor_is_named(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
    ) -> None:
        folder = make_folder(pair(Q), target_modules=["q_proj", "k_proj", "self_attn.v_proj"])
        (warning,) = inspect(folder, spec).warnings
        assert "k_proj, self_attn.v_proj" in warning
        assert "q_proj" not in warning

    def test_all_linear_names_the_absent_modules(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
    ) -> None:
        (warning,) = inspect(make_folder(pair(Q), target_modules="all-linear"), spec).warnings
        assert "down_proj" in warning or "and 1 more" in warning

    def test_a_regex_that_matches_nothing_is_noticed(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
    ) -> None:
        # fullmatch, as PEFT does it: a mere search would find this one
        (warning,) = inspect(make_folder(pair(Q), target_modules="q_proj"), spec).warnings
        assert "matches no module" in warning
        assert inspect(make_folder(pair(Q), target_modules=r".*\.q_proj"), spec).warnings == ()

    def test_a_regex_that_cannot_be_matched_safely_is_only_a_warning(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
    ) -> None:
        (warning,) = inspect(make_folder(pair(Q), target_modules=r"(?!x).*q_proj"), spec).warnings
        assert "not compared" in warning

    def test_an_untrained_adapter_changes_nothing(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
    ) -> None:
        tensors = {
            key: torch.zeros_like(t) - 0.0 if "lora_B" in key else t
            for key, t in (pair(Q) | pair(UP)).items()
        }
        (warning,) = inspect(make_folder(tensors), spec).warnings
        assert "changes nothing" in warning
        tensors[next(key for key in tensors if "lora_B" in key)][-1, -1] = 1e-30
        assert inspect(make_folder(tensors), spec).warnings == ()

    def test_an_absent_r_is_taken_from_the_tensors_and_said(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
    ) -> None:
        manifest = inspect(make_folder(pair(Q, 2), r=...), spec)
        assert manifest.modules[0].scaling == 4.0
        assert re.search(r"no r: rank 2", manifest.warnings[0])

    def test_modules_to_save_without_weights_loads(
        self, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
    ) -> None:
        (warning,) = inspect(make_folder(pair(Q), modules_to_save=["lm_head"]), spec).warnings
        assert "lm_head" in warning


HARMLESS = {
    "lora_dropout": 0.05,
    "fan_in_fan_out": True,
    "bias": "all",
    "init_lora_weights": "gaussian",
    "task_type": "SEQ_2_SEQ_LM",
    "base_model_name_or_path": "/etc/passwd",
    "rank_pattern": None,
    "qalora_group_size": 16,
    "megatron_core": "megatron.core",
    "loftq_config": {},
    "layers_to_transform": [0],
    "trainable_token_indices": None,
    "a_field_of_tomorrow": None,
    "another": {},
    "and_another": False,
    "auto_mapping": {"unsloth_fixed": True},
    "velora_config": {"groups": 2},
    "enable_lora": None,
    "merge_weights": False,
}


@pytest.mark.parametrize("field", HARMLESS)
def test_fields_without_effect_change_neither_the_manifest_nor_the_revision(
    field: str, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    plain = inspect(make_folder(pair(Q)), spec)
    assert inspect(make_folder(pair(Q), **{field: HARMLESS[field]}), spec) == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_three_float_dtypes_are_read(
    dtype: torch.dtype, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    manifest = inspect(make_folder(pair(Q, dtype=dtype)), spec)
    assert manifest.dtype == str(dtype).removeprefix("torch.")
    mixed = {k: t.float() if "lora_B" in k else t for k, t in pair(Q, dtype=torch.bfloat16).items()}
    assert inspect(make_folder(mixed), spec).dtype == "mixed"
