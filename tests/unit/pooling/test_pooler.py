"""Pooling against the same sums over padded rows with a mask."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ModelUnsupported
from engine.pooling.pooler import POOLS, Pooler
from engine.pooling.spec import DenseSpec, PoolingKind, PoolingSpec

LENGTHS = (3, 1, 6)
KINDS: tuple[PoolingKind, ...] = tuple(POOLS)


def hidden() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(sum(LENGTHS), 5)


def by_mask(kind: PoolingKind, prompts: tuple[int, ...], left: bool) -> Tensor:
    """(sequences, 5), from rows that are padded on the left or on the right with rubbish."""
    found, first, longest = [], 0, max(LENGTHS)
    for length, prompt in zip(LENGTHS, prompts, strict=True):
        padded = torch.full((longest, 5), 77.0)
        begin = longest - length if left else 0
        padded[begin : begin + length] = hidden()[first : first + length]
        mask = torch.zeros(longest)
        mask[begin + prompt : begin + length] = 1
        places = (torch.arange(longest) - begin + 1.0) * mask
        rows = padded * mask[:, None]
        found.append(
            {
                "cls": padded[int(mask.argmax())],
                "last": padded[begin + length - 1],
                "mean": rows.sum(0) / mask.sum(),
                "mean_sqrt_length": rows.sum(0) / mask.sum().sqrt(),
                "weighted_mean": (padded * places[:, None]).sum(0) / places.sum(),
                "max": padded.masked_fill(mask[:, None] == 0, -torch.inf).amax(0),
            }[kind]
        )
        first += length
    return torch.stack(found)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_equals_masked_sums_on_either_side_of_padding(
    kind: PoolingKind, left: bool
) -> None:
    pooler = Pooler(PoolingSpec((kind,)), Path(), hidden_size=5)
    got = pooler.pool(hidden().split(LENGTHS))
    torch.testing.assert_close(got, by_mask(kind, (0, 0, 0), left))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_left_out_where_the_model_says_so(kind: PoolingKind) -> None:
    prompts = (1, 0, 4)
    without = Pooler(PoolingSpec((kind,), include_prompt=False), Path(), hidden_size=5)
    got = without.pool(hidden().split(LENGTHS), prompts)
    torch.testing.assert_close(got, by_mask(kind, prompts, False))
    with_it = Pooler(PoolingSpec((kind,)), Path(), hidden_size=5)
    assert torch.equal(
        with_it.pool(hidden().split(LENGTHS), prompts), with_it.pool(hidden().split(LENGTHS))
    )


def test_several_kinds_stand_side_by_side() -> None:
    pooler = Pooler(PoolingSpec(("cls", "mean")), Path(), hidden_size=5)
    got = pooler.pool(hidden().split(LENGTHS))
    parts = [by_mask("cls", (0, 0, 0), False), by_mask("mean", (0, 0, 0), False)]
    torch.testing.assert_close(got, torch.cat(parts, 1))
    assert pooler.width == 10


def test_half_precision_is_summed_in_fp32() -> None:
    many = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
    got = Pooler(PoolingSpec(), Path(), hidden_size=1).pool([many])
    assert got.dtype == torch.float32 and got.item() == 1.0


def test_dense_then_normalize_then_cut_and_normed_anew(tmp_path: Path) -> None:
    torch.manual_seed(5)
    weight, bias, x = torch.randn(4, 5), torch.randn(4), torch.randn(2, 5)
    (tmp_path / "2_Dense").mkdir()
    tensors = {"linear.weight": weight, "linear.bias": bias}
    save_file(tensors, tmp_path / "2_Dense/model.safetensors")
    dense = DenseSpec("2_Dense", 5, 4, True, "tanh")
    pooler = Pooler(PoolingSpec(steps=(dense, "normalize")), tmp_path, hidden_size=5)
    raw = torch.tanh(x @ weight.T + bias)
    torch.testing.assert_close(pooler.finish(x), raw / raw.norm(dim=1, keepdim=True))
    torch.testing.assert_close(pooler.finish(x, normalize=False), raw)
    cut = raw[:, :3]
    torch.testing.assert_close(pooler.finish(x, dimensions=3), cut / cut.norm(dim=1, keepdim=True))
    torch.testing.assert_close(pooler.finish(x, normalize=False, dimensions=3), cut)
    plain = Pooler(PoolingSpec(steps=(dense,)), tmp_path, hidden_size=5)
    torch.testing.assert_close(plain.finish(x), raw)
    torch.testing.assert_close(plain.finish(x, normalize=True), pooler.finish(x))


def test_a_dense_of_another_width_is_refused(tmp_path: Path) -> None:
    spec = PoolingSpec(steps=(DenseSpec("2_Dense", 8, 4, True, "tanh"),))
    with pytest.raises(ModelUnsupported, match="8 numbers"):
        Pooler(spec, tmp_path, hidden_size=5)


def test_a_vector_of_zeros_stays_one() -> None:
    pooler = Pooler(PoolingSpec(steps=("normalize",)), Path(), hidden_size=5)
    assert pooler.finish(torch.zeros(1, 5)).abs().sum() == 0
