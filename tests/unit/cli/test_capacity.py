"""The calculator against figures that were worked out, or measured, elsewhere."""

import json

import pytest

from engine.client import read_spec
from engine.layout import MODULES
from lorad import capacity
from lorad.capacity_speed import H200_BANDWIDTH, Machine, over_weights

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
GIB = 1 << 30
H200 = Machine(H200_BANDWIDTH)


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return read_spec(tmp_path)


@pytest.fixture
def make(spec):
    """make(ranks, blocks=55958, **wish): a plan of the reference model."""
    layout = spec.block_layout(block_size=16, dtype="bfloat16")

    def make(*ranks, blocks=55_958, machine=H200, **wish):
        arena = capacity.known_arena(spec, layout, 16, blocks, "blocks")
        return capacity.plan(spec, layout, arena, capacity.Wish(ranks=ranks, **wish), machine)

    return make


def test_the_plan_that_an_h200_printed_for_llama_3_8b_comes_out_the_same(make):
    done = make((16, 1))
    assert done.arena.block_bytes == 2 << 20
    assert done.arena.num_tokens == 895_328
    assert done.adapters[0].fit_alone == 1_364


def test_the_estimate_for_that_card_is_within_a_thousandth(spec):
    """Of what it printed once weights had room for guests; without it 55,958 were left."""
    layout = spec.block_layout(block_size=16, dtype="bfloat16")
    arena = capacity.estimated_arena(spec, layout, 16, int(139.8 * GIB), 0.9)
    assert arena.num_blocks == pytest.approx(55_783, rel=0.001)
    assert arena.source == "memory" and arena.working_bytes


def test_weights_and_adapters_are_those_of_the_published_shape(make):
    done = make((16, 1))
    assert done.model.parameters == 8_030_261_248, "as the model's own page says"
    assert done.model.kv_token_bytes == 128 << 10
    [adapter] = done.adapters
    assert adapter.true_bytes == 80 << 20
    assert sum(m.num_bytes for m in adapter.modules) == adapter.true_bytes
    assert adapter.modules[0].num_bytes == 16 * (4096 + 4096) * 2 * 32


def test_floors_are_those_of_the_byte_model(make):
    none, one, eight, many = make((16, 100), requests=64, tokens=576).steps
    assert none.floor_ms == pytest.approx(4.65, abs=0.01)
    assert one.tax_floor_ms == pytest.approx(0.02, abs=0.005)
    assert eight.tax_floor_ms == pytest.approx(0.16, abs=0.005)
    assert many.tax_floor_ms == pytest.approx(1.26, abs=0.01)
    [quiet, _] = make((16, 100), requests=1, tokens=1).steps
    assert quiet.floor_ms == pytest.approx(3.52, abs=0.01)


def test_expected_steps_meet_what_was_measured(make):
    none, one, eight, many = make((16, 100), requests=64, tokens=576).steps
    assert none.step_ms == pytest.approx(5.82, abs=0.05)
    taxes = [step.tax_ms for step in (one, eight, many)]
    assert taxes == pytest.approx([0.29, 0.43, 1.52], abs=0.02)
    assert make((16, 1), requests=1, tokens=576).steps[0].step_ms == pytest.approx(4.12, abs=0.03)
    assert make((16, 1), requests=16, tokens=576).steps[0].step_ms == pytest.approx(4.76, abs=0.03)


def test_between_measured_batches_lie_straight_lines():
    assert over_weights(1) == 1.17 and over_weights(40) == pytest.approx(1.30)
    assert over_weights(1000) == over_weights(64)


def test_of_a_card_that_was_not_measured_only_the_floor_is_told(make):
    steps = make((16, 8), machine=Machine(1e12, measured=False)).steps
    assert all(s.step_ms is None and s.tax_ms is None and s.floor_ms > 0 for s in steps)


def test_requests_take_whole_blocks_and_adapters_what_is_left(make):
    done = make((16, 10), blocks=1000, requests=10, tokens=33)
    assert done.kv.request_blocks == 3 and done.kv.num_blocks == 30
    floor = done.arena.kv_floor_blocks
    assert floor == 100, "a tenth of a small arena, which adapters never take"
    assert done.adapters[0].fit_beside == (1000 - 100) // 41
    assert done.fit.fits and done.fit.free_blocks == 1000 - 100 - 10 * 41


def test_what_does_not_fit_says_how_many_stay_at_once(make):
    done = make((64, 3), (16, 10), blocks=1000, requests=10, tokens=800)
    assert not done.fit.fits
    assert [a.resident for a in done.adapters] == [3, 0] and done.fit.resident == 3
    assert done.fit.free_blocks == 1000 - 3 * 161 - 10 * 41 - 500


def test_slots_bound_what_is_resident(make):
    done = make((16, 20), slots=8)
    assert not done.fit.fits and done.fit.free_blocks > 0 and done.fit.resident == 8


def test_a_shared_prompt_is_there_once_for_each_tenant_in_whole_blocks(make):
    done = make((16, 30), requests=8, tokens=1000, shared_prompt=170, tenants=30)
    assert done.kv.copies == 30 and done.kv.shared_blocks == 30 * 10
    assert done.kv.request_blocks == 63 - 10
    head = make((16, 30), targets=("lm_head",), tokens=1000, shared_prompt=170, tenants=30)
    assert head.kv.copies == 1, "the head changes no key and no value"


def test_a_process_each_pays_for_the_weights_each_time(make):
    done = make((16, 100))
    assert done.cost.alone_bytes == done.model.weight_bytes
    expected = (100 * (82 << 20) + done.model.weight_bytes) // 100
    assert done.cost.here_bytes == expected
    assert done.steps[-1].alone_floor_ms > 30 * done.steps[-1].floor_ms


def test_a_card_that_is_too_small_says_what_it_lacks(spec):
    layout = spec.block_layout(block_size=16, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"0\.9 of 16\.0 GiB does not hold the weights \(15\.0"):
        capacity.estimated_arena(spec, layout, 16, 16 * GIB, 0.9)


def test_ranks():
    assert capacity.parse_ranks("16:100, 64:20") == ((16, 100), (64, 20))
    assert capacity.parse_ranks("8") == ((8, 1),)
    for wrong in ("", "16:", ":3", "a:1", "0:1", "16:0", "9999:1", "16:1,"):
        with pytest.raises(ValueError, match=r"RANK:COUNT|1 to"):
            capacity.parse_ranks(wrong)


def test_targets():
    assert capacity.parse_targets("all") == MODULES
    assert capacity.parse_targets("q_proj,attention")[0] == "q_proj"
    assert len(capacity.parse_targets("q_proj,attention")) == 4
    assert capacity.parse_targets("gate_up_proj,lm_head") == ("gate_proj", "up_proj", "lm_head")
    with pytest.raises(ValueError, match="no module is called 'fc1'; known: all, attention"):
        capacity.parse_targets("fc1")
