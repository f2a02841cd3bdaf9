"""Gemma's config.json in both dialects, alone and within a multimodal model's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelUnsupported
from engine.models.rope import RopeSpec
from engine.models.spec import read_spec

Folder = Callable[..., Path]


@pytest.mark.parametrize(("family", "pattern"), [("gemma2", 2), ("gemma3_text", 6)])
def test_gemmas_windows_alternate_and_the_last_of_a_pattern_is_full(
    folder: Folder, family: str, pattern: int
) -> None:
    spec = read_spec(folder(model_type=family, num_hidden_layers=13, sliding_window=64))
    expected = tuple(0 if (layer + 1) % pattern == 0 else 64 for layer in range(13))
    assert spec.sliding_windows == expected
    absent = folder(model_type=family, max_position_embeddings=8192)
    assert read_spec(absent).sliding_windows[0] == 4096
    with pytest.raises(ModelUnsupported, match="sliding_window"):
        read_spec(folder(model_type=family, sliding_window=None))


def test_gemmas_layer_types_win_over_the_pattern(folder: Folder) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    spec = read_spec(
        folder(
            model_type="gemma3_text",
            sliding_window=64,
            sliding_window_pattern=2,
            layer_types=kinds,
        )
    )
    assert spec.sliding_windows == (0, 64, 0, 64)
    assert [rope == spec.rope for rope in spec.layer_ropes] == [True, False, True, False]


# ------------------------------------------------------------------ Gemma
def test_gemma2_caps_scores_and_logits_and_scales_by_its_own_scalar(folder: Folder) -> None:
    spec = read_spec(folder(model_type="gemma2"))
    assert (spec.attention_softcap, spec.logit_softcap, spec.tied) == (50.0, 30.0, True)
    assert (spec.head_dim, spec.attention_scale, spec.embedding_scale) == (256, 1 / 16, 8.0)
    assert spec.norms_add_one and spec.post_norms and not spec.qk_norm
    assert (spec.activation, spec.rope, spec.layer_ropes) == ("gelu", RopeSpec(), ())
    other = read_spec(
        folder(
            model_type="gemma2",
            query_pre_attn_scalar=144,
            head_dim=32,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            tie_word_embeddings=False,
        )
    )
    assert (other.attention_softcap, other.logit_softcap, other.tied) == (0.0, 0.0, False)
    assert (other.head_dim, other.attention_scale) == (32, 1 / 12)


def test_gemma3_norms_its_heads_and_caps_logits_only_if_told(folder: Folder) -> None:
    spec = read_spec(folder(model_type="gemma3_text"))
    assert spec.qk_norm and spec.norms_add_one and spec.post_norms and spec.tied
    assert (spec.attention_softcap, spec.logit_softcap) == (0.0, 0.0)
    capped = read_spec(folder(model_type="gemma3_text", final_logit_softcapping=20.0))
    assert capped.logit_softcap == 20.0


def test_a_cap_on_gemma3s_scores_which_the_published_code_ignores_is_refused(
    folder: Folder,
) -> None:
    with pytest.raises(ModelUnsupported, match="attn_logit_softcapping"):
        read_spec(folder(model_type="gemma3_text", attn_logit_softcapping=50.0))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_gemmas_activation_stands_in_one_field_and_the_other_is_wrong(
    folder: Folder, family: str
) -> None:
    early = folder(model_type=family, hidden_act="gelu", hidden_activation="gelu_pytorch_tanh")
    assert read_spec(early).activation == "gelu"
    with pytest.raises(ModelUnsupported, match="hidden_activation"):
        read_spec(folder(model_type=family, hidden_activation="gelu"))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_attention_in_both_directions_is_refused(folder: Folder, family: str) -> None:
    with pytest.raises(ModelUnsupported, match="use_bidirectional_attention"):
        read_spec(folder(model_type=family, use_bidirectional_attention=True))


NEAR, FAR = RopeSpec(theta=1e3), RopeSpec(theta=1e5, kind="linear", factor=8.0)
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": BY_KIND},
        {
            "rope_theta": 1e5,
            "rope_local_base_freq": 1e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"rope_parameters": BY_KIND | {"full_attention": None}}
        | {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 8.0}},
    ],
)
def test_gemma3_stretches_its_full_layers_only(folder: Folder, changes: dict[str, Any]) -> None:
    spec = read_spec(folder(model_type="gemma3_text", sliding_window_pattern=2, **changes))
    assert spec.rope == FAR and spec.layer_ropes == (NEAR, FAR, NEAR, FAR)


def test_gemma3_has_a_theta_for_each_kind_of_layer(folder: Folder) -> None:
    spec = read_spec(folder(model_type="gemma3_text", num_hidden_layers=6))
    assert spec.layer_ropes == (RopeSpec(theta=1e4),) * 5 + (RopeSpec(theta=1e6),)


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 1e4}, ["linear"], {"full_attention": "linear"}, BY_KIND | {"chunked": {}}],
)
def test_gemma3s_rope_must_have_an_entry_for_each_kind(folder: Folder, rope: Any) -> None:
    with pytest.raises(ModelUnsupported, match="rope_parameters"):
        read_spec(folder(model_type="gemma3_text", rope_parameters=rope))


# ------------------------------------------------------------------ a text model within another
WITHIN: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def within(where: Path, **changes: Any) -> Path:
    (where / "config.json").write_text(json.dumps(WITHIN | changes))
    return where


def test_a_text_model_within_a_multimodal_one_has_its_familys_defaults(tmp_path: Path) -> None:
    spec = read_spec(within(tmp_path))
    assert (spec.model_type, spec.num_layers, spec.hidden_size) == ("gemma3_text", 34, 2560)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.max_position) == (262208, 131072)
    assert (spec.dtype, spec.tied, spec.eos_token_ids) == ("bfloat16", True, (1, 106))
    assert spec.sliding_windows[:6] == (1024,) * 5 + (0,)
    assert spec.rope == RopeSpec(theta=1e6, kind="linear", factor=8.0)
    assert spec.layer_ropes[0] == RopeSpec(theta=1e4)
    assert spec.other_towers == ("vision_tower.", "multi_modal_projector.")


def test_what_the_whole_says_holds_for_its_text_model(tmp_path: Path) -> None:
    text = WITHIN["text_config"] | {"eos_token_id": 7, "dtype": "float16"}
    spec = read_spec(within(tmp_path, text_config=text, tie_word_embeddings=False))
    assert (spec.dtype, spec.tied, spec.eos_token_ids) == ("float16", False, (1, 106, 7))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": {"model_type": "gemma3n_text"}}, "gemma3n_text"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
        ({"audio_config": {"hidden_size": 8}}, "audio_config"),
        (
            {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": False},
            "tie_word_embeddings",
        ),
        ({"architectures": ["Gemma3Model"]}, "Gemma3Model"),
    ],
)
def test_a_whole_that_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        read_spec(within(tmp_path, **changes))
