"""Rows of logits begin at borders where there are ids of adapters' own; so do those of copies:
kernels are compiled for how rows begin, and after the start none may be."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from engine.graphs import StepGraphs
from engine.kernels.sample_meta import SampleMeta
from engine.kernels.sample_reference import ReferenceOps
from engine.ladder import Ladder, Rung
from engine.messages import SamplingParams
from engine.models.decoder import STRIDE, Decoder
from engine.models.layers import Build
from engine.sampler import Sampler
from engine.sampling_plan import SamplerLimits
from engine.sequence import Sequence
from tests.fakes.tiny_spec import SPEC


def odd_decoder(extra_vocab: int) -> Decoder:
    spec = replace(SPEC, vocab_size=101, tied=True, extra_vocab=extra_vocab)
    decoder = Decoder(spec, Build(torch.device("cpu"), torch.float32, False))
    decoder.embedding.data.normal_()
    return decoder


def test_rows_that_are_picked_begin_as_those_that_they_are_picked_from() -> None:
    for extra, wanted in ((0, 101), (30, 3 * STRIDE)):
        decoder = odd_decoder(extra)
        graphs = StepGraphs(decoder, [], Ladder(max_seqs=4, mixed_rows=0))
        graphs._logits.copy_(torch.randn(graphs._logits.shape))
        graphs.use_graphs = True
        graphs._find = lambda *_: SimpleNamespace(replay=lambda: None)
        batch = SimpleNamespace(
            rung=Rung(4, 4),
            samples_every_row=False,
            sampled=("a", "b"),
            sample_rows=torch.tensor([3, 1, 0, 0]),
        )
        picked = graphs.run(batch, None)
        assert torch.equal(picked, graphs._logits[[3, 1]])
        assert picked.stride(0) == graphs._logits.stride(0) == wanted


class Noting(ReferenceOps):
    """Of what is told: the rows, and where each begins."""

    def tell(
        self,
        raw: torch.Tensor,
        tokens: torch.Tensor,
        meta: SampleMeta,
        width: int,
        told: torch.Tensor,
    ) -> None:
        self.raw = raw
        super().tell(raw, tokens, meta, width, told)


def test_what_is_told_is_the_raw_rows_which_begin_as_they_did() -> None:
    decoder = odd_decoder(30)
    ops, sampler = Noting(101, 131), Sampler(SamplerLimits(101, (2,), 131))
    sampler._ops = lambda logits: ops
    for bias in ({}, {5: 3.0}):
        logits = decoder.new_logits(3).copy_(torch.randn(3, 131))
        before = logits.clone()
        wish = SamplingParams(temperature=0.0, logprobs=2, logit_bias=bias)
        seqs = [Sequence("r", [1, 2], 2, wish, None, "base", "", 50, 0) for _ in range(3)]
        sampler.sample(logits, seqs)
        assert torch.equal(ops.raw, before) and ops.raw.stride() == logits.stride()
        assert torch.equal(logits, before) == (not bias)
