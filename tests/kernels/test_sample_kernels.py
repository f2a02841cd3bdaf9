"""The sampling kernels against `sample_reference`: on a card, or on Triton's interpreter."""

import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton and the kernels are imported

import triton
import triton.language as tl

from engine.kernels import sample_reference
from engine.kernels.sample_device import DeviceOps, Tiles
from engine.kernels.sample_filter import FilterTile
from engine.kernels.sample_meta import NOT_FINITE, NOTHING_LEFT
from engine.kernels.sample_parts import gumbel
from engine.kernels.sample_race import RaceTile
from engine.kernels.sample_reference import ReferenceOps
from engine.kernels.sample_search import bound_of_filters
from engine.kernels.sample_tell import TellTile
from engine.messages import SamplingParams
from engine.sampling_plan import Planner, SamplerLimits
from engine.sequence import Sequence
from engine.upload import Parcel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: So small that rows of a few hundred tokens take every way: splits, lists, whole rows.
SMALL = Tiles(RaceTile(64, 1), FilterTile(128, 64, 1), TellTile(64, 1))
EOS = 2
#: A card overflows in silence, numpy does not.
of_the_interpreter = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def sequence(tokens: Seq[int] = (1, 2, 3), *, num_prompt: int | None = None, **params: Any):
    return Sequence(
        request_id="r",
        tokens=list(tokens),
        num_prompt=len(tokens) if num_prompt is None else num_prompt,
        sampling=SamplingParams(**{"temperature": 1.0, "seed": 0, **params}),
        rev=None,
        identity="base",
        salt="",
        priority=50,
        order=0,
    )


def random_logits(rows: int, vocab: int, *, padding: int = 0, seed: int = 0) -> Tensor:
    """Rows with padding behind them that would win every draw."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    return torch.cat([logits, torch.full((rows, padding), 99.0)], 1)


@dataclass
class Result:
    tokens: list[int]
    told: Tensor
    logits: Tensor
    ids: list[int]


def run(ops: Any, logits: Tensor, seqs: Seq[Sequence], vocab: int, device: torch.device) -> Result:
    limits = SamplerLimits(vocab_size=vocab, eos_token_ids=(EOS,))
    plan = Planner(limits, b"", 8).plan(seqs)
    meta = plan.send(Parcel(1 << 16, device))
    rows, logits = len(seqs), logits.clone().to(device)
    raw = logits.clone()
    width = min(max(plan.num_top.values(), default=0), vocab)
    told = torch.zeros(rows * (2 + 2 * width), dtype=torch.float64, device=device)
    ids = torch.full((rows,), -7, dtype=torch.int64, device=device)
    ops.draw(logits, meta, ids, told[:rows])
    if plan.num_top:
        ops.tell(raw, ids, meta, width, told[rows:])
    tokens = told[:rows].long().tolist()
    return Result(tokens, told[rows:].cpu(), logits.cpu(), ids.tolist())


def both(logits: Tensor, seqs: Seq[Sequence], vocab: int, tiles: Tiles) -> tuple[Result, Result]:
    kernels = DeviceOps(DEVICE, rows=len(seqs), vocab=vocab, tiles=tiles)
    want = run(ReferenceOps(vocab), logits, seqs, vocab, torch.device("cpu"))
    return run(kernels, logits, seqs, vocab, DEVICE), want


def check(logits: Tensor, seqs: Seq[Sequence], vocab: int, tiles: Tiles = SMALL) -> Result:
    got, want = both(logits, seqs, vocab, tiles)
    assert got.tokens == want.tokens
    assert got.ids == [max(token, 0) for token in got.tokens]
    torch.testing.assert_close(got.told, want.told, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=0, equal_nan=True)
    return got


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 60},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 1 << 40},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"top_p": 0.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 100, "top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.1},
    {"top_p": 0.9, "temperature": 30.0},
    {"top_k": 30, "temperature": 0.01},
]


@triton.jit
def noise(words, out, SIZE: tl.constexpr, CARD: tl.constexpr):
    ids = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + ids, gumbel(ids, tl.load(words), tl.load(words + 1), CARD))


def test_the_noise_is_the_references() -> None:
    words = torch.tensor([-123456789, 987654321], dtype=torch.int32, device=DEVICE)
    out = torch.empty(1 << 16, device=DEVICE)
    noise[(16,)](words, out, SIZE=1 << 12, CARD=DEVICE.type == "cuda")
    want = sample_reference.gumbel(torch.arange(1 << 16), *words.tolist())
    torch.testing.assert_close(out.cpu(), want, atol=5e-6, rtol=2e-6)


@pytest.mark.parametrize("vocab", [1, 17, 63, 64, 65, 700])
def test_greedy_and_hot_rows_of_any_width(vocab: int) -> None:
    logits = random_logits(5, vocab, padding=3)
    assert check(logits, [sequence(temperature=0.0)] * 5, vocab).tokens == (
        logits[:, :vocab].argmax(-1).tolist()
    )
    mixed = [sequence(temperature=t, seed=i) for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 5.0))]
    check(logits, mixed, vocab)


@pytest.mark.parametrize("vocab", [1, 17, 200, 700])
def test_filtered_rows_of_any_width(vocab: int) -> None:
    seqs = [sequence(seed=i, **params) for i, params in enumerate(FILTERS)]
    check(random_logits(len(seqs), vocab, padding=5), seqs, vocab)


@triton.jit
def bounds(values, out, count, limited, top_k, top_p, peak, heat, total, TAKE: tl.constexpr):
    bound, place = bound_of_filters(
        values, count, limited > 0, top_k, top_p, peak, heat, total, TAKE
    )
    tl.store(out, bound)
    tl.store(out + 1, place.to(tl.float32))


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_what_top_k_and_top_p_leave_is_the_same_set(params: dict[str, Any], decimals: int) -> None:
    """With ties all over the row, with some, and with none."""
    vocab, heat = 300, 1 / params.get("temperature", 1.0)
    x = random_logits(1, vocab, seed=decimals)[0].round(decimals=decimals)
    x[:20] = -torch.inf
    x[20:30] = torch.tensor([0.0, -0.0]).repeat(5)
    plan = Planner(SamplerLimits(vocab, ()), b"", 1).plan([sequence(**{**params, "min_p": 0.0})])
    meta = plan.send(Parcel(64, torch.device("cpu")))
    [wish] = sample_reference.wishes(meta)
    want = sample_reference.left_by_filters(x, float(x.max()), wish)

    weights = torch.exp((x - x.max()) * heat)
    out = torch.empty(2, device=DEVICE)
    numbers = (
        vocab,
        int(wish.top_k < vocab),
        wish.top_k,
        wish.top_p,
        float(x.max()),
        heat,
        float(weights.sum()),
    )
    bounds[(1,)](x.to(DEVICE), out, *numbers, TAKE=64)
    bound, place = out.tolist()
    got = (x > bound) | ((x == bound) & (torch.arange(vocab) <= place) & (x > -torch.inf))
    assert torch.equal(got.nonzero()[:, 0], want)


@pytest.mark.parametrize("top_k", [1, 3, 4, 5, 6, 8, 62, 63])
def test_a_list_holds_all_of_the_largest(top_k: int) -> None:
    """The first pivot is between the fourth and the fifth; so hot that all have their turn."""
    logits = random_logits(1, 700, seed=top_k).expand(4, -1)
    check(logits, [sequence(seed=i, top_k=top_k, temperature=1e6) for i in range(4)], 700)


def test_top_p_that_is_spent_exactly_ends_there() -> None:
    logits = torch.full((8, 200), -torch.inf)
    logits[:, [5, 70, 71, 150]] = 1.0
    got = check(logits, [sequence(seed=i, top_p=0.5) for i in range(8)], 200)
    assert set(got.tokens) == {5, 70}


EVERY_KIND: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"top_k": 7},
    {"top_p": 0.9},
    {"min_p": 0.2},
]


@of_the_interpreter
@pytest.mark.parametrize("place", [0, 70, 199])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_yields_no_token_and_harms_no_other(
    value: float, place: int
) -> None:
    logits = random_logits(2 * len(EVERY_KIND), 200)
    logits[::2, place] = value
    got = check(logits, [sequence(**p) for p in EVERY_KIND for _ in range(2)], 200)
    assert got.tokens[::2] == [NOT_FINITE] * len(EVERY_KIND)
    assert min(got.tokens[1::2]) >= 0


def test_a_row_without_any_token_yields_none_and_one_with_one_yields_it() -> None:
    logits = torch.full((2 * len(EVERY_KIND), 200), -torch.inf)
    logits[1::2, 131] = -3.0
    got = check(logits, [sequence(**p) for p in EVERY_KIND for _ in range(2)], 200)
    assert got.tokens == [NOTHING_LEFT, 131] * len(EVERY_KIND)


@of_the_interpreter
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, torch.inf])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_temperatures_and_logits(temperature: float, scale: float) -> None:
    logits = random_logits(5, 150) * scale
    logits[:, 3:9] = torch.finfo(torch.float32).min
    logits[:, 9:20] = -torch.inf
    params = [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.3}, {"top_k": 140, "top_p": 0.9}]
    check(logits, [sequence(temperature=temperature, **p) for p in params], 150)


def test_equal_maxima_go_to_the_lowest_id_in_whichever_part_of_the_row() -> None:
    logits = torch.zeros(3, 200)
    for row, places in enumerate(([63, 64], [199, 5], [150, 151])):
        logits[row, places] = 2.0
    seqs = [sequence(temperature=0.0), sequence(top_k=1), sequence(top_p=1e-6)]
    assert check(logits, seqs, 200).tokens == [63, 5, 150]


def test_everything_that_changes_logits_at_once() -> None:
    """Penalties, bias, bans and allowed tokens; the logits are compared bit by bit."""
    tokens = [5, 6, 7, 5, 90, 6, 91, 90, 90]
    everything = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.37,
        "presence_penalty": -0.6,
        "logit_bias": {5: 1.5, 90: -2.0, 100: 3.0, 150: 9.0, 4000: 5.0},
        "min_tokens": 8,
        "stop_token_ids": (91, 120),
    }
    seqs = [
        sequence(tokens, num_prompt=4, temperature=0.0),
        sequence(tokens, num_prompt=4, **everything),
        sequence(tokens, num_prompt=4, **everything, top_k=5, allowed_token_ids=range(80, 160)),
        sequence(tokens, num_prompt=4, presence_penalty=0.5, top_p=0.8),
        sequence(tokens, num_prompt=4, temperature=0.0, allowed_token_ids=(199, 31, 32)),
    ]
    logits = random_logits(5, 200, padding=6)
    got = check(logits, seqs, 200)
    assert torch.equal(got.logits[0], logits[0])
    assert (got.logits[2, :200] > -torch.inf).nonzero()[:, 0].tolist() == [
        i for i in range(80, 160) if i not in (91, 120)
    ]
    assert got.tokens[4] in (31, 32, 199)


def test_a_long_history_takes_several_programs() -> None:
    tokens = list(range(1500)) * 2
    seqs = [sequence(tokens, num_prompt=1400, repetition_penalty=1.2, frequency_penalty=0.1)] * 2
    check(random_logits(2, 1600), seqs, 1600)


@pytest.mark.parametrize(("vocab", "width"), [(200, 0), (200, 1), (200, 20), (200, 33), (5, 20)])
def test_log_probabilities_are_of_the_raw_row_and_only_told_to_who_asks(
    vocab: int, width: int
) -> None:
    logits = random_logits(4, vocab, padding=2).round(decimals=1)  # ties: by id
    seqs = [
        sequence(temperature=0.0, logprobs=width),
        sequence(),
        sequence(logprobs=min(width, 2), logit_bias={3: 50.0}, top_k=2),
        sequence(temperature=0.0, logprobs=0, allowed_token_ids=(4,)),
    ]
    check(logits, seqs, vocab)


def test_a_row_is_drawn_alike_alone_and_in_company() -> None:
    seqs = [sequence(seed=i, **p, logprobs=2) for i, p in enumerate(EVERY_KIND)]
    logits = random_logits(len(seqs), 300)
    ops = DeviceOps(DEVICE, rows=1, vocab=300, tiles=SMALL)  # and what it reserves grows
    together = run(ops, logits, seqs, 300, DEVICE)
    chosen, best = together.told[:5], together.told[5:].view(2, 5, 2)
    for row, seq in enumerate(seqs):
        alone = run(ops, logits[row : row + 1], [seq], 300, DEVICE)
        assert alone.tokens == [together.tokens[row]]
        assert torch.equal(alone.told, torch.cat([chosen[row : row + 1], best[:, row].flatten()]))


@pytest.mark.parametrize("vocab", [49152 + 3, 128256])
def test_real_vocabularies_with_the_tiles_that_are_served(vocab: int) -> None:
    params = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.95, "temperature": 0.7},
        {"min_p": 0.1},
    ]
    seqs = [sequence(seed=i, **p) for i, p in enumerate(params)]
    check(random_logits(len(seqs), vocab, padding=61), seqs, vocab, Tiles())
