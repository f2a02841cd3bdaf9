"""A mixed step's prompts and decode rows, whose attention runs at once on a card."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_meta import AttentionMeta

pytestmark = pytest.mark.gpu

LAYERS, HEADS, KV_HEADS, DIM, BLOCK, HIDDEN = 6, 32, 8, 128, 16, 2048


class Chain:
    """Layers of rotation, attention and two products, as a graph has them."""

    def __init__(self, sequences: list[tuple[int, int]]) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda").bfloat16()

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        lens = [keys for keys, _ in sequences]
        starts = list(itertools.accumulate((rows for _, rows in sequences), initial=0))
        counts = [-(-keys // BLOCK) for keys in lens]
        order = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        padded = [*order, *[torch.zeros(0, dtype=torch.int32)] * 3]
        self.tables = torch.stack([F.pad(t, (0, max(counts) - len(t))) for t in padded]).cuda()
        at = [keys - rows + i for keys, rows in sequences for i in range(rows)]
        owner = [s for s, (_, rows) in enumerate(sequences) for _ in range(rows)]
        blocks = self.tables[owner, [position // BLOCK for position in at]].long()
        self.slots = blocks * BLOCK + torch.tensor(at, device="cuda") % BLOCK
        self.lens = ints([*lens, 0, 0, 0])
        self.starts = ints([*starts, *[starts[-1]] * 3])
        angle = torch.rand(len(at), 1, DIM // 2, device="cuda")
        self.angles = angle.cos(), angle.sin()
        shape = (sum(counts), LAYERS, 2, BLOCK, KV_HEADS, DIM)
        self.arena = random(*shape)
        self.qkv = random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN) * HIDDEN**-0.5
        self.o = random(HIDDEN, HEADS * DIM) * 0.1
        self.x = random(len(at), HIDDEN)

    def run(self) -> Tensor:
        """Attention of all layers, (LAYERS, T, heads, head_dim)."""
        from engine.kernels.attention_device import device_attention
        from engine.kernels.fused_heads import rotate_and_write
        from engine.kernels.gemm import linear

        meta = AttentionMeta(
            (),
            (),
            torch.empty(0),
            self.tables,
            BLOCK,
            seq_lens_device=self.lens,
            query_starts_device=self.starts,
        )
        x, outs = self.x, []
        for layer in range(LAYERS):
            kv = self.arena[:, layer]
            qkv = linear(x, self.qkv, None, deterministic=False)
            q, _, _ = rotate_and_write(qkv, kv, self.slots, self.angles, heads=HEADS)
            outs.append(device_attention(q, kv, meta, scale=DIM**-0.5, window=0))
            x = linear(outs[-1].flatten(1), self.o, None, deterministic=False)
        return torch.stack(outs)

    def captured(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = self.run()
        return graph, outs


@pytest.mark.parametrize(
    "sequences",
    [
        [(576, 1)] * 64 + [(16, 16)],
        [(900, 1)] * 3 + [(4000, 20), (1, 1), (30, 2)],
        [(1024, 1)] * 40 + [(300, 300), (700, 77)],
        [(40, 3)] * 30,
        [(576, 1)] * 30,
    ],
    ids=["a newcomer", "cut, and put together apart", "large", "no decode rows", "no prompts"],
)
def test_prompts_beside_decode_rows_have_the_bits_of_one_after_the_other(
    sequences: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(sequences)
    graph, outs = chain.captured()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "dependent_launch", lambda device: False)
        slow, want = chain.captured()
    for _ in range(20):
        chain.x.normal_()
        for replayed in (slow, graph):
            outs.fill_(torch.nan)
            replayed.replay()
        assert want.isfinite().all()
        assert torch.equal(outs, want)
