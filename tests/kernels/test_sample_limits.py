"""Rows whose ids end at different places: kernels and reference agree, and each row draws and tells
what it would among rows of its own kind, to the bit."""

import os
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton and the kernels are imported

from engine.kernels.sample_device import DeviceOps, Tiles
from engine.kernels.sample_filter import FilterTile
from engine.kernels.sample_race import RaceTile
from engine.kernels.sample_reference import ReferenceOps
from engine.kernels.sample_tell import TellTile
from engine.messages import SamplingParams
from engine.sampler import Sampler
from engine.sampling_plan import SamplerLimits
from engine.sequence import Sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Tiles(RaceTile(64, 1), FilterTile(128, 64, 1), TellTile(64, 1))
#: The base draws 300 of its 310 columns; there are 400.
BASE, PADDED, WIDTH = 300, 310, 400
#: Of rows side by side: 0 = the base's; fewer, some of the padding, and more than the base has.
LIMITS = (0, 277, 306, 311, 400, 0)

WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 5},
    {"top_k": 350},
    {"top_p": 0.8},
    {"top_p": 0.99, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 4},
    {"top_p": 0.9, "logprobs": 30, "logit_bias": {7: 3.0, 270: 1.0, 299: -4.0, 390: 2.0}},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"allowed_token_ids": (3, 9, 250)},
]


def sequence(limit: int, **params: Any) -> Sequence:
    wish = SamplingParams(**{"temperature": 1.0, "seed": 5, **params})
    return Sequence("r", [1, 2, 290, 271], 4, wish, None, "base", "", 50, 0, num_tokens=limit)


def make(kernels: bool, width: int = WIDTH) -> Sampler:
    limits = SamplerLimits(BASE, (2,), width)
    ops = None
    if kernels:
        ops = DeviceOps(DEVICE, rows=8, vocab=BASE, width=width, tiles=SMALL)
    sampler = Sampler(limits, device=DEVICE, max_rows=8, kernels=ops)
    if kernels:
        sampler._ops = lambda logits: ops
    else:
        sampler._ops = lambda logits: ReferenceOps(BASE, width)
    return sampler


def logits(seed: int = 0) -> Tensor:
    """Rows in which what a row may not draw is NaN, or would win every draw."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(LIMITS), WIDTH, generator=generator) * 3
    for row, limit in zip(rows, LIMITS, strict=True):
        row[limit or BASE :] = torch.tensor([99.0, torch.nan]).repeat(WIDTH)[
            : WIDTH - (limit or BASE)
        ]
    return rows.to(DEVICE)


def drawn(sampler: Sampler, rows: Tensor, seqs: Seq[Sequence]) -> list[Any]:
    return [(one.token, one.logprobs, one.doom) for one in sampler.sample(rows.clone(), seqs)]


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_a_row_draws_and_tells_the_same_bits_whoevers_vocabulary_is_beside_it(
    wish: dict[str, Any], kernels: bool
) -> None:
    sampler, rows = make(kernels), logits()
    seqs = [sequence(limit, **wish) for limit in LIMITS]
    together = drawn(sampler, rows, seqs)
    for row, limit in enumerate(LIMITS):
        assert 0 <= together[row][0] < (limit or BASE) and together[row][2] is None
        assert drawn(sampler, rows[row : row + 1], seqs[row : row + 1]) == [together[row]]
    alone = make(kernels, BASE)  # an engine without more ids
    for row in (0, 5):
        assert drawn(alone, rows[row : row + 1, :PADDED], seqs[row : row + 1]) == [together[row]]


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_kernels_close_and_draw_as_the_reference(wish: dict[str, Any]) -> None:
    seqs = [sequence(limit, **wish) for limit in LIMITS]
    for seed in range(3):
        ours, theirs = (drawn(make(k), logits(seed), seqs) for k in (True, False))
        assert [one[0] for one in ours] == [one[0] for one in theirs]
        for (_, told, _), (_, right, _) in zip(ours, theirs, strict=True):
            assert (told is None) == (right is None)
            if told is not None:
                assert told.logprob == pytest.approx(right.logprob, abs=1e-5)
                assert [t for t, _ in told.top] == [t for t, _ in right.top]


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_only_columns_behind_the_least_limit_are_touched(kernels: bool) -> None:
    sampler, rows = make(kernels), torch.zeros(3, WIDTH + 40, device=DEVICE)[:, :WIDTH]
    behind = rows.as_strided((3, 40), (WIDTH + 40, 1), WIDTH)
    plan = sampler._planner.plan([sequence(limit) for limit in (0, 277, 311)])
    sampler._ops(rows).close(rows, plan.send(sampler._up))
    ends = [int((row == 0).sum()) for row in rows]
    assert ends == [300, 277, 311] and not behind.any()
    assert all((row[end:] == -torch.inf).all() for row, end in zip(rows, ends, strict=True))


def test_nothing_more_is_launched_where_nobody_has_ids_of_its_own() -> None:
    """The plan of base rows holds no limits to close at, greedy ones have no words at all."""
    sampler = make(True)
    greedy = sampler._planner.plan([sequence(0, temperature=0.0)])
    assert not len(greedy.words) and greedy.meta.least == 0
    assert sampler._planner.plan([sequence(0), sequence(BASE)]).meta.least == 0
    assert sampler._planner.plan([sequence(0), sequence(276)]).meta.least == 276
    assert sampler._planner.plan([sequence(0), sequence(311)]).meta.least == BASE


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_prompts_tell_of_their_own_ids_alone(kernels: bool) -> None:
    sampler, rows = make(kernels), logits()[3:5]
    [first, second] = (
        sampler.prompt_logprobs(row[None].clone(), [290], 3, limit)[0]
        for row, limit in zip(rows, (311, 400), strict=True)
    )
    for one, row, limit in ((first, rows[0], 311), (second, rows[1], 400)):
        right = row[:limit].double().log_softmax(-1)
        assert one.logprob == pytest.approx(float(right[290]), abs=1e-5)
        assert [t for t, _ in one.top] == right.topk(3).indices.tolist()


def test_a_prompts_id_of_the_padding_is_told_beside_the_bases_whoever_computes() -> None:
    rows, told = torch.randn(2, WIDTH, device=DEVICE), []
    right = rows.double()[:, :BASE].logsumexp(-1)
    for kernels in (False, True):
        one, other = make(kernels).prompt_logprobs(rows.clone(), [PADDED - 1, 7], 3)
        assert one.logprob == pytest.approx(float(rows[0, PADDED - 1] - right[0]), abs=1e-5)
        assert other.logprob == pytest.approx(float(rows[1, 7] - right[1]), abs=1e-5)
        told.append([[token for token, _ in each.top] for each in (one, other)])
    assert told[0] == told[1] and max(told[0][0]) < BASE


def test_masks_of_any_vocabulary_lie_side_by_side() -> None:
    """A guide's mask has a bit for each id of its row's own vocabulary."""
    seqs = [sequence(limit, temperature=0.0) for limit in (0, 277, 400)]
    rows = torch.randn(3, WIDTH, device=DEVICE)
    for kernels in (False, True):
        sampler, masks = make(kernels), {}
        for row, (token, limit) in enumerate(((299, 300), (276, 277), (399, 400))):
            masks[row] = np.zeros(-(-limit // 32), np.uint32)
            masks[row][token // 32] = 1 << token % 32
        plan = sampler.launch(rows.clone(), seqs, masks=masks)
        assert [one.token for one in sampler.finish(plan)] == [299, 276, 399]


def test_guesses_are_of_the_bases_ids_and_no_bias_goes_beyond_their_logits() -> None:
    """A model that drafts has as many columns as the base's tokenizer has ids."""
    for kernels in (False, True):
        sampler = make(kernels)
        memory = torch.zeros(2, BASE + 100, device=DEVICE)
        seqs = [
            sequence(400, temperature=0.0, logit_bias={350: 50.0, 17: 9.0}),
            sequence(400, temperature=0.0, allowed_token_ids=(5, 390)),
        ]
        tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        sampler.draft(memory[:, :BASE], seqs, 1, tokens)
        assert tokens.tolist() == [17, 5] and not memory[:, BASE:].any()
