"""LoRA of a pooling engine as on a card, on Triton's interpreter: device plans and kernels."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine import assembly
from engine.messages import AddRevision, PackedManifest

LENGTHS = (5, 1, 9, 4, 13)


def answers(driver: Any, manifests: list[PackedManifest]) -> dict[str, Any]:
    for i, manifest in enumerate(manifests):
        driver.core.take(AddRevision(command_id=i, manifest=manifest))
    revs = [None, *(m.rev for m in manifests)]
    names = []
    for n, length in enumerate(LENGTHS):
        names.append(f"r{n}")
        tokens = [3 + n + i % 7 for i in range(length)]
        task = ("classify", "embed")[n == 4]
        driver.ask(names[-1], revs[n % len(revs)], task=task, tokens=tokens)
    driver.until(lambda: set(names) <= driver.results.keys())
    return {name: driver.results[name].values for name in names}


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_kernels_give_what_torch_gives(
    drive: Callable[..., Any],
    pack: Callable[[int], PackedManifest],
    monkeypatch: pytest.MonkeyPatch,
    deterministic: bool,
) -> None:
    manifests = [pack(1), pack(2), pack(3)]
    expected = answers(drive(), manifests)
    monkeypatch.setattr(assembly, "is_card", lambda device: True)
    # Two slots for three adapters, so that rows of the device's table are written anew; and an
    # input that is longer than the budget.
    small = {"slots": 2, "max_rank": 16, "max_batch_tokens": 11, "max_num_seqs": 4}
    driver = drive(deterministic=deterministic, starve_after=0.1, **small)
    driver.tick = 0.05
    got = answers(driver, manifests)
    for name, values in expected.items():
        assert np.abs(got[name] - values).max() < 1e-4, name


@pytest.mark.gpu
def test_a_card_gives_what_a_cpu_gives(
    drive: Callable[..., Any], pack: Callable[[int], PackedManifest]
) -> None:
    manifests = [pack(1), pack(2), pack(3)]
    expected = answers(drive(), manifests)
    for deterministic in (False, True):
        got = answers(drive(device="cuda", deterministic=deterministic, dtype="float32"), manifests)
        for name, values in expected.items():
            assert np.abs(got[name] - values).max() < 1e-3, name
