"""The decoder through the Triton kernels, eager, on the interpreter: against plain torch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine.kernels import backend


def test_the_decoder_gives_the_same_logits_through_the_kernels(
    random_folder: Path,
    random_slots: Any,
    rig: Callable[..., Any],
    line: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Qwen3 of odd sizes: norms per head, a window, a chunk beside a decode, an adapter."""
    torch.manual_seed(5)
    long, short = (torch.randint(0, 333, (n,)).tolist() for n in (56, 4))

    def steps() -> list[torch.Tensor]:
        runner = rig(random_folder, slots=random_slots)
        first, second = line(long, -1), line(short, 1)
        return [*runner.step((first, 44), (second, 3)), *runner.step((first, 12), (second, 1))]

    want = steps()
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    for got, expected in zip(steps(), want, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)
