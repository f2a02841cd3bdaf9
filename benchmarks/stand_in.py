"""What a generator's decode steps ask of a card, without the minute of its start.

Goes in: how many streams, how many layers.  Comes out: pauses between steps.  The matrix products
of Llama-3-8B as one CUDA graph, replayed again and again: it reads the same bytes, and has no
attention and no sampler.
"""

import time
from itertools import pairwise

import torch
from streams import spread
from torch import Tensor

#: (outputs, inputs) of a layer's products.
PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
HEAD = 128256, 4096


class StandIn:
    """Takes 16 GB of the card with 32 layers."""

    def __init__(self, streams: int, layers: int = 32) -> None:
        self._streams = streams
        told = {"device": "cuda", "dtype": torch.bfloat16}
        sizes = [*PRODUCTS * layers, HEAD]
        self._weights = [torch.zeros(size, **told) for size in sizes]  # type: ignore[call-overload]
        self._rows = {
            width: torch.zeros(streams, width, **told)  # type: ignore[call-overload]
            for width in {inputs for _, inputs in sizes}
        }
        self._graph = torch.cuda.CUDAGraph()
        self._compute()
        with torch.cuda.graph(self._graph):
            self._kept = self._compute()

    def steady(self, seconds: float) -> dict[str, object]:
        """As of a workload of streams: a step's end is a token of each."""
        ends = [time.perf_counter()]
        while ends[-1] < ends[0] + seconds:
            self._graph.replay()
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
        gaps = [after - before for before, after in pairwise(ends)]
        rate = self._streams * len(gaps) / (ends[-1] - ends[0])
        return {
            "batch": self._streams,
            "tokens_per_s": round(rate, 1),
            "step_ms": round(1e3 * self._streams / rate, 3),
            **spread(gaps, "itl", most=True),
        }

    def _compute(self) -> list[Tensor]:
        return [self._rows[weight.shape[1]] @ weight.t() for weight in self._weights]
