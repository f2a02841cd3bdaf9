"""The same decoder and ops on a card, eager: against the CPU's fp32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.lora_meta import LoraRows

pytestmark = pytest.mark.gpu

LENGTHS = (90, 1, 17, 64, 1, 2, 130)
ASSIGNED = (-1, 0, 1, 0, -1, 1, 0)


def moved(slots: dict[int, Any], dtype: torch.dtype) -> dict[int, Any]:
    def there(pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(piece.to("cuda", dtype) for piece in pieces)

    return {
        slot: {
            key: LoraRows(rows.scaling, rows.rank, there(rows.a), there(rows.b))
            for key, rows in pairs.items()
        }
        for slot, pairs in slots.items()
    }


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15), (torch.float16, 0.02)]
)
def test_a_mixed_batch_on_the_card_equals_the_cpu(
    random_folder: Path,
    random_slots: Any,
    rig: Callable[..., Any],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """The tolerance is relative to the spread of the logits; seen on an H200: 0.1 in bf16."""
    torch.manual_seed(5)
    prompts = [torch.randint(0, 333, (n,)).tolist() for n in LENGTHS]
    cpu = rig(random_folder, slots=random_slots)
    card = rig(random_folder, slots=moved(random_slots, dtype), device="cuda", dtype=dtype)
    expected = cpu.together(prompts, ASSIGNED)
    whole = card.together(prompts, ASSIGNED)
    for prompt, slot, want, got in zip(prompts, ASSIGNED, expected, whole, strict=True):
        cut = card.in_chunks(prompt, [20, 33], slot)
        for result in (got, cut):
            assert result.dtype == torch.float32
            assert (result.cpu() - want).abs().max() <= tolerance * want.std()
