"""The products with weights on a card, in bf16 and in the shapes of Llama-3-8B.

The oracle is fp64.  Every tile of the table is tried, whether or not the engine's switch is on.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels import gemm_tiles
from engine.kernels.gemm import linear
from engine.kernels.gemm_tiles import Rule, Tile

pytestmark = pytest.mark.gpu

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
#: A few hundred inputs: a split is one step.
NARROW = {"narrow": (1408, 256), "narrow qkv": (960, 576)}
#: Of bf16's rounding alone the norm of the error is 0.0017 of the result's.
ERRORS = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-5}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_tiles, "OWN", True)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In fp64, some outputs at a time."""
    parts = [x.double() @ some.double().t() for some in weight.split(8192)]
    return torch.cat(parts, 1) + (0 if bias is None else bias.double())


def close(got: Tensor, want: Tensor, most: float) -> None:
    assert got.isfinite().all()
    assert float((got.double() - want).norm() / want.norm()) <= most


def captured(forward: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        forward()
    return graph


@pytest.mark.parametrize("name", SHAPES)
def test_the_engines_products_equal_fp64s(name: str, own: None) -> None:
    """At every number of rows where a rule begins or ends, and by torch behind the last."""
    d_out, d_in = SHAPES[name]
    weight, bias = random(d_out, d_in), random(d_out)
    ends = sorted({rule.rows for rule in gemm_tiles.RULES})
    for rows in sorted({n + more for n in ends for more in (0, 1)} | {1, 3, 7, 30, 50}):
        x = random(rows, d_in)
        added = bias if rows % 2 else None
        out = torch.full((rows, d_out), torch.nan, dtype=torch.bfloat16, device="cuda")
        linear(x, weight, added, deterministic=False, out=out)
        close(out, exact(x, weight, added), ERRORS[torch.bfloat16])


def test_logits_are_written_in_fp32_without_a_rounding_before(own: None) -> None:
    x, weight = random(5, 4096), random(128256, 4096)
    assert gemm_tiles.pick(5, *weight.shape, 2) is not None
    out = torch.full((5, 128256), torch.nan, device="cuda")
    assert linear(x, weight, None, deterministic=False, out=out) is out
    close(out, exact(x, weight), 1e-4)  # tensor cores cut off what they add up


@pytest.mark.parametrize(
    "tile",
    [
        *dict.fromkeys(rule.tile for rule in gemm_tiles.RULES if rule.tile),
        Tile("vector", 4, 4, 4096),
        Tile("vector", 2, 8, 2048, warps=8),
        Tile("dot", 8, 64, 128, 4),
        Tile("dot", 16, 64, 128, 4, tma=True),
        Tile("dot", 64, 128, 64, 8, tma=True),
        Tile("dot", 128, 256, 64, 8, 8, 3),
        Tile("stream", 16, 64, 128, 2, stages=5),
        Tile("stream", 32, 128, 128, 1, warps=8, stages=3),
        Tile("stream", 64, 128, 64, 3),
        Tile("stream", 64, 256, 64, warps=8, stages=5),
        Tile("stream", 128, 128, 64, 8, warps=8, stages=2),
        Tile("stream", 80, 64, 128, 2, stages=5),
        Tile("stream", 80, 128, 128, warps=8, stages=2),
        Tile("stream", 80, 256, 64, warps=8, stages=5),
        Tile("stream", 96, 64, 128, 3, stages=3),
    ],
)
def test_any_tile_takes_shapes_that_fit_it_badly(tile: Tile) -> None:
    from engine.kernels.gemm_device import product

    for dtype, d_out, d_in in (
        (torch.bfloat16, 960, 576),
        (torch.bfloat16, 4097, 4104),
        (torch.float16, 333, 2050),
    ):
        rows = min(tile.rows, 3) if tile.form == "vector" else 70
        x, weight, bias = random(rows, d_in), random(d_out, d_in), random(d_out)
        x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
        got = product(x, weight, bias, tile)
        close(got, exact(x, weight, bias), ERRORS[dtype])


@pytest.mark.parametrize("table", ["engine", "streams"])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_replayed_chain_of_products_follows_x(
    rows: int, table: str, own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split products share a workspace and run as soon as the one ahead ends: bits never change."""
    from engine.kernels import fused

    if table == "streams":
        narrow = Rule(64, 8192, 1 << 30, Tile("stream", max(16, rows), 64, 128, 2, stages=3))
        wide = Rule(64, 1 << 30, 1 << 30, Tile("stream", max(16, rows), 128, 64, stages=4))
        monkeypatch.setattr(gemm_tiles, "RULES", (narrow, wide))
    weights = [random(*SHAPES[name]) * 0.02 for name in ("qkv", "o", "gate_up", "down")]
    norm = torch.ones(4096, device="cuda").bfloat16()
    x = random(rows, 4096)
    out = torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda")

    def forward() -> None:
        y = x
        for _ in range(3):
            qkv = linear(fused.rms_norm(y, norm, 1e-5), weights[0], None, deterministic=False)
            y = linear(qkv[:, :4096], weights[1], None, deterministic=False)
            gate_up = linear(fused.rms_norm(y, norm, 1e-5), weights[2], None, deterministic=False)
            linear(fused.silu_mul(gate_up), weights[3], None, deterministic=False, out=out)
            y = out

    graph = captured(forward)
    for _ in range(20):
        x.copy_(random(rows, 4096))
        forward()
        eager = out.clone()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)
    y = x
    for _ in range(3):
        qkv = fused.rms_norm(y, norm, 1e-5) @ weights[0].t()
        y = qkv[:, :4096] @ weights[1].t()
        y = fused.silu_mul(fused.rms_norm(y, norm, 1e-5) @ weights[2].t()) @ weights[3].t()
    close(out, y.double(), 0.05)


def test_a_capture_that_would_zero_the_counters_in_the_graph_is_refused() -> None:
    from engine.kernels import gemm_device

    tile = Tile("dot", 16, 64, 128, 4)
    x, weight = random(1, 4096), random(64, 4096)
    stream = torch.cuda.Stream()
    gemm_device._counters_of.pop((x.device, stream.cuda_stream), None)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="once on the stream before"),
        torch.cuda.graph(graph, stream=stream),
    ):
        x.zero_()
        gemm_device.product(x, weight, None, tile)


# ---------------------------------------------------------------- deterministic
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down", *NARROW])
def test_a_row_has_the_same_bits_in_any_batch_and_place(name: str, dtype: torch.dtype) -> None:
    d_out, d_in = (SHAPES | NARROW)[name]
    weight, bias = random(d_out, d_in, dtype=dtype), random(d_out, dtype=dtype)
    rows = random(2048 if dtype == torch.bfloat16 else 200, d_in, dtype=dtype)
    for added in (None, bias):

        def of(batch: Tensor, added: Tensor | None = added) -> Tensor:
            return linear(batch, weight, added, deterministic=True)

        whole = of(rows)
        close(whole[:100], exact(rows[:100], weight, added), ERRORS[dtype])
        for first, last in ((0, 1), (77, 78), (13, 77), (100, 170), (3, 199)):
            assert torch.equal(of(rows[first:last]), whole[first:last])
        order = torch.randperm(199, device="cuda")
        assert torch.equal(of(rows[order]), whole[order])


def test_a_deterministic_product_replays_with_the_same_bits() -> None:
    x, weight = random(3, 4096), random(4096, 4096)
    out = torch.empty(3, 4096, dtype=torch.bfloat16, device="cuda")
    graph = captured(lambda: linear(x, weight, None, deterministic=True, out=out))
    for _ in range(10):
        x.copy_(random(3, 4096))
        graph.replay()
        assert torch.equal(out, linear(x, weight, None, deterministic=True))


def test_rules_name_only_tiles_that_the_card_has_memory_for() -> None:
    """A tile that is cut down to fewer stages is not the one that was measured."""
    from engine.kernels import backend

    shared = backend.shared_bytes(torch.device("cuda", 0))
    for rule in gemm_tiles.RULES:
        assert isinstance(rule, Rule)
        if rule.tile is not None and rule.tile.form != "vector":
            assert rule.tile.fitted(min(rule.d_in, 16384), 2, shared).stages == rule.tile.stages
