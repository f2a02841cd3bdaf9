"""From `auto` to values, and what is refused before any weight is read."""

import json
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelUnsupported, NoDevice
from engine.memory.arena import plan_blocks
from engine.models.spec import read_spec
from engine.startup import resolve, tokenizer_size


@pytest.fixture
def spec(model_dir):
    return read_spec(model_dir)


def test_auto_becomes_cpu_and_float32_without_a_card(spec, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = resolve(EngineConfig(model="m"), spec)
    assert (config.device, config.dtype, config.max_batch_tokens) == ("cpu", "float32", 512)
    many = resolve(EngineConfig(model="m", max_num_seqs=600), spec)
    assert many.max_batch_tokens == 600, "each sequence needs a row"


def test_auto_becomes_cuda_and_the_checkpoints_dtype_with_one(spec, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = resolve(EngineConfig(model="m"), spec)
    assert (config.device, config.dtype, config.max_batch_tokens) == ("cuda", spec.dtype, 2048)


def test_an_explicit_cuda_without_a_card_is_no_device(spec, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDevice, match="no CUDA device"):
        resolve(EngineConfig(model="m", device="cuda"), spec)
    assert issubclass(NoDevice, ConfigError)


def test_a_length_beyond_the_models_positions_is_refused(spec) -> None:
    with pytest.raises(ConfigError, match="256 positions"):
        resolve(EngineConfig(model="m", max_model_len=257), spec)


def test_a_length_beyond_the_arena_is_refused_and_auto_shrinks_to_it(start_core) -> None:
    with pytest.raises(ConfigError, match="arena's 64 tokens"):
        start_core(num_blocks=4, max_model_len=100)
    assert start_core(num_blocks=4).core.info.max_model_len == 64
    assert start_core(num_blocks=100).core.info.max_model_len == 256


def test_the_arena_takes_what_there_is_but_never_more_than_could_be_used(spec) -> None:
    layout = spec.block_layout(block_size=16, dtype="float32")
    small = EngineConfig(model="m", max_num_seqs=2, slots=1, max_rank=1, cpu_pool=1 << 30)
    assert plan_blocks(small, layout, spec) <= 2 * 16 + 3
    large = EngineConfig(model="m", cpu_pool=1 << 20)
    assert plan_blocks(large, layout, spec) == (1 << 20) // layout.block_bytes
    assert plan_blocks(large, layout, spec, room=10 * layout.block_bytes + 5) == 10
    with pytest.raises(ConfigError, match="the arena would hold 2 blocks"):
        plan_blocks(large, layout, spec, room=2 * layout.block_bytes)


def test_the_tokenizers_size_is_its_highest_id_and_one(tmp_path: Path) -> None:
    assert tokenizer_size(tmp_path) == 0
    file = tmp_path / "tokenizer.json"
    words = {"model": {"vocab": {"a": 0, "b": 5}}, "added_tokens": [{"id": 9, "content": "<x>"}]}
    file.write_text(json.dumps(words))
    assert tokenizer_size(tmp_path) == 10
    file.write_text(json.dumps({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}))
    assert tokenizer_size(tmp_path) == 2
    file.write_text("{")
    with pytest.raises(ModelUnsupported, match="not a tokenizer file"):
        tokenizer_size(tmp_path)
