"""The product kernels compiled for Hopper, on a machine without a card."""

import json
import re
from typing import NamedTuple

import pytest

from engine.kernels import gemm_tiles
from tests.fakes import no_card

#: Compiling takes seconds, and only what touches a kernel can change it.
pytestmark = pytest.mark.late

SCRIPT = """
import json, sys
from engine.kernels import backend, gemm_device, gemm_kernels, gemm_stream
from engine.kernels.gemm_tiles import Tile

backend.is_hopper = backend.dependent_launch = lambda device: True
backend.shared_bytes = lambda device: 227 << 10

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *args, **kwargs: made.append(self.kernel.warmup(*args, grid=grid, **kwargs))

gemm_device.tiled_product = Compiled(gemm_kernels.tiled_product)
gemm_device.vector_product = Compiled(gemm_kernels.vector_product)
gemm_stream.streamed_product = Compiled(gemm_stream.streamed_product)
for fields, dtype, d_in, serial, closely in json.loads(sys.argv[1]):
    tile, made = Tile(*fields), []
    x = torch.zeros(tile.rows, d_in, dtype=getattr(torch, dtype))
    weight = torch.zeros(512, d_in, dtype=x.dtype)
    gemm_device.product(x, weight, None, tile, serial=serial, closely=closely)
    (kernel,) = made
    parts = {name: dict(kernel.asm).get(name, "") for name in ("ttir", "ptx")}
    print(json.dumps({"name": kernel.metadata.name, "shared": kernel.metadata.shared, **parts}))
"""


class Kernel(NamedTuple):
    """What the engine would launch."""

    name: str
    shared: int  # bytes
    ttir: str
    ptx: str


def compiled(*products: tuple[tuple[object, ...], str, int, bool, bool]) -> list[Kernel]:
    """The kernel of each product: tile, dtype, inputs, and whether it is serial; is followed."""
    return [
        Kernel(**json.loads(line))
        for line in no_card.run(SCRIPT, json.dumps(products)).splitlines()
    ]


TILES = (
    ("vector", 1, 4, 4096),
    ("dot", 16, 64, 128, 4, 4, 3),
    ("stream", 64, 128, 64, 2, 4, 4),
)


#: 64 rows and 16, and 64 and 32.
TALL = (("stream", 80, 64, 128, 2, 4, 5), ("stream", 96, 128, 64, 1, 8, 4))
#: A split of one step, and of three.
SPLIT = [
    (tile._replace(splits=4), dtype, 4 * steps * tile.step, True, False)
    for tile, dtype in ((gemm_tiles.FIXED, "bfloat16"), (gemm_tiles.FIXED_WIDE, "float32"))
    for steps in (1, 3)
]


@pytest.fixture(scope="module")
def made() -> list[Kernel]:
    """All products of this module, from one process: TILES, TILES followed closely, SPLIT, TALL."""
    tall = [(tile, "bfloat16", 4096, False, False) for tile in TALL]
    tiled = [(tile, "bfloat16", 4096, False, close) for close in (False, True) for tile in TILES]
    return compiled(*tiled, *SPLIT, *tall)


@pytest.fixture(scope="module")
def kernels(made: list[Kernel]) -> dict[str, tuple[str, int]]:
    return {one.name: (one.ptx, one.shared) for one in made[: len(TILES)]}


def test_weights_are_asked_for_before_the_kernel_ahead_has_ended(
    kernels: dict[str, tuple[str, int]],
) -> None:
    """And x, which it writes, never is."""
    for name, of_weights, of_x in (
        ("vector_product", "ld.global.L1::evict_first", "ld.global.v4"),
        ("tiled_product", None, "cp.async.cg"),
        ("streamed_product", "cp.async.bulk.tensor", None),
    ):
        before, _, behind = kernels[name][0].partition("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in before and behind
        assert of_weights is None or of_weights in before
        assert of_x is None or (of_x in behind and of_x not in before)
    ahead, _, _ = kernels["streamed_product"][0].partition("griddepcontrol.wait")
    assert ahead.count("cp.async.bulk.tensor") == 4  # a stage each; two with x


def test_a_product_that_is_followed_closely_has_waited_before_the_next_kernel_comes(
    made: list[Kernel],
) -> None:
    for kernel in made[len(TILES) : 2 * len(TILES)]:
        before, waited, behind = kernel.ptx.partition("griddepcontrol.wait")
        assert waited and "launch_dependents" not in before and "launch_dependents" in behind


def test_products_go_through_the_warp_groups_and_fit_in_shared_memory(
    kernels: dict[str, tuple[str, int]],
) -> None:
    for name in ("tiled_product", "streamed_product"):
        ptx, shared = kernels[name]
        assert "wgmma.mma_async" in ptx
        assert 32 << 10 < shared < 227 << 10
    vectors = kernels["vector_product"][0]
    assert "wgmma" not in vectors and vectors.count("ld.global.L1::evict_first") == 16


def test_rows_between_two_powers_of_two_are_two_products_with_one_copy_of_the_weights(
    made: list[Kernel],
) -> None:
    for (_, rows, outputs, step, _, _, stages), kernel in zip(
        TALL, made[-len(TALL) :], strict=True
    ):
        widths = set(re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", kernel.ptx))
        assert widths == {"64", str(rows - 64)}
        ahead, _, behind = kernel.ptx.partition("griddepcontrol.wait")
        assert ahead.count("cp.async.bulk.tensor") == stages
        assert behind.count("cp.async.bulk.tensor") == 2 * stages + 3
        assert stages * (rows + outputs) * step * 2 <= kernel.shared < 227 << 10


def test_partial_sums_are_stored_before_the_count_and_loaded_behind_it(
    kernels: dict[str, tuple[str, int]],
) -> None:
    for name in ("tiled_product", "streamed_product"):
        stored, _, summed = kernels[name][0].partition("atom.global.gpu.acq_rel.add")
        assert "st.global" in stored and "ld.global.cg" in summed and "ld.global.cg" not in stored
        assert "bar.sync" in stored[stored.rindex("st.global") :]


def test_a_split_does_not_begin_at_the_sum_of_those_before_it(made: list[Kernel]) -> None:
    """Triton folds total + (w x + 0) to w x + total: other bits than those of splits side by side.

    It did where a split is one step, as in models of a few hundred inputs.
    """
    for (tile, *_), kernel in zip(SPLIT, made[2 * len(TILES) : -len(TALL)], strict=True):
        sums = re.findall(rf"arith.addf .*tensor<{tile.outputs}x{tile.rows}xf32>", kernel.ttir)
        assert kernel.ttir.count("tt.dot") == len(sums) == 1
