"""The attention kernels compiled for Hopper, on a machine without a card."""

import json
import re
from typing import Any

import pytest

from engine.kernels.attention_tiles import decode_bytes, decode_tiles, prefill_bytes, prefill_tiles
from tests.fakes import no_card

#: Compiling takes seconds, and only what touches a kernel can change it.
pytestmark = pytest.mark.late

SCRIPT = """
import json
from engine.kernels import attention_device, backend, decode_plan, paged_decode, paged_prefill
from engine.kernels import prefill_plan
from engine.kernels.attention_meta import AttentionMeta

backend.dependent_launch = lambda device: True
backend.shared_bytes = lambda device: 227 << 10
backend.num_sms = lambda device: 132

class Compiled:
    def __init__(self, name, kernel):
        self.name, self.kernel = name, kernel
    def __getitem__(self, grid):
        def compile(*args, **kwargs):
            made = self.kernel.warmup(*args, grid=grid, **kwargs)
            shared = made.metadata.shared
            print(json.dumps([self.name, {"ptx": made.asm["ptx"], "shared": shared, "grid": grid}]))
        return compile

for module, name in (
    (decode_plan, "_cut"),
    (prefill_plan, "_list"),
    (paged_decode, "_decode"),
    (paged_decode, "merge_apart"),
    (paged_prefill, "_prefill"),
):
    setattr(module, name, Compiled(name, getattr(module, name)))

kv = torch.zeros(8, 3, 2, 16, 8, 128, dtype=torch.bfloat16)[:, 1]
tables, q = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(34, 32, 128, dtype=torch.bfloat16)
alone = AttentionMeta((0, 1, 2, 3), (9, 40, 99), torch.zeros(3), tables, 16)
mixed = AttentionMeta((0, 1, 2, 34), (9, 40, 99), torch.zeros(34), tables, 16)
for meta, rows in ((alone, q[:3]), (mixed, q)):
    for _ in range(2):  # layers
        attention_device.device_attention(rows, kv, meta, scale=0.1, window=0)
narrow = torch.zeros(8, 2, 16, 1, 16)  # fp32, heads of 16
mixed = AttentionMeta((0, 1, 2, 34), (9, 40, 99), torch.zeros(34), tables, 16)
attention_device.device_attention(torch.zeros(34, 2, 16), narrow, mixed, scale=0.1, window=0)
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """Name -> PTX, shared bytes and grid; the decode kernel's by its use of the plan, alone and
    beside prompts."""
    made = [json.loads(line) for line in no_card.run(SCRIPT).splitlines()]
    layer, beside = ["_decode", "merge_apart"], ["_prefill", "_decode", "merge_apart"]
    plans = ["_cut", "_list"]
    names = ["_cut", *layer, *layer, *plans, *beside, *beside, *plans, *beside]
    assert [name for name, _ in made] == names
    at = {"first": 1, "later": 3, "first prefill": 7, "prefill": 10, "beside": 11, "narrow": 16}
    return {name: made[index][1] for name, index in at.items()}


def test_a_tile_of_keys_is_on_its_way_while_another_is_worked_off(kernels: dict[str, Any]) -> None:
    """Ids of blocks that were read in the keys' own turn had once made every tile wait for all."""
    for name, kernel in kernels.items():
        waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(0x\w+|\d+)", kernel["ptx"])]
        assert max(waits) >= 2, name  # copies of keys and values of one tile, or of two


def test_as_many_programs_fit_as_the_tiles_say(kernels: dict[str, Any]) -> None:
    decode, prefill = decode_tiles(4, 128, 2, 227 << 10), prefill_tiles(34, 4, 128, 2, 227 << 10)
    for name in ("first", "later", "beside"):
        assert kernels[name]["shared"] <= decode_bytes(decode, 4, 128, 2)
        assert kernels[name]["grid"] == [8, 3 + decode.programs_per_sm * 132 // 8]
        if decode.registers:
            assert re.search(rf"\.maxnreg {decode.registers}\b", kernels[name]["ptx"])
        most = decode.registers or 255  # a thread cannot have more
        assert decode.programs_per_sm * most * decode.warps * 32 <= 65536
    assert kernels["prefill"]["shared"] <= prefill_bytes(prefill, 128, 2)
    assert "wgmma" in kernels["prefill"]["ptx"]


def test_only_what_no_kernel_of_the_step_writes_is_read_ahead(kernels: dict[str, Any]) -> None:
    """The plan and the tables, from L2."""
    before, _, behind = kernels["later"]["ptx"].partition("griddepcontrol.wait")
    loads = re.findall(r"ld\.global\S*", before)
    assert loads and all(".cg" in load for load in loads)
    assert "cp.async" not in before and "st.global" not in before and "atom" not in before
    assert behind.index("griddepcontrol.launch_dependents") < behind.index("cp.async")
    before, _, _ = kernels["first"]["ptx"].partition("griddepcontrol.wait")
    assert not re.search(r"ld\.global|cp\.async", before)


def test_beside_prompts_decode_waits_for_none_of_them_before_its_end(
    kernels: dict[str, Any],
) -> None:
    """All that it reads was written ahead of the prompts' kernel; a multiprocessor may still have
    what was there before in L1."""
    before, waited, behind = kernels["beside"]["ptx"].partition("griddepcontrol.wait")
    assert waited and "st.global" in before and "st.global" not in behind
    assert before.index("griddepcontrol.launch_dependents") < before.index("ld.global")
    assert all(".cg" in load for load in re.findall(r"ld\.global\S*", before))
    assert "cp.async.cg" in before and "cp.async.ca" not in before


def test_keys_that_may_come_from_l1_are_not_asked_for_beside_prompts(
    kernels: dict[str, Any],
) -> None:
    """A thread copies too few of a narrow tile to leave L1 out, and layers of a model that pools
    have one place for their keys."""
    before, waited, behind = kernels["narrow"]["ptx"].partition("griddepcontrol.wait")
    assert waited and "cp.async.ca" in behind
    assert not re.search(r"ld\.global|cp\.async|st\.global", before)


def test_prompts_let_decode_come_when_all_ahead_of_them_has_ended(kernels: dict[str, Any]) -> None:
    for name in ("first prefill", "prefill"):
        before, waited, behind = kernels[name]["ptx"].partition("griddepcontrol.wait")
        assert waited and "launch_dependents" not in before and "launch_dependents" in behind
        assert all(".cg" in load for load in re.findall(r"ld\.global\S*", before))
