"""LoRA's one launch beside a product, compiled for Hopper on a machine without a card."""

import json
from typing import Any

import pytest

from tests.fakes import no_card

#: Compiling takes seconds, and only what touches a kernel can change it.
pytestmark = pytest.mark.late

SCRIPT = """
import json
from engine.kernels import lora_joint, tiles
from engine.kernels.lora_meta import LoraClass, LoraDevicePlan, LoraStore, group_shapes
from engine.layout import BlockLayout, Shapes

class Compiled:
    def __getitem__(self, grid):
        def compile(*args, **kwargs):
            made = joint.warmup(*args, grid=grid, **kwargs)
            found[kind.name] = {"ptx": made.asm["ptx"], "shared": made.metadata.shared}
        return compile

joint, lora_joint._joint, found = lora_joint._joint, Compiled(), {}
wide, narrow, ffn = (4096, 4096), (4096, 1024), (4096, 14336)
shapes = Shapes(2, (wide, narrow, narrow, wide, ffn, ffn, ffn[::-1]))
layout = BlockLayout(shapes, "bfloat16", 2 << 20)
store = LoraStore(
    arena=torch.zeros(64).bfloat16(),
    table=torch.zeros(1, 512, dtype=torch.int32),
    h=torch.zeros(64),
    groups=group_shapes(layout),
    block=layout.block_bytes // 2,
    blocks_at=2 * 7 * 8,
    max_rank=64,
    max_rows=1024,
    pdl=True,
)
items = torch.zeros(1, 4, dtype=torch.int32)
for kind in (tiles.ALONE, tiles.SOLO):
    plan = LoraDevicePlan(store, LoraClass(kind, 1, 1), items, items)
    x, y = torch.zeros(1, 4096).bfloat16(), torch.zeros(1, 4096).bfloat16()
    lora_joint.joined(y, x, 0, "o", plan)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(no_card.run(SCRIPT))
    return found


@pytest.mark.parametrize("name", ["alone", "solo"])
def test_h_is_used_ahead_of_the_wait_and_y_behind_it(
    name: str, kernels: dict[str, dict[str, Any]]
) -> None:
    ptx = kernels[name]["ptx"]
    pieces = [piece for piece in ptx.split("griddepcontrol.wait")[:-1] if "ld.acquire.gpu" in piece]
    assert pieces
    for piece in pieces:
        ahead = piece[piece.rindex("ld.acquire.gpu") :]
        assert "ld.global.cg" in ahead and "st.global" not in ahead
        assert not plain_loads(ahead)
    blocks = [block for block in ptx.split("$L__BB") if plain_loads(block)]
    assert blocks  # all else is read without a wait, and comes from L2
    assert not any(plain_loads(block.partition("griddepcontrol.wait")[0]) for block in blocks)


@pytest.mark.parametrize("name", ["alone", "solo"])
def test_a_program_of_shrink_is_counted_when_all_its_threads_have_stored(
    name: str, kernels: dict[str, dict[str, Any]]
) -> None:
    """Its x and A come from L2, since it waits for nobody."""
    stored, counted, _ = kernels[name]["ptx"].partition("atom.global.gpu.release.add")
    assert counted
    last = stored.rindex("st.global")
    assert "bar.sync" in stored[last:] and "griddepcontrol.wait" not in stored[last:]


def plain_loads(ptx: str) -> list[str]:
    """Loads that may be answered by L1, but for those of A and B, which leave L2 first: no kernel
    writes them."""
    loads = [line for line in ptx.splitlines() if "ld.global." in line]
    return [line for line in loads if ".cg." not in line and "L2::cache_hint" not in line]


def test_it_fits_beside_a_product_that_fills_most_of_a_multiprocessor(
    kernels: dict[str, dict[str, Any]],
) -> None:
    assert all(kernel["shared"] <= 16 << 10 for kernel in kernels.values())
