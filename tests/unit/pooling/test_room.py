"""How long an input a card has room for, from shapes alone."""

import dataclasses
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.errors import ConfigError
from engine.memory.arena import Arena
from engine.models.bases import BaseSpec, read_base
from engine.pooling.config import PoolingConfig
from engine.pooling.room import (
    graph_bytes,
    ladder_of,
    lora_bytes,
    most_rows,
    row_bytes,
    weight_bytes,
)
from tests.fakes.tiny_bert import write_bert
from tests.fakes.tiny_qwen3 import write_qwen3

GIB = 1 << 30


def llama_8b(spec: BaseSpec) -> BaseSpec:
    """The spec with the sizes of a Llama of 8 billion weights."""
    return dataclasses.replace(
        spec,
        vocab_size=128_256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14_336,
    )


@pytest.fixture
def spec(tmp_path: Path) -> BaseSpec:
    return llama_8b(read_base(write_qwen3(tmp_path / "qwen3"), "pool"))


def config(**told: int) -> PoolingConfig:
    return PoolingConfig(model="m", **told)


def test_weights_are_those_of_the_layers_and_one_embedding(spec: BaseSpec) -> None:
    assert weight_bytes(spec, "bfloat16") == 2 * (32 * 218_103_808 + 128_256 * 4096)


def test_what_is_left_beside_weights_and_adapters_is_for_rows(spec: BaseSpec) -> None:
    small = most_rows(config(), spec, "bfloat16", 24 * GIB)
    roomy = most_rows(config(), spec, "bfloat16", 80 * GIB)
    assert 16_384 < small < 131_072 < roomy
    assert most_rows(config(adapter_pool=4 * GIB), spec, "bfloat16", 24 * GIB) < small
    assert small * row_bytes(spec, "bfloat16") + weight_bytes(spec, "bfloat16") < 0.9 * 24 * GIB


def test_who_asks_for_more_is_refused_with_what_there_is_room_for(spec: BaseSpec) -> None:
    most = most_rows(config(), spec, "bfloat16", 24 * GIB)
    for name in ("max_length", "max_batch_tokens"):
        assert most_rows(config(**{name: most}), spec, "bfloat16", 24 * GIB) == most
        with pytest.raises(ConfigError, match=f"{name} = {most + 1} .* steps of {most} rows"):
            most_rows(config(**{name: most + 1}), spec, "bfloat16", 24 * GIB)
    with pytest.raises(ConfigError, match="leaves no room for a step"):
        most_rows(config(), spec, "bfloat16", 15 * GIB)


@pytest.mark.parametrize("fixed", [False, True])
def test_what_lora_keeps_for_the_largest_step_is_counted_as_it_is_taken(
    tmp_path: Path, spec: BaseSpec, fixed: bool
) -> None:
    bert = read_base(write_bert(tmp_path / "bert"), "pool")
    for base, rows in ((bert, 700), (bert, 3000), (read_base(tmp_path / "qwen3", "pool"), 1500)):
        told = PoolingConfig(model="m", max_rank=40, deterministic=fixed)
        layout = base.block_layout(block_size=0, dtype="float32")
        device = torch.device("cpu")
        arena = Arena(base, layout, block_size=0, num_blocks=2, device=device)
        slots = DeviceSlots(layout, num_slots=2, max_rank=40, device=device)
        limits = {"max_rows": rows, "max_seqs": 8, "max_rank": 40, "deterministic": fixed}
        taken = DevicePlanner(arena, slots, **limits).store.h
        assert lora_bytes(told, base, "float32", rows) == 4 * taken.numel()
    free, told = 24 * GIB, PoolingConfig(model="m", deterministic=fixed)
    most = most_rows(told, spec, "bfloat16", free)
    taken = most * row_bytes(spec, "bfloat16") + lora_bytes(told, spec, "bfloat16", most)
    left = 0.9 * free - weight_bytes(spec, "bfloat16") - told.adapter_pool
    assert 0.99 * left < taken <= left


def test_an_encoder_keeps_no_keys_beside_a_layer(tmp_path: Path) -> None:
    bert = read_base(write_bert(tmp_path / "bert"), "pool")
    assert row_bytes(bert, "float32") == 4 * (5 * 32 + 3 * 32 + 4 * 32 + 3 * 64) + 4 * 32


def test_graphs_of_an_encoder_are_counted_and_only_where_there_are_any(tmp_path: Path) -> None:
    bert = read_base(write_bert(tmp_path / "bert"), "pool")
    ladder = ladder_of(config(), bert, "bfloat16")
    assert ladder is not None and ladder.all[-1].rows == 512
    larger = ladder_of(config(graph_tokens=1024, max_batch_tokens=700), bert, "float16")
    assert larger is not None and larger.all[-1].rows == 700
    taken = graph_bytes(config(), bert, "bfloat16")
    assert taken > 512 * row_bytes(bert, "bfloat16")
    assert most_rows(config(), bert, "bfloat16", GIB) < most_rows(
        config(graph_tokens=0), bert, "bfloat16", GIB
    )


def test_who_is_refused_for_the_graphs_too_is_told_of_them(tmp_path: Path) -> None:
    bert = read_base(write_bert(tmp_path / "bert"), "pool")
    for told, hints in ((config(), True), (config(graph_tokens=0), False)):
        for free, asked in ((GIB, {"max_batch_tokens": 1 << 30}), (1 << 20, {})):
            with pytest.raises(ConfigError) as refused:
                most_rows(replace(told, **asked), bert, "bfloat16", free)
            assert ("graphs of" in str(refused.value)) is hints
            assert ("graph_tokens" in (refused.value.hint or "")) is hints


def test_steps_are_not_padded_where_no_graph_could_be_replayed(
    tmp_path: Path, spec: BaseSpec
) -> None:
    bert = read_base(write_bert(tmp_path / "bert"), "pool")
    wide = dataclasses.replace(bert, head_dim=264)
    fixed = PoolingConfig(model="m", deterministic=True)
    for told, base, dtype in (
        (config(graph_tokens=0), bert, "bfloat16"),
        (config(), bert, "float32"),
        (fixed, bert, "bfloat16"),
        (config(), wide, "bfloat16"),
        (config(), spec, "bfloat16"),
    ):
        assert ladder_of(told, base, dtype) is None and graph_bytes(told, base, dtype) == 0
