"""Deterministic mode: a row's bits do not depend on what else is in the batch, nor on chunking."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine.kernels import backend

LENGTHS = (90, 5, 17, 64, 33, 2, 130)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ours(random_folder: Path, random_slots: Any, rig: Callable[..., Any]) -> Any:
    return rig(random_folder, deterministic=True, slots=random_slots)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    torch.manual_seed(5)
    return [torch.randint(0, 333, (n,)).tolist() for n in LENGTHS]


ASSIGNED = (-1, 0, 1, 0, -1, 1, 0)


def bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_row_has_the_same_bits_alone_and_in_a_batch_of_seven(
    ours: Any, prompts: list[list[int]]
) -> None:
    together = ours.together(prompts, ASSIGNED)
    for prompt, slot, got in zip(prompts, ASSIGNED, together, strict=True):
        assert bits(ours.logits(prompt, slot), got)


@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_same_bits_in_a_batch_with_two_threads(
    ours: Any, prompts: list[list[int]]
) -> None:
    together = ours.together(prompts, ASSIGNED)
    for prompt, slot, got in zip(prompts, ASSIGNED, together, strict=True):
        assert bits(ours.logits(prompt, slot), got)


def test_a_row_has_the_same_bits_at_any_place_in_the_batch(
    ours: Any, prompts: list[list[int]]
) -> None:
    order = [6, 3, 0, 5, 1, 4, 2]
    forward = ours.together(prompts, ASSIGNED)
    shuffled = ours.together([prompts[i] for i in order], [ASSIGNED[i] for i in order])
    for i, got in zip(order, shuffled, strict=True):
        assert bits(got, forward[i])


@pytest.mark.parametrize(
    ("slot", "sizes"), [(-1, []), (0, [64, 64]), (1, [1, 15, 50]), (1, [33, 80]), (0, [129])]
)
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(
    ours: Any, prompts: list[list[int]], slot: int, sizes: list[int]
) -> None:
    assert bits(ours.in_chunks(prompts[6], sizes, slot), ours.logits(prompts[6], slot))


def test_decoding_beside_others_gives_the_same_bits_as_alone(
    ours: Any, line: Callable[..., Any], prompts: list[list[int]]
) -> None:
    """Six lines join one after the other while the first decodes; prefills and decodes mix."""
    alone = [ours.logits(p, s) for p, s in zip(prompts, ASSIGNED, strict=True)]
    lines = [line(list(p), s) for p, s in zip(prompts, ASSIGNED, strict=True)]
    seen: list[list[Tensor]] = [[] for _ in lines]
    for step in range(200):
        started = [i for i, one in enumerate(lines) if i <= step // 3]
        work = [(i, 1 + (step * i) % 20) for i in started if lines[i].done < LENGTHS[i]]
        if not work:
            continue
        cut = [(lines[i], min(n, LENGTHS[i] - lines[i].done)) for i, n in work]
        for (i, _), rows in zip(work, ours.step(*cut), strict=True):
            seen[i].append(rows)
    for rows, expected in zip(seen, alone, strict=True):
        assert bits(torch.cat(rows), expected)


def test_the_same_rows_differ_without_deterministic_mode(
    random_folder: Path,
    random_slots: Any,
    rig: Callable[..., Any],
    prompts: list[list[int]],
) -> None:
    """Otherwise the tests above would prove nothing on this machine."""
    plain = rig(random_folder, slots=random_slots)
    together = plain.together(prompts, ASSIGNED)
    alone = [plain.logits(p, s) for p, s in zip(prompts, ASSIGNED, strict=True)]
    assert not all(bits(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off beside a card")
def test_the_way_that_a_card_takes_gives_a_row_the_same_bits(
    ours: Any, line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused row kernels and paged attention, on the interpreter: alone, in a batch, in chunks."""
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    torch.manual_seed(6)
    prompts = [torch.randint(0, 333, (n,)).tolist() for n in (17, 1, 5)]  # a block has 16
    slots = (1, -1, 0)
    together = ours.together(prompts, slots)
    for prompt, slot, got in zip(prompts, slots, together, strict=True):
        assert bits(ours.logits(prompt, slot), got)
    assert bits(ours.in_chunks(prompts[0], [6, 10], 1), together[0])
