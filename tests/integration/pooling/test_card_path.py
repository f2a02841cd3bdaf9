"""LoRA of a pooling engine as on a card, on Triton's interpreter: device plans and kernels."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine import assembly
from engine import compile_ahead as compiling
from engine.adapters.pack import pack_into
from engine.adapters.plan import StepPlanner
from engine.kernels import backend
from engine.messages import AddRevision, PackedManifest
from engine.models import encoder
from engine.models.layers import LoraLinear
from engine.pooling import core
from engine.pooling.config import PoolingConfig
from engine.pooling.core import PoolingCore
from tests.fakes.tiny_qwen3 import NO, YES, write_qwen3, write_qwen3_adapter

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


def test_sums_norms_and_pooling_by_kernels_give_what_torch_gives(
    drive: Callable[..., Any],
    pack: Callable[[int], PackedManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"deterministic": False}
    expected = answers(drive(**told), manifests := [pack(1)])
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    monkeypatch.setattr(encoder, "FUSED_NUMBERS", 0)
    got = answers(drive(**told), manifests)
    for name, values in expected.items():
        assert np.abs(got[name] - values).max() < 1e-5, name


def test_kernels_for_adapters_are_compiled_before_a_card_is_ready(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def compile_ahead(layers: torch.nn.Module, planner: StepPlanner, ladder: None) -> None:
        groups = {m.group for m in layers.modules() if isinstance(m, LoraLinear)}
        plans = list(planner.every_choice())
        told.append(f"{len(groups)} groups, {len(plans) > 2}")

    monkeypatch.setattr(compiling, "compile_ahead", compile_ahead)
    config = PoolingConfig(model=str(model), device="cpu", adapter_pool=4 << 20, threads=1)

    def start() -> None:
        PoolingCore(config, progress=lambda what, _: told.append(what)).close()

    start()
    assert told[-1] == "ready" and "kernels" not in told, "nothing to compile for on a CPU"
    monkeypatch.setattr(assembly, "is_card", lambda device: True)
    monkeypatch.setattr(core, "is_card", lambda device: True)
    start()
    assert told[-3:] == ["kernels", "4 groups, True", "ready"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[PackedManifest]]:
    """A Qwen3, and adapters of which one has a head of its own."""
    root = tmp_path_factory.mktemp("decoder")
    base, manifests = write_qwen3(root / "base"), []
    for seed, labels in ((1, 0), (2, 3), (3, 0)):
        folder = write_qwen3_adapter(root / f"adapter{seed}", seed, labels=labels)
        told = {"block_size": 0, "dtype": "float32", "max_rank": 64}
        manifests.append(pack_into(folder, base, root / "store", **told))
    return base, manifests


@pytest.mark.slow
def test_the_kernels_of_a_decoder_give_what_torch_gives(
    drive: Callable[..., Any],
    decoder: tuple[Path, list[PackedManifest]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention, norms and LoRA all through the kernels, and what adapters have at the ends."""
    base, manifests = decoder
    words = {"score_tokens": (YES, NO)}
    expected = answers(drive(base, **words), manifests)
    monkeypatch.setattr(assembly, "is_card", lambda device: True)
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    small = {"slots": 2, "max_rank": 16, "max_batch_tokens": 11, "max_num_seqs": 4}
    driver = drive(base, deterministic=False, starve_after=0.1, **words, **small)
    driver.tick = 0.05
    got = answers(driver, manifests)
    for name, values in expected.items():
        assert np.abs(got[name] - values).max() < 1e-3 * max(1.0, np.abs(values).max()), name


@pytest.mark.gpu
def test_a_card_gives_what_a_cpu_gives_with_a_decoder(
    drive: Callable[..., Any], decoder: tuple[Path, list[PackedManifest]]
) -> None:
    base, manifests = decoder
    words = {"score_tokens": (YES, NO)}
    expected = answers(drive(base, **words), manifests)
    for deterministic in (False, True):
        told = {"device": "cuda", "deterministic": deterministic, "dtype": "float32"}
        got = answers(drive(base, **words, **told), manifests)
        for name, values in expected.items():
            assert np.abs(got[name] - values).max() < 1e-3 * max(1.0, np.abs(values).max()), name


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
