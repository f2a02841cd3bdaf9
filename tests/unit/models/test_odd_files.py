"""Model folders whose JSON nobody would write: each is refused in one line, by name."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, ModelUnsupported
from engine.models.base_files import base_id
from engine.models.hf_config import weight_files, weights_dtype
from engine.models.spec import read_spec

Folder = Callable[..., Path]
HUGE = 10**400
TENSOR = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


def _longrope(**changes: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    return {"rope_type": "longrope", **factors, **changes}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_hidden_layers", {"num_hidden_layers": 1 << 40}),
        ("vocab_size", {"vocab_size": HUGE}),
        ("max_position_embeddings", {"max_position_embeddings": 1e300}),
        ("rms_norm_eps", {"rms_norm_eps": HUGE}),
        ("rms_norm_eps", {"rms_norm_eps": float("inf")}),
        ("rope_theta", {"rope_theta": 1e-308}),
        ("rope_theta", {"rope_theta": float("nan")}),
        ("layer_types", {"model_type": "qwen2", "layer_types": [[1]] * 4}),
        ("layer_types", {"model_type": "gemma2", "layer_types": [{}] * 4, "sliding_window": 8}),
        ("no_rope_layers", {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, []]}),
        ("max_window_layers", {"model_type": "qwen2", "max_window_layers": [1]}),
        ("max_window_layers", {"model_type": "qwen3", "max_window_layers": "2"}),
        ("rope_parameters", {"rope_scaling": {"rope_type": "default"}, "rope_parameters": 2}),
        ("factor", {"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}),
        ("factor", {"rope_scaling": {"rope_type": "yarn", "factor": 1e30}}),
        ("rope_theta", {"rope_scaling": {"rope_type": "yarn", "factor": 4, "rope_theta": 1.0}}),
        (
            "low_freq_factor",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
        ),
        (
            "short_factor",
            {"model_type": "phi3", "rope_scaling": _longrope(short_factor=[1.0, 1.0, 1.0, HUGE])},
        ),
        (
            "original_max_position_embeddings",
            {
                "model_type": "phi3",
                "rope_scaling": _longrope(),
                "original_max_position_embeddings": 1,
            },
        ),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_its_fields_name(
    folder: Folder, field: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelUnsupported, match=field) as refused:
        read_spec(folder(**changes))
    assert len(str(refused.value)) < 300


def test_a_models_name_of_any_length_makes_a_short_refusal(folder: Folder) -> None:
    for changes in ({"model_type": "x" * 9999}, {"architectures": ["y" * 9999]}):
        with pytest.raises(ModelUnsupported) as refused:
            read_spec(folder(**changes))
        assert len(str(refused.value)) < 400


def test_a_config_nested_without_end_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [["a"], "a", 3, {"a": ["b"]}, {"a": "b" * 5000}, {"a": "\0"}, {"a": "."}]
)
def test_an_index_of_another_shape_is_refused_with_its_name(
    tmp_path: Path, weight_map: Any
) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"index\.json"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": TENSOR | {"data_offsets": [64, 0]}},
        {"a": TENSOR | {"data_offsets": [-100, 64]}},
        {"a": TENSOR | {"data_offsets": [0, HUGE]}},
        {"a": TENSOR | {"data_offsets": [0.0, 64.0]}},
        {"a": TENSOR | {"shape": [4, 400]}},
        {"a": TENSOR | {"shape": [[4], 4]}},
        "[" * 100_000,
    ],
    ids=range(9),
)
def test_a_header_that_does_not_fit_its_file_is_an_error_with_the_files_name(
    tmp_path: Path, header: Any
) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    data = struct.pack("<Q", len(text)) + text.encode() + bytes(64)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.safetensors has no readable safetensors header"):
        base_id(tmp_path)


def test_a_dtype_is_not_looked_for_in_a_header_nested_without_end(tmp_path: Path) -> None:
    data = struct.pack("<Q", 100_000) + b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"no readable safetensors header"):
        weights_dtype(tmp_path)
