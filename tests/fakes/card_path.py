"""The way that steps take on a card, on a machine that has none: padded, with device plans, from
graphs.

Goes in: pytest's monkeypatch, in a test whose file has Triton interpret its kernels.
Comes out: an engine that is built takes that way, until the test ends.  What a step reads and
nobody has written is NaN.
"""

from typing import Any

import numpy as np
import pytest
import torch

from engine import assembly, graphs
from engine.kernels import backend


class Tape:
    """Stands in for a CUDA graph: tensors and sizes of the capture, and no number of the step."""

    def __init__(self, owner: graphs.StepGraphs, *capture: Any) -> None:
        self.owner, self.capture = owner, capture
        # Ranks count what they take part in: a replay on a card is silent, this one tells again.
        owner._collectives[graphs._key(*capture)] = 0

    def replay(self) -> None:
        with np.errstate(all="ignore"):  # rows of nobody hold anything
            self.owner._compute(*self.capture)


def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
    """Where torch gives memory as it finds it: NaN, so that whoever reads it is found out."""
    memory = torch.zeros(*shape, **options)
    return memory.fill_(torch.nan) if memory.is_floating_point() else memory


def take(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on."""
    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    monkeypatch.setattr(assembly, "is_card", lambda device: True)
    monkeypatch.setattr(graphs.StepGraphs, "_record", lambda *capture: Tape(*capture))
