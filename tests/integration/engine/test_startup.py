"""From `auto` to values, and what is refused before any weight is read."""

import json
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelUnsupported, NoDevice
from engine.fit import plan_blocks
from engine.memory.budget import MemoryPlan, usual_adapter_blocks
from engine.models.spec import read_spec
from engine.rehearsal import rehearse
from engine.startup import resolve, tokenizer_size


@pytest.fixture
def spec(model_dir):
    return read_spec(model_dir)


def test_auto_becomes_cpu_and_float32_without_a_card(spec, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = resolve(EngineConfig(model="m"), spec)
    assert (config.device, config.dtype, config.max_batch_tokens) == ("cpu", "float32", 512)
    many = resolve(EngineConfig(model="m", max_num_seqs=600), spec)
    assert many.max_batch_tokens == 616, "each sequence needs a row, and a prompt a block of them"


@pytest.mark.parametrize(
    ("asked", "rows", "resolved"), [(0, 0, 64), (0, 48, 48), (300, 0, 300), (300, 96, 96)]
)
def test_a_step_with_decode_rows_in_it_is_never_larger_than_one_without(
    spec, monkeypatch, asked, rows, resolved
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig(model="m", max_num_seqs=8, max_batch_tokens=rows, mixed_tokens=asked)
    assert resolve(config, spec).mixed_tokens == resolved


def test_auto_becomes_cuda_and_the_checkpoints_dtype_with_one(spec, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = resolve(EngineConfig(model="m"), spec)
    assert (config.device, config.dtype, config.max_batch_tokens) == ("cuda", spec.dtype, 2048)
    assert config.mixed_tokens == 192


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


def test_the_memory_plan_says_what_the_bytes_are_for_and_what_they_hold() -> None:
    gib = 1 << 30
    plan = MemoryPlan(
        device="NVIDIA H200",
        total=140 * gib,
        utilization=0.9,
        weights=15 * gib,
        other=gib // 2,
        steps=2 * gib,
        step_text="2,048 rows, 64 sequences",
        graphs=gib,
        graph_text="up to 41",
        num_blocks=50_000,
        block_bytes=2 << 20,
        block_size=16,
        adapter_blocks=40,
    )
    assert plan.num_tokens == 800_000 and plan.num_adapters == 1_250
    assert plan.reserve == 140 * gib - 37 * gib // 2 - plan.arena
    assert plan.table().splitlines() == [
        "memory plan of NVIDIA H200: 140.00 GiB, gpu_memory_utilization 0.90",
        "  weights   15.00 GiB",
        "  other     512.0 MiB  the driver, and other processes",
        "  steps      2.00 GiB  2,048 rows, 64 sequences",
        "  graphs     1.00 GiB  up to 41",
        "  arena     97.66 GiB  50,000 blocks of 2.0 MiB: "
        "800,000 tokens or 1,250 adapters of rank 16",
        "  reserve   23.84 GiB  left free",
    ]


def test_an_engines_own_plan_counts_its_weights_and_its_arena(start_core, spec) -> None:
    core = start_core(num_blocks=64).core
    plan = core.machine.memory
    assert plan.weights == core.info.weight_bytes and plan.arena == core.info.arena_bytes
    assert plan.adapter_blocks == usual_adapter_blocks(core.machine.layout)
    assert "64 blocks" in plan.table() and "reserve" not in plan.table()


@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 1, "num_blocks": 4}])
def test_a_rehearsal_leaves_no_trace_in_what_is_answered(start_core, prompt, sizes) -> None:
    told = []
    for rehearsed in (False, True):
        driver = start_core(max_batch_tokens=64, **sizes)
        core = driver.core
        if rehearsed:
            longest, blocks = core.config.max_model_len, core.config.num_blocks
            layout = core.machine.layout
            rehearse(core.runner, core.config, layout, max_len=longest, num_blocks=blocks)
            assert core.runner.forward_passes == 0
        stories = [driver.submit(f"r{n}", prompt(20, n), logprobs=1) for n in range(3)]
        driver.finish()
        told.append([(story.tokens, story.logprobs) for story in stories])
    assert told[0] == told[1]
