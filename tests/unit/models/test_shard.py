"""Who of several ranks has which part of a model, and which models have no such parts."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.fit import check_fit
from engine.models.shard import WHOLE, Cut, Shard, split
from engine.models.spec import ModelSpec, read_spec

MakeFolder = Callable[..., Path]


@pytest.fixture
def spec(folder: MakeFolder) -> ModelSpec:
    """8 heads of 8, 2 of keys, 128 wide in the middle, 1,000 words."""
    return read_spec(folder())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_output_and_input_of_a_module_is_one_ranks(spec: ModelSpec, size: int) -> None:
    shards = [Shard(spec, rank, size) for rank in range(size)]
    for module in ("q_proj", "gate_proj", "up_proj"):
        ranges = [shard.outputs(module) for shard in shards]
        assert ranges[0][0] == 0 and ranges[-1][1] == spec.shapes.of(module)[1]
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
    for module in ("o_proj", "down_proj"):
        assert all(shard.outputs(module) is None for shard in shards)
        ranges = [shard.inputs(module) for shard in shards]
        assert ranges[0][0] == 0 and ranges[-1][1] == spec.shapes.of(module)[0]
        assert all(a[1] == b[0] for a, b in pairwise(ranges))


def test_ranks_beyond_the_heads_of_keys_share_those_that_their_queries_look_at(
    spec: ModelSpec,
) -> None:
    own = [Shard(spec, rank, 8).outputs("k_proj") for rank in range(8)]
    assert own == [(0, 8)] * 4 + [(8, 16)] * 4
    assert split(spec, 8).num_kv_heads == 1


def test_a_rank_is_narrower_and_knows_all_words(spec: ModelSpec) -> None:
    own = split(spec, 2)
    assert (own.num_heads, own.num_kv_heads, own.ffn_size) == (4, 1, 64)
    assert (own.hidden_size, own.vocab_size, own.head_dim) == (64, 1000, 8)
    whole, part = (s.block_layout(block_size=16, dtype="float32") for s in (spec, own))
    assert part.block_bytes * 2 == whole.block_bytes and part.shards == 2
    assert part.id != whole.id


def test_published_tensors_are_cut_where_their_module_is(spec: ModelSpec) -> None:
    shard = Shard(spec, 1, 2)
    assert shard.cut("layers.0.self_attn.q_proj.weight") == Cut(rows=((32, 64),), size=64)
    assert shard.cut("layers.0.self_attn.q_proj.bias") == Cut(rows=((32, 64),), size=64)
    assert shard.cut("layers.0.self_attn.qkv_proj.weight") == Cut(
        rows=((32, 64), (72, 80), (88, 96)), size=96
    )
    assert shard.cut("layers.0.self_attn.o_proj.weight") == Cut(columns=(32, 64), size=64)
    assert shard.cut("embed_tokens.weight") == Cut(rows=((500, 1000),), size=1000)
    assert shard.cut("layers.0.self_attn.q_norm.weight") == WHOLE
    assert shard.cut("norm.weight") == WHOLE
    assert Shard(spec, 0, 1).cut("layers.0.self_attn.o_proj.weight") == WHOLE


def test_the_bias_of_a_sum_is_the_first_ranks(spec: ModelSpec) -> None:
    name = "layers.0.mlp.down_proj.bias"
    assert not Shard(spec, 0, 2).cut(name).zero
    assert Shard(spec, 1, 2).cut(name).zero


@pytest.mark.parametrize(
    ("changes", "ranks", "why"),
    [
        ({}, 3, "num_attention_heads = 8 is no multiple"),
        ({"intermediate_size": 102}, 4, "intermediate_size = 102 is no multiple"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8},
            4,
            "num_key_value_heads = 6 is neither",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused_before_the_start(
    changes: dict[str, int], ranks: int, why: str, folder: MakeFolder
) -> None:
    where = folder(**changes)
    config = EngineConfig(model=str(where), device="cpu", tensor_parallel=ranks)
    with pytest.raises(ConfigError, match=f"tensor_parallel = {ranks}: .*{why}"):
        check_fit(config, read_spec(where))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel": 0}, "must be 1 to 16"),
        ({"tensor_parallel": 2, "deterministic": True}, "not with deterministic"),
        (
            {"tensor_parallel": 2, "speculation": "draft", "draft_model": "small"},
            "not with draft_model",
        ),
        ({"pipeline_parallel": 2}, "layers are not spread over GPUs"),
    ],
)
def test_what_ranks_cannot_do_together_is_refused_by_name(
    settings: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(model="base", **settings)  # type: ignore[arg-type]
