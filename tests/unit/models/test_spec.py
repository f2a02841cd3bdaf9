"""config.json in both dialects → ModelSpec, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, ModelUnsupported
from engine.models.families import SUPPORTED
from engine.models.rope import RopeSpec
from engine.models.spec import read_spec

Folder = Callable[..., Path]


def test_a_plain_llama_is_read_with_its_sizes_and_without_biases(folder: Folder) -> None:
    spec = read_spec(folder())
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (64, 4, 8, 2)
    assert (spec.head_dim, spec.ffn_size, spec.vocab_size, spec.max_position) == (8, 128, 1000, 256)
    assert (spec.dtype, spec.rms_eps, spec.tied) == ("bfloat16", 1e-5, False)
    assert not (spec.qkv_bias or spec.o_bias or spec.mlp_bias or spec.qk_norm)
    assert spec.sliding_windows == ()
    assert spec.rope == RopeSpec(theta=10000.0)


def test_reading_a_spec_imports_no_torch() -> None:
    code = "import sys, engine.models.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------ heads
def test_an_explicit_head_dim_wins_over_hidden_by_heads(folder: Folder) -> None:
    assert read_spec(folder(head_dim=32)).head_dim == 32


def test_a_null_head_dim_is_hidden_by_heads(folder: Folder) -> None:
    assert read_spec(folder(head_dim=None)).head_dim == 8


def test_qwen3_without_a_head_dim_has_128(folder: Folder) -> None:
    assert read_spec(folder(model_type="qwen3")).head_dim == 128
    assert read_spec(folder(model_type="qwen3", head_dim=None)).head_dim == 8


def test_null_and_absent_kv_heads_of_llama_are_its_heads(folder: Folder) -> None:
    assert read_spec(folder(num_key_value_heads=None)).num_kv_heads == 8
    assert read_spec(folder(num_key_value_heads=...)).num_kv_heads == 8


def test_absent_kv_heads_of_another_family_are_not_guessed(folder: Folder) -> None:
    with pytest.raises(ModelUnsupported, match="num_key_value_heads"):
        read_spec(folder(model_type="mistral", num_key_value_heads=...))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("hidden_size", 65),
        ("hidden_size", "64"),
        ("vocab_size", 0),
        ("vocab_size", ...),
        ("num_hidden_layers", True),
        ("rms_norm_eps", "small"),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_size_that_cannot_be_is_refused(folder: Folder, field: str, value: Any) -> None:
    with pytest.raises(ModelUnsupported, match="num_attention_heads|" + field):
        read_spec(folder(**{field: value}))


# ------------------------------------------------------------------ biases and norms
def test_llama_flags_decide_its_biases(folder: Folder) -> None:
    spec = read_spec(folder(attention_bias=True, mlp_bias=True))
    assert spec.qkv_bias and spec.o_bias and spec.mlp_bias


def test_qwen2_has_qkv_biases_without_a_flag_and_none_on_o(folder: Folder) -> None:
    spec = read_spec(folder(model_type="qwen2"))
    assert spec.qkv_bias and not spec.o_bias and not spec.qk_norm


def test_qwen3_has_a_norm_per_head_and_biases_by_flag(folder: Folder) -> None:
    spec = read_spec(folder(model_type="qwen3"))
    assert spec.qk_norm and not spec.qkv_bias
    assert read_spec(folder(model_type="qwen3", attention_bias=True)).o_bias


def test_an_attention_bias_that_mistral_does_not_have_is_refused(folder: Folder) -> None:
    with pytest.raises(ModelUnsupported, match="attention_bias"):
        read_spec(folder(model_type="mistral", attention_bias=True))


# ------------------------------------------------------------------ windows
def test_mistral_windows_all_layers_and_null_is_none(folder: Folder) -> None:
    assert read_spec(folder(model_type="mistral", sliding_window=64)).sliding_windows == (64,) * 4
    assert read_spec(folder(model_type="mistral", sliding_window=None)).sliding_windows == ()
    absent = folder(model_type="mistral", max_position_embeddings=8192)
    assert read_spec(absent).sliding_windows == (4096,) * 4


def test_a_window_of_all_positions_is_none(folder: Folder) -> None:
    for size, windows in ((255, (255,) * 4), (256, ()), (262144, ())):
        where = folder(model_type="mistral", sliding_window=size)
        assert read_spec(where).sliding_windows == windows


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_qwen_window_counts_only_if_in_use_and_from_max_window_layers(
    folder: Folder, family: str
) -> None:
    idle = folder(model_type=family, sliding_window=64, max_window_layers=1)
    assert read_spec(idle).sliding_windows == ()
    used = folder(
        model_type=family, sliding_window=64, max_window_layers=3, use_sliding_window=True
    )
    assert read_spec(used).sliding_windows == (0, 0, 0, 64)
    whole = folder(model_type=family, sliding_window=64, use_sliding_window=True)
    assert read_spec(whole).sliding_windows == ()


def test_layer_types_win_over_max_window_layers(folder: Folder) -> None:
    spec = read_spec(
        folder(
            model_type="qwen2",
            sliding_window=64,
            use_sliding_window=True,
            max_window_layers=3,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    )
    assert spec.sliding_windows == (64, 0, 64, 0)


@pytest.mark.parametrize(
    "kinds",
    [
        ["full_attention"],
        ["full_attention"] * 3 + ["chunked_attention"],
        ["sliding_attention"] * 4,
        "full_attention",
    ],
)
def test_layer_types_that_cannot_be_computed_are_refused(folder: Folder, kinds: Any) -> None:
    with pytest.raises(ModelUnsupported, match="layer_types"):
        read_spec(folder(layer_types=kinds))


def test_layer_types_that_contradict_mistrals_one_window_are_refused(folder: Folder) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(ModelUnsupported, match="contradicts"):
        read_spec(folder(model_type="mistral", sliding_window=64, layer_types=kinds))


# ------------------------------------------------------------------ layers without rotation
def test_every_fourth_layer_of_smollm3_is_not_rotated(folder: Folder) -> None:
    spec = read_spec(folder(model_type="smollm3"))
    rope = RopeSpec(theta=2e6)
    assert spec.rope == rope and spec.layer_ropes == (rope, rope, rope, None)
    assert spec.tied and spec.sliding_windows == () and not (spec.qkv_bias or spec.mlp_bias)


def test_a_list_of_rotated_layers_wins_over_the_interval(folder: Folder) -> None:
    spec = read_spec(
        folder(
            model_type="smollm3",
            no_rope_layers=[0, 1, 1, 0, 1],
            no_rope_layer_interval=2,
            rope_theta=5e6,
            tie_word_embeddings=False,
        )
    )
    assert [rope is not None for rope in spec.layer_ropes] == [False, True, True, False]
    assert spec.rope.theta == 5e6 and not spec.tied
    whole = read_spec(folder(model_type="smollm3", no_rope_layers=[1] * 4))
    assert whole.layer_ropes == ()


@pytest.mark.parametrize("rotated", [[1, 0], [1, 0, 2, 1], "1011", []])
def test_a_list_of_rotated_layers_must_fit(folder: Folder, rotated: Any) -> None:
    with pytest.raises(ModelUnsupported, match="no_rope_layers"):
        read_spec(folder(model_type="smollm3", no_rope_layers=rotated))


def test_a_window_of_smollm3_lies_on_the_layers_without_rotation(folder: Folder) -> None:
    used = {"sliding_window": 64, "use_sliding_window": True, "no_rope_layer_interval": 2}
    spec = read_spec(folder(model_type="smollm3", max_window_layers=28, **used))
    assert spec.sliding_windows == (0, 64, 0, 64)
    kinds = ["sliding_attention"] + ["full_attention"] * 3
    spec = read_spec(folder(model_type="smollm3", layer_types=kinds, **used))
    assert spec.sliding_windows == (64, 0, 0, 0)
    idle = read_spec(folder(model_type="smollm3", sliding_window=64))
    assert idle.sliding_windows == ()


# ------------------------------------------------------------------ rotary embedding
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False, "mscale": 0.7}


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("default", {}), ("linear", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN)],
)
def test_both_dialects_of_a_rope_mean_the_same(
    folder: Folder, kind: str, numbers: dict[str, Any]
) -> None:
    new = {"rope_theta": 5e5, "rope_type": kind, **numbers}
    spec = read_spec(folder(rope_parameters=new))
    old = read_spec(folder(rope_theta=5e5, rope_scaling={"type": kind, **numbers}))
    middle = read_spec(folder(rope_theta=5e5, rope_scaling={"rope_type": kind, **numbers}))
    assert spec == old == middle
    assert (spec.rope.kind, spec.rope.theta) == (kind, 5e5)
    assert spec.rope.factor == numbers.get("factor", 1.0)


def test_null_rope_scaling_is_the_default_kind(folder: Folder) -> None:
    assert read_spec(folder(rope_theta=1e6, rope_scaling=None)).rope == RopeSpec(theta=1e6)


def test_rope_scaling_wins_and_theta_inside_wins_over_the_top_one(folder: Folder) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4}
    ours = {"rope_type": "default", "rope_theta": 7e4}
    spec = read_spec(folder(rope_theta=1e4, rope_scaling=scaling, rope_parameters=ours))
    assert spec.rope == RopeSpec(theta=7e4, kind="linear", factor=2.0)


def test_two_thetas_that_disagree_are_refused(folder: Folder) -> None:
    scaling, ours = {"rope_type": "linear", "factor": 2.0}, {"rope_theta": 7e4}
    with pytest.raises(ModelUnsupported, match="contradicts"):
        read_spec(folder(rope_scaling=scaling, rope_parameters=ours))


def test_an_original_length_at_the_top_wins_and_absent_is_the_models_own(folder: Folder) -> None:
    top = read_spec(
        folder(rope_scaling={"type": "yarn"} | YARN, original_max_position_embeddings=128)
    )
    assert top.rope.original_max_position == 128
    absent = read_spec(folder(rope_scaling={"type": "yarn", "factor": 4.0}))
    assert absent.rope.original_max_position == 256


def test_yarn_reaches_as_far_as_it_stretches(folder: Folder) -> None:
    assert read_spec(folder(rope_scaling={"type": "yarn", "factor": 4.0})).max_position == 1024


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "su"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "default", "factor": 4.0}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "layer kind"),
        ({"rope_scaling": ["linear"]}, "rope_scaling"),
    ],
)
def test_a_rope_that_is_not_computed_exactly_is_refused_by_name(
    folder: Folder, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        read_spec(folder(**changes))


def test_an_unknown_rope_lists_the_kinds_that_work(folder: Folder) -> None:
    with pytest.raises(ModelUnsupported) as caught:
        read_spec(folder(rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert "llama3, yarn" in caught.value.hint


# ------------------------------------------------------------------ end tokens, dtype
def test_end_tokens_are_the_union_of_both_files(folder: Folder) -> None:
    spec = read_spec(folder({"eos_token_id": [8, 9, 7]}, eos_token_id=7, bos_token_id=1))
    assert spec.eos_token_ids == (8, 9, 7)
    assert spec.bos_token_id == 1


def test_end_tokens_may_be_one_a_list_or_none(folder: Folder) -> None:
    assert read_spec(folder(eos_token_id=[3, 4])).eos_token_ids == (3, 4)
    assert read_spec(folder(eos_token_id=None)).eos_token_ids == ()
    assert read_spec(folder({"eos_token_id": 5})).eos_token_ids == (5,)


def test_dtype_is_read_in_both_dialects(folder: Folder) -> None:
    assert read_spec(folder(torch_dtype=..., dtype="float16")).dtype == "float16"
    assert read_spec(folder(torch_dtype="torch.float32")).dtype == "float32"


def test_without_a_dtype_the_tensors_own_is_taken(folder: Folder) -> None:
    where = folder(torch_dtype=...)
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "BF16"}, "a": {"dtype": "F32"}})
    where.joinpath("model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode()
    )
    assert read_spec(where).dtype == "bfloat16"


@pytest.mark.parametrize(
    "content", [b"", b"\x05\0\0\0\0\0\0\0[1,2]", b"\xff" * 40, b"\2" + b"\0" * 7 + b"{}"]
)
def test_a_broken_weights_header_is_an_error_with_the_files_name(
    folder: Folder, content: bytes
) -> None:
    where = folder(torch_dtype=...)
    where.joinpath("model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        read_spec(where)


def test_a_float8_checkpoint_is_refused_by_its_dtype(folder: Folder) -> None:
    with pytest.raises(ModelUnsupported, match="float8_e4m3fn"):
        read_spec(folder(torch_dtype="float8_e4m3fn"))


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("gemma", "GemmaForCausalLM"),
        ("gemma2", "Gemma2Model"),
        ("gemma3_text", "Gemma3TextModel"),
        ("mixtral", "MixtralForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("llava", "LlavaForConditionalGeneration"),
        ("llama", "LlamaForSequenceClassification"),
        ("qwen3", "Qwen3Model"),
        (None, "Unheard"),
        (["llama"], "Unheard"),
    ],
)
def test_another_architecture_is_refused_by_name_with_what_works(
    folder: Folder, family: str | None, architecture: str
) -> None:
    with pytest.raises(ModelUnsupported, match=architecture) as caught:
        read_spec(folder(model_type=family, architectures=[architecture]))
    assert caught.value.hint == SUPPORTED


def test_more_than_one_architecture_is_refused_by_their_names(folder: Folder) -> None:
    both = ["LlamaForCausalLM", "Other"]
    with pytest.raises(ModelUnsupported, match=r"LlamaForCausalLM.*Other"):
        read_spec(folder(architectures=both))


def test_a_quantized_base_is_refused_with_its_method(folder: Folder) -> None:
    with pytest.raises(ModelUnsupported, match="awq"):
        read_spec(folder(quantization_config={"quant_method": "awq", "bits": 4}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("embedding_multiplier", 12.0),
        ("num_local_experts", 8),
        ("no_rope_layers", [1, 0]),
        ("rope_interleaved", True),
        ("use_mrope", True),
        ("sliding_window", 64),
        ("auto_map", {"AutoModel": "own.Model"}),
    ],
)
def test_an_unknown_field_away_from_its_neutral_value_is_refused(
    folder: Folder, field: str, value: Any
) -> None:
    with pytest.raises(ModelUnsupported, match=field):
        read_spec(folder(**{field: value}))


def test_unknown_fields_at_their_neutral_values_are_ignored(folder: Folder) -> None:
    neutral = {
        "attn_logit_softcapping": None,
        "embedding_multiplier": 1.0,
        "rope_interleaved": False,
        "use_mrope": False,
        "is_llama_config": True,
        "transformers.js_config": {"dtype": "q4"},
        "_name_or_path": "somewhere",
        "attention_dropout": 0.1,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "factor": 1.0},
    }
    assert read_spec(folder(**neutral)) == read_spec(folder())


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_an_error_of_one_line(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read_spec(tmp_path)
    assert "\n" not in caught.value.message


def test_a_folder_without_a_config_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json") as caught:
        read_spec(tmp_path)
    assert "Hugging Face" in caught.value.hint
