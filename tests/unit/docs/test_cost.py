"""The figures of docs/cost.md: computed by the calculator, or measured and in the bench log."""

import json
import re
from pathlib import Path

import pytest

from engine.client import read_spec
from lorad import capacity
from lorad.capacity_speed import H200_BANDWIDTH, Machine

DOCS = Path(__file__).parents[3] / "docs"
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
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def page():
    return (DOCS / "cost.md").read_text(encoding="utf-8")


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    spec = read_spec(tmp_path)
    layout = spec.block_layout(block_size=16, dtype="bfloat16")
    arena = capacity.known_arena(spec, layout, 16, 55_958, "blocks")

    def plan(*ranks, **wish):
        wish = capacity.Wish(ranks=ranks, **wish)
        return capacity.plan(spec, layout, arena, wish, Machine(H200_BANDWIDTH))

    return plan


def table(page, heading):
    """{first cell: other cells} of the table whose first heading begins so."""
    lines = page[page.index(f"| {heading}") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_floors_and_bytes_are_the_calculators(page, plan):
    done = plan((16, 100), requests=64, tokens=576)
    steps = {step.adapters: step for step in done.steps}
    rows = table(page, "distinct adapters k")
    assert float(rows["0 (the step itself)"][1]) == pytest.approx(steps[0].floor_ms, abs=0.005)
    for k in (1, 8, 64):
        size, floor = rows[str(k)][:2]
        assert float(floor) == pytest.approx(steps[k].tax_floor_ms, abs=0.005)
        assert float(size.split()[0]) == pytest.approx(k * 80 * 2**20 / 1e9, abs=0.005)
    assert done.adapters[0].true_bytes == 80 << 20
    assert "stored in 41 blocks" in page
    assert done.adapters[0].num_blocks == 41


def test_what_five_per_cent_buys_is_computed_from_the_floor(page, plan):
    floor = plan((16, 100), requests=64, tokens=576).steps[0].floor_ms
    ranks = 0.05 * floor / 1e3 * H200_BANDWIDTH / (5 << 20)
    assert f"k · r = {int(ranks)}" in page
    share = 64 * 16 * (5 << 20) / H200_BANDWIDTH * 1e3 / floor
    assert f"{share:.0%} of the step's" in page


def test_copies_of_a_shared_prompt_are_the_calculators(page, plan):
    kv = plan((16, 100), requests=64, tokens=3000, shared_prompt=2000, tenants=100).kv
    size = f"{kv.shared_blocks * 2 / 1024:.1f}G"
    assert f"{kv.copies} copies, {kv.shared_blocks} blocks, {size}" in page


def test_what_is_called_measured_is_in_the_bench_log(page):
    log = (DOCS / "bench-log.md").read_text(encoding="utf-8")
    rows = table(page, "distinct adapters k")
    measured = [cell for rest in rows.values() for cell in rest[2:4]]
    numbers = re.findall(r"\d+\.\d+", " ".join(measured))
    assert len(numbers) >= 7
    assert [number for number in numbers if not re.search(rf"(?<![\d.]){number}(?!\d)", log)] == []
