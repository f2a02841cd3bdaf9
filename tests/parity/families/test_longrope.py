"""Longrope: which of its two rotations a start chooses, and for which lengths it is exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import startup
from engine.config import EngineConfig
from engine.errors import ConfigError

Model = tuple[Path, Any]


def start(folder: Path, max_model_len: int) -> startup.Machine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        max_model_len=max_model_len,
        max_num_seqs=2,
        slots=1,
        ram_cache=1 << 20,
    )
    return startup.build(config, progress=lambda what, fraction: None, wake=lambda: None)


def theirs(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("asked", "served", "factors"),
    [
        (0, 32, "short_factor"),
        (20, 20, "short_factor"),
        (32, 32, "short_factor"),
        (33, 33, "long_factor"),
        (128, 128, "long_factor"),
    ],
)
def test_the_length_that_is_asked_for_decides(
    longrope_model: Model, asked: int, served: int, factors: str
) -> None:
    folder, model = longrope_model
    machine = start(folder, asked)
    assert machine.config.max_model_len == served
    rope = model.config.rope_parameters
    exponents = torch.arange(0, 12, 2) / 12
    expected = 1 / (torch.tensor(rope[factors]) * rope["rope_theta"] ** exponents)
    torch.testing.assert_close(machine.model.rotaries[0].inv_freq, expected)


def test_a_length_beyond_all_positions_is_refused(longrope_model: Model) -> None:
    with pytest.raises(ConfigError, match="128 positions"):
        start(longrope_model[0], 129)


def test_within_the_original_length_nothing_is_as_if_it_were_longer(
    longrope_model: Model, rig: Callable[..., Any]
) -> None:
    """A longer length that is asked for costs exactness below the original one."""
    folder, model = longrope_model
    torch.manual_seed(0)
    tokens = torch.randint(0, 131, (32,)).tolist()
    expected = theirs(model, tokens)
    assert (rig(folder).logits(tokens) - expected).abs().max() < 1e-4
    assert (rig(folder, max_len=128).logits(tokens) - expected).abs().max() > 0.1
