"""Phi's config.json: longrope in its spellings, partial rotation, what it was published with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelUnsupported
from engine.models.rope import RopeSpec
from engine.models.spec import read_spec

Folder = Callable[..., Path]

SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [1.0, 4.0, 8.0, 16.0]
FACTORS = {"short_factor": SHORT, "long_factor": LONG}
STRETCHED = RopeSpec(
    theta=1e4,
    kind="longrope",
    factor=4.0,
    original_max_position=64,
    short_factors=tuple(SHORT),
    long_factors=tuple(LONG),
)


def test_phi_publishes_fused_modules_and_has_heads_alike_without_a_number(folder: Folder) -> None:
    spec = read_spec(folder(model_type="phi3", num_key_value_heads=..., rms_norm_eps=...))
    assert spec.fused_names and spec.num_kv_heads == 8 and spec.rms_eps == 1e-5
    assert not (spec.qkv_bias or spec.o_bias or spec.tied or spec.sliding_windows)
    windowed = read_spec(folder(model_type="phi3", sliding_window=47))
    assert windowed.sliding_windows == (47,) * 4


@pytest.mark.parametrize("word", ["longrope", "su", "yarn"])
def test_longrope_has_three_spellings_and_its_length_stands_at_the_top(
    folder: Folder, word: str
) -> None:
    where = folder(
        model_type="phi3",
        original_max_position_embeddings=64,
        rope_scaling={"type": word, **FACTORS},
    )
    assert read_spec(where).rope == STRETCHED


def test_longrope_in_the_new_dialect_is_the_same(folder: Folder) -> None:
    new = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        **FACTORS,
    }
    where = folder(model_type="phi3", original_max_position_embeddings=64, rope_parameters=new)
    assert read_spec(where).rope == STRETCHED


def test_only_phi_calls_longrope_yarn(folder: Folder) -> None:
    spec = read_spec(folder(rope_scaling={"type": "yarn", "factor": 4.0}))
    assert spec.rope.kind == "yarn"
    with pytest.raises(ModelUnsupported, match="su"):
        read_spec(folder(rope_scaling={"type": "su", **FACTORS}))


def test_lengths_are_served_up_to_where_the_factors_change_unless_told_otherwise(
    folder: Folder,
) -> None:
    where = folder(
        model_type="phi3",
        original_max_position_embeddings=64,
        rope_scaling={"type": "longrope", **FACTORS},
    )
    assert (read_spec(where).default_length, read_spec(where).max_position) == (64, 256)
    alike = {"type": "longrope", "short_factor": SHORT, "long_factor": SHORT}
    spec = read_spec(
        folder(model_type="phi3", original_max_position_embeddings=64, rope_scaling=alike)
    )
    assert spec.default_length == 256
    assert read_spec(folder()).default_length == 256
    assert read_spec(folder(rope_scaling={"type": "yarn", "factor": 4.0})).default_length == 1024


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"short_factor": SHORT[:3]}, "short_factor"),
        ({"long_factor": [*LONG[:3], 0]}, "long_factor"),
        ({"long_factor": [*LONG[:3], "16"]}, "long_factor"),
        ({"long_factor": None}, "long_factor"),
        ({"long_mscale": 1.2}, "long_mscale"),
    ],
)
def test_factors_that_do_not_fit_are_refused(
    folder: Folder, changes: dict[str, Any], named: str
) -> None:
    scaling = {"type": "longrope", **FACTORS, **changes}
    with pytest.raises(ModelUnsupported, match=named):
        read_spec(folder(model_type="phi3", rope_scaling=scaling))


@pytest.mark.parametrize(
    "where", [{"partial_rotary_factor": 0.75}, {"rope_parameters": {"partial_rotary_factor": 0.75}}]
)
def test_a_share_of_each_head_turns(folder: Folder, where: dict[str, Any]) -> None:
    assert read_spec(folder(model_type="phi3", **where)).rope == RopeSpec(rotated=0.75)


@pytest.mark.parametrize("share", [0, -0.5, 0.1, 1.5, "half"])
def test_a_share_must_be_of_the_head(folder: Folder, share: Any) -> None:
    with pytest.raises(ModelUnsupported, match="partial_rotary_factor"):
        read_spec(folder(model_type="phi3", partial_rotary_factor=share))


@pytest.mark.parametrize("repository", ["", "microsoft/Phi-3.5-mini-instruct--"])
def test_the_code_that_phi_was_first_published_with_is_not_run_and_no_obstacle(
    folder: Folder, repository: str
) -> None:
    code = {
        "AutoConfig": f"{repository}configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": f"{repository}modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    }
    neutral = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
    assert read_spec(folder(model_type="phi3", auto_map=code, **neutral)).fused_names
    with pytest.raises(ModelUnsupported, match="auto_map"):
        read_spec(folder(model_type="llama", auto_map=code))
    with pytest.raises(ModelUnsupported, match="auto_map"):
        read_spec(folder(model_type="phi3", auto_map={"AutoModelForCausalLM": "own.Model"}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("lm_head_bias", True), ("attention_bias", True), ("full_attn_mod", 2), ("mlp_bias", True)],
)
def test_what_phis_published_code_does_not_compute_is_refused(
    folder: Folder, field: str, value: Any
) -> None:
    with pytest.raises(ModelUnsupported, match=field):
        read_spec(folder(model_type="phi3", **{field: value}))
