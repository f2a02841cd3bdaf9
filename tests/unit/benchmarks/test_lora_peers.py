"""A peer's kernels beside ours: called as its package has them, checked, or refused in a line.

The package here is a small one with vLLM's names, which reads what is sent to the card as its
kernels do, and computes with torch.
"""

import json
import sys
from types import ModuleType, SimpleNamespace

import lora_cases
import lora_fleet
import lora_kernels
import lora_peers
import pytest
import torch
from lora_peers import Stacks, Unusable, load

from engine.kernels.lora_meta import GroupShape
from engine.layout import BlockLayout, Shapes
from engine.memory.arena import Arena

SHAPES = {"qkv": GroupShape(0, 24, (16, 8, 8)), "down": GroupShape(6, 40, (24,))}
RANKS = (4, 16, 3, 8, 8)


class Meta:
    """Its rows sorted by adapter, and how many adapters a grid is for."""

    @staticmethod
    def make(max_loras, max_num_tokens, device, captured_lora_counts=None):
        meta = Meta()
        meta.most, meta.rows, meta.counts = max_loras, max_num_tokens, captured_lora_counts
        return meta

    def prepare_tensors(self, token_lora_mapping):
        assert len(token_lora_mapping) <= self.rows
        self.mapping = token_lora_mapping
        self.order = torch.sort(token_lora_mapping, stable=True).indices
        ids, self.num = torch.unique(token_lora_mapping, return_counts=True)
        self.ids = torch.cat((ids, torch.full((self.most + 1 - len(ids),), -1)))
        self.first = torch.cat((torch.zeros(1, dtype=torch.long), self.num.cumsum(0)))
        self.grid = next(count for count in self.counts if count >= len(ids))

    def meta_args(self, token_nums, specialize_active_lora):
        assert token_nums == len(self.mapping)
        grid = self.grid if specialize_active_lora else self.most + 1
        flag = torch.tensor([False])
        return (
            self.mapping,
            self.order,
            self.num,
            self.first,
            self.ids,
            flag,
            torch.tensor([grid]),
        )


class Kernels:
    """`lora_shrink` and `lora_expand`; `slip` is what they make of a product."""

    def __init__(self, slip=1.0):
        self.slip = slip
        self.grids = []
        self.weights = []
        self.calls = 0

    def _rows(self, order, num, first, ids, grid):
        self.calls += 1
        self.grids.append(int(grid))
        for n in range(int(grid)):
            if n < len(num) and ids[n] >= 0:
                yield int(ids[n]), order[first[n] : first[n] + num[n]]

    def lora_shrink(
        self,
        inputs,
        lora_a_weights,
        output_tensor,
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        no_lora_flag_cpu,
        num_active_loras,
        scaling,
    ):
        self.weights = [tuple(a.shape) for a in lora_a_weights]
        output_tensor.zero_()
        meta = (token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc)
        for slot, rows in self._rows(*meta, lora_ids, num_active_loras):
            for out, a in zip(output_tensor, lora_a_weights, strict=True):
                out[rows] = self.slip * scaling * inputs[rows].float() @ a[slot, 0].float().T

    def lora_expand(
        self,
        inputs,
        lora_b_weights,
        output_tensor,
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        no_lora_flag_cpu,
        num_active_loras,
        offset_start=0,
        add_inputs=False,
    ):
        meta = (token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc)
        for slot, rows in self._rows(*meta, lora_ids, num_active_loras):
            column = offset_start
            for h, b in zip(inputs, lora_b_weights, strict=True):
                width = b.shape[2]
                more = (h[rows] @ b[slot, 0].float().T).to(output_tensor.dtype)
                y = output_tensor[:, column : column + width]
                y[rows] = y[rows] + more if add_inputs else more
                column += width


@pytest.fixture
def kernels(monkeypatch):
    """A package `vllm` that there is."""
    made = Kernels()
    for name in ("vllm", "vllm.lora", "vllm.lora.ops", "vllm.lora.ops.triton_ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = "0.33.7"
    ops = sys.modules["vllm.lora.ops.triton_ops"]
    ops.lora_shrink, ops.lora_expand, ops.LoRAKernelMeta = made.lora_shrink, made.lora_expand, Meta
    return made


def ops():
    return sys.modules["vllm.lora.ops.triton_ops"]


# ----------------------------------------------------------------- how they are called
def stacked(max_rank=16):
    """The stacks of 5 adapters in 2 layers, and their weights."""
    torch.manual_seed(0)
    stacks = Stacks(
        load(),
        SHAPES,
        **{"layers": 2, "slots": len(RANKS), "max_rank": max_rank, "max_rows": 32},
        **{"dtype": torch.float32, "device": torch.device("cpu")},
    )
    weights = {}
    for slot, rank in enumerate(RANKS):
        for layer in range(2):
            for group, shape in SHAPES.items():
                pairs = [
                    (torch.randn(rank, shape.d_in), torch.randn(rank, width), 0.5 + slot)
                    for width in shape.widths
                ]
                stacks.put(slot, layer, group, pairs)
                weights[slot, layer, group] = pairs
    return stacks, weights


@pytest.mark.parametrize("specialized", [False, True])
@pytest.mark.parametrize("slots", [(0,), (3, 3, 1, 0, 2, 1, 4), (2, -1, 4, -1)])
def test_each_row_gets_the_correction_of_its_own_adapter(kernels, slots, specialized):
    stacks, weights = stacked()
    for group, shape in SHAPES.items():
        x, y = torch.randn(len(slots), shape.d_in), torch.randn(len(slots), sum(shape.widths))
        right = y.clone()
        for row, slot in enumerate(slots):
            if slot >= 0:
                pairs = weights[slot, 1, group]
                right[row] += torch.cat([x[row] @ a.T * scaling @ b for a, b, scaling in pairs])
        stacks.begin(torch.tensor(slots, dtype=torch.int32), specialized=specialized)
        stacks.apply(y, x, 1, group)
        torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-4)


def test_the_weights_are_of_the_largest_rank_whatever_an_adapters_own(kernels):
    stacks, _ = stacked(max_rank=64)
    stacks.begin(torch.zeros(1, dtype=torch.int32), specialized=False)
    stacks.apply(torch.zeros(1, 32), torch.zeros(1, 24), 0, "qkv")
    assert kernels.weights == [(5, 1, 64, 24)] * 3
    assert [lora_peers.padded(rank) for rank in (1, 3, 16, 17, 300)] == [1, 8, 16, 32, 320]


def test_a_grid_is_for_all_slots_or_for_the_next_power_of_two_in_the_step(kernels):
    stacks, _ = stacked()
    for slots, grid in (((1,), 1), ((4, 1, 3), 4), ((0, 1, 2, 3, 4), 6), ((0, 1, 2, 3, 4, -1), 6)):
        for specialized, expected in ((False, 6), (True, grid)):
            stacks.begin(torch.tensor(slots, dtype=torch.int32), specialized=specialized)
            stacks.apply(torch.zeros(len(slots), 24), torch.zeros(len(slots), 40), 0, "down")
            assert kernels.grids[-2:] == [expected, expected]


# ----------------------------------------------------------------- whether they may be called
def test_the_installed_release_is_named(kernels):
    assert load().version == "0.33.7"


def test_arguments_of_what_is_registered_with_torch_are_read_too(kernels):
    names = lora_peers._ARGUMENTS["lora_shrink"]
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in names])
    ops().lora_shrink = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    assert load().shrink is ops().lora_shrink
    schema.arguments.pop(3)
    with pytest.raises(Unusable, match=r"lora_shrink takes \(inputs, "):
        load()


def refused(capsys):
    """What `--peer vllm` says on stderr; it ends there, before a card is asked for."""
    with pytest.raises(SystemExit) as ended:
        lora_kernels.parse(["--peer", "vllm"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "try: " in said
    return said


def test_without_the_package_a_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "vllm is not installed; try: pip install 'vllm==0.33.*'" in refused(capsys)


def test_a_package_that_cannot_be_imported_is_not_called_absent(kernels, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm.lora.ops.triton_ops", None)
    said = refused(capsys)
    assert "vllm 0.33.7 cannot be imported (ModuleNotFoundError: " in said


@pytest.mark.parametrize(
    "body", ["import a_module_that_is_not_there", "raise RuntimeError('no driver\\nline 2')"]
)
def test_nor_is_one_that_fails_by_itself(monkeypatch, tmp_path, capsys, body):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(body + "\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    said = refused(capsys)
    assert said.startswith("vllm cannot be imported (") and "line 2" not in said


@pytest.mark.parametrize("wrong", ["shrink", "expand", "make", "meta_args", "nothing"])
def test_another_releases_kernels_are_refused_by_their_arguments(
    kernels, monkeypatch, capsys, wrong
):
    def older(inputs, lora_a_weights, output_tensor, scaling):
        raise AssertionError("called")

    if wrong == "nothing":
        del ops().LoRAKernelMeta
    elif wrong in ("shrink", "expand"):
        setattr(ops(), f"lora_{wrong}", older)
    else:
        monkeypatch.setattr(Meta, wrong, older)
    said = refused(capsys)
    name = f"lora_{wrong}" if wrong in ("shrink", "expand") else "LoRAKernelMeta"
    assert said.startswith("vllm 0.33.7 has other kernels than 0.33") and name in said
    assert ("is not there" in said) == (wrong == "nothing")


# ----------------------------------------------------------------- what is printed of them
@pytest.fixture
def small(monkeypatch):
    """The benchmark's model, made small enough for a CPU, and a case of it."""
    dims = ((64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64))
    layout = BlockLayout(Shapes(6, dims), "bfloat16", 1 << 16)
    for module in (lora_cases, lora_fleet, lora_kernels):
        for name, value in {"LAYERS": 6, "SLOTS": 8, "DIMS": dims, "LAYOUT": layout}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    lora_fleet.placed.cache_clear()
    case = lora_cases.Case("T=4 k=3", (0, 0, 1, 5), (8, 16, 4, 8, 8, 12, 8, 8), (), ())
    torch.manual_seed(0)
    blocks = sum(lora_fleet.placed(rank).num_blocks for rank in case.ranks)
    arena = Arena(None, layout, block_size=16, num_blocks=blocks, device=torch.device("cpu"))
    arena.bytes.view(-1).view(torch.bfloat16).normal_(0, 0.05)
    fleet = lora_fleet.Fleet(arena, case.ranks)
    yield case, fleet, lora_fleet.Operands(fleet, case)
    lora_fleet.placed.cache_clear()


def lines(small, monkeypatch, capsys, replayed=True, rank=1, seconds=100.0, engine_ms=0.5):
    case, fleet, operands = small

    def timed(sweep):
        for _ in range(lora_kernels.SWEEPS if replayed else 1):
            sweep()
        return 3.0

    monkeypatch.setattr(lora_kernels, "timed", timed)
    beside = lora_kernels.Beside(load(), rank)
    bench = lora_kernels.Bench(seconds, 0, beside)
    bench.measure_peer(case, fleet, operands, engine_ms, beside)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()], bench.failed


def test_a_line_has_the_package_its_setting_and_the_same_floor(kernels, small, monkeypatch, capsys):
    found, failed = lines(small, monkeypatch, capsys)
    floor = small[0].floor_ms
    assert not failed
    assert [line["specialize_active_lora"] for line in found] == [False, True]
    assert {grid for grid in kernels.grids if grid != 9} == {4}
    for line in found:
        assert (line["peer"], line["version"], line["max_lora_rank"]) == ("vllm", "0.33.7", 16)
        assert (line["ms"], line["floor_ms"]) == (3.0, round(floor, 4))
        assert line["ratio"] == round(3.0 / floor, 3)
        assert (line["engine_ms"], line["times_engine"]) == (0.5, 6.0)
        assert line["error"] < 0.01


def test_beside_an_engine_that_failed_a_peer_has_no_ratio_to_it(
    kernels, small, monkeypatch, capsys
):
    found, failed = lines(small, monkeypatch, capsys, engine_ms=float("inf"))
    assert not failed and all(line["ratio"] > 0 for line in found)
    assert all("engine_ms" not in line and "times_engine" not in line for line in found)


def test_a_larger_rank_is_asked_for_as_by_a_server_that_has_it(kernels, small, monkeypatch, capsys):
    found, failed = lines(small, monkeypatch, capsys, rank=64)
    assert not failed and [line["max_lora_rank"] for line in found] == [64, 64]


def test_what_is_not_the_correction_has_no_time(kernels, small, monkeypatch, capsys):
    kernels.slip = 1.02
    found, failed = lines(small, monkeypatch, capsys)
    assert failed and all("ms" not in line for line in found)
    assert all(line["failed"].startswith("ValueError: wrong by 0.02") for line in found)


def test_replays_that_leave_work_out_have_no_time(kernels, small, monkeypatch, capsys):
    found, failed = lines(small, monkeypatch, capsys, replayed=False)
    assert failed and all("ms" not in line for line in found)
    assert all("the replays did 0.1" in line["failed"] for line in found)


def test_after_the_time_given_a_peer_is_left_out(kernels, small, monkeypatch, capsys):
    found, failed = lines(small, monkeypatch, capsys, seconds=-1.0)
    assert not failed and [line["left_out"] for line in found] == [True, True]
    assert kernels.calls == 0


def test_beside_a_peer_no_rival_tiles_are_timed(kernels):
    _, alone = lora_kernels.parse(["--only", "T=64 k=8"])
    options, cases = lora_kernels.parse(["--only", "T=64 k=8", "--peer", "vllm"])
    assert options.peer.version == "0.33.7"
    assert alone[0].shrinks and not cases[0].shrinks and cases[0].slots == alone[0].slots


def test_without_a_card_a_line_says_so(kernels, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lora_kernels.py", "--peer", "vllm"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees none; try: nvidia-smi"):
        lora_kernels.main()
