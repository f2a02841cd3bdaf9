"""The sampler against plain arithmetic, one row at a time."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampler import Sampler, SamplerLimits
from engine.sampling_plan import Planner, mask_of, problem
from engine.sequence import Sequence

VOCAB = 50
EOS = 2


def row(
    tokens: list[int] | None = None, *, num_prompt: int | None = None, name: str = "r", **params
) -> Sequence:
    tokens = [1, 2, 3] if tokens is None else tokens
    return Sequence(
        request_id=name,
        tokens=tokens,
        num_prompt=len(tokens) if num_prompt is None else num_prompt,
        sampling=SamplingParams(**{"temperature": 0.0, **params}),
        rev=None,
        identity="base",
        salt="",
        priority=50,
        order=0,
    )


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(SamplerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,)))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def draw(sampler: Sampler, logits: torch.Tensor, *rows: Sequence) -> list[int]:
    """One token a row, all rows with the same logits."""
    return [s.token for s in sampler.sample(logits.repeat(len(rows), 1), rows)]


def histogram(sampler: Sampler, logits: torch.Tensor, count: int = 4000, **params) -> Counter[int]:
    rows = [row(seed=i, **{"temperature": 1.0, **params}) for i in range(count)]
    return Counter(draw(sampler, logits, *rows))


def test_greedy_takes_the_lowest_id_among_equal_maxima(sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 9, 30]] = 4.0
    assert draw(sampler, logits, row()) == [7]


def test_ids_past_the_tokenizer_are_never_drawn_nor_counted(sampler, logits) -> None:
    padded = torch.cat([logits, torch.full((14,), 99.0)])
    greedy, hot = row(logprobs=3), row(temperature=5.0, seed=1, name="hot")
    one, other = sampler.sample(padded.repeat(2, 1), [greedy, hot])
    assert one.token == int(logits.argmax()) and other.token < VOCAB
    expected = torch.log_softmax(logits, -1)
    assert one.logprobs.logprob == pytest.approx(float(expected[one.token]), abs=1e-5)
    assert all(token < VOCAB for token, _ in one.logprobs.top)


def test_draws_follow_the_softmax(sampler, logits) -> None:
    counts = histogram(sampler, logits, temperature=1.3)
    expected = torch.softmax(logits / 1.3, -1)
    for token in range(VOCAB):
        p = float(expected[token])
        assert counts[token] / 4000 == pytest.approx(p, abs=4 * (p / 4000) ** 0.5 + 1e-3)


def test_filtered_draws_follow_the_softmax_of_what_is_left(sampler, logits) -> None:
    counts = histogram(sampler, logits, top_k=5)
    best = torch.topk(logits, 5)
    expected = torch.softmax(best.values, -1)
    assert set(counts) <= set(best.indices.tolist())
    for token, p in zip(best.indices.tolist(), expected.tolist(), strict=True):
        assert counts[token] / 4000 == pytest.approx(p, abs=4 * (p / 4000) ** 0.5 + 1e-3)


def test_top_k_of_equal_logits_keeps_exactly_k(sampler) -> None:
    assert set(histogram(sampler, torch.zeros(VOCAB), count=500, top_k=3)) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it(sampler) -> None:
    probs = torch.full((VOCAB,), 1e-9)
    probs[[4, 5, 6, 7]] = torch.tensor([0.5, 0.3, 0.15, 0.05])
    kept = {
        p: set(histogram(sampler, probs.log(), count=800, top_p=p)) for p in (0.1, 0.45, 0.7, 0.9)
    }
    assert kept == {0.1: {4}, 0.45: {4}, 0.7: {4, 5}, 0.9: {4, 5, 6}}


def test_top_p_that_is_spent_exactly_ends_there(sampler) -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[5, 7, 20, 21]] = 1.0
    assert set(histogram(sampler, logits, count=100, top_p=0.5)) == {5, 7}


def test_min_p_is_relative_to_the_best_token(sampler) -> None:
    probs = torch.full((VOCAB,), 1e-9)
    probs[[4, 5, 6]] = torch.tensor([0.6, 0.3, 0.1])
    assert set(histogram(sampler, probs.log(), count=400, min_p=0.4)) == {4, 5}


def test_a_seed_gives_the_same_token_whatever_is_beside_it(sampler, logits) -> None:
    alone = draw(sampler, logits, row(temperature=1.0, seed=11))
    again = Sampler(SamplerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,)))
    crowd = [
        row(temperature=1.0, seed=4, top_k=3, name="a"),
        row(name="b"),
        row(temperature=1.0, seed=11, name="c"),
        row(temperature=2.0, name="d"),
    ]
    assert draw(again, logits, *crowd)[2] == alone[0]


def test_the_same_seed_moves_on_with_the_position(sampler) -> None:
    flat = torch.zeros(VOCAB)
    drawn = {draw(sampler, flat, row([1] * n, temperature=1.0, seed=5))[0] for n in range(1, 12)}
    assert len(drawn) > 5


def test_requests_without_a_seed_differ_from_each_other(sampler) -> None:
    flat = torch.zeros(VOCAB)
    drawn = {draw(sampler, flat, row(temperature=1.0, name=f"r{i}"))[0] for i in range(20)}
    assert len(drawn) > 5


def test_presence_and_frequency_count_the_output_alone(sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[[10, 11, 12]] = torch.tensor([1.0, 0.9, 0.5])
    seen = row([10, 10, 10, 11], num_prompt=3, presence_penalty=0.3, logprobs=0)
    assert draw(sampler, logits, seen) == [10]
    often = row([1, 10, 10, 11], num_prompt=1, frequency_penalty=0.4)
    assert draw(sampler, logits, often) == [12]
    both = row([1, 10, 11], num_prompt=1, frequency_penalty=0.1, presence_penalty=0.05)
    assert draw(sampler, logits, both) == [10]


def test_repetition_penalty_counts_the_prompt_and_weakens_either_sign(sampler) -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[[10, 11]] = torch.tensor([2.0, 1.5])
    assert draw(sampler, logits, row([10], repetition_penalty=2.0)) == [11]
    negative = torch.full((VOCAB,), -5.0)
    negative[[10, 11]] = torch.tensor([-1.0, -1.5])
    assert draw(sampler, negative, row([10], repetition_penalty=2.0)) == [11]


def test_bias_moves_a_token_and_penalties_touch_no_neighbour(sampler, logits) -> None:
    best = int(logits.argmax())
    plain, biased = row(name="a"), row(logit_bias={9: 100.0, VOCAB + 3: 5.0}, name="b")
    penalised = row([best], num_prompt=0, presence_penalty=2.0, frequency_penalty=20.0, name="c")
    tokens = draw(sampler, logits, plain, biased, penalised)
    assert tokens[:2] == [best, 9] and tokens[2] != best


def test_min_tokens_bans_end_and_stop_ids_until_reached(sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[[EOS, 9, 20]] = torch.tensor([5.0, 4.0, 3.0])
    early = row([1, 20], num_prompt=1, min_tokens=2, stop_token_ids=(9,))
    late = row([1, 20, 20], num_prompt=1, min_tokens=2, stop_token_ids=(9,))
    assert draw(sampler, logits, early, late) == [20, EOS]


def test_a_ban_that_ends_leaves_the_bias_that_was_asked_for(sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[20] = 3.0
    seq = row([1], num_prompt=1, min_tokens=1, logit_bias={EOS: 5.0})
    assert draw(sampler, logits, seq) == [20]
    seq.tokens.append(20)
    assert draw(sampler, logits, seq) == [EOS]


def test_logprobs_are_of_the_raw_distribution(sampler, logits) -> None:
    changed = row(logprobs=4, logit_bias={7: 100.0}, temperature=0.5, seed=1, top_k=1)
    plain = row(name="plain")
    one, other = sampler.sample(logits.repeat(2, 1), [changed, plain])
    expected = torch.log_softmax(logits, -1)
    best = torch.topk(expected, 4)
    assert one.token == 7 and other.logprobs is None
    assert one.logprobs.logprob == pytest.approx(float(expected[7]), abs=1e-5)
    assert [t for t, _ in one.logprobs.top] == best.indices.tolist()
    assert [v for _, v in one.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_zero_tells_the_chosen_token_alone(sampler, logits) -> None:
    [one] = sampler.sample(logits[None].clone(), [row(logprobs=0)])
    assert one.logprobs.token == one.token and one.logprobs.top == ()


# ----------------------------------------------------------------- whole distributions
def chi_square(counts: Counter[int], expected: torch.Tensor, count: int) -> float:
    """Against its own spread: about 0, and beyond 5 hardly ever."""
    rare = expected * count < 5
    assert sum(counts[token] for token in rare.nonzero()[:, 0].tolist()) <= 5 * rare.sum() + 5
    common = (~rare).nonzero()[:, 0].tolist()
    terms = [
        (counts[t] - count * float(expected[t])) ** 2 / (count * float(expected[t])) for t in common
    ]
    freedom = max(len(terms) - 1, 1)
    return (sum(terms) - freedom) / (2 * freedom) ** 0.5


def left(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The distribution that is left, by sorting."""
    probs, order = torch.softmax(logits.double(), -1).sort(descending=True, stable=True)
    if top_k:
        probs[top_k:] = 0
    spent = probs.cumsum(0) - probs
    probs[(spent >= top_p * probs.sum()) | (probs < min_p * probs[0])] = 0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 12},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.03},
        pytest.param({}, marks=pytest.mark.late),
        pytest.param({"top_p": 0.8}, marks=pytest.mark.late),
        pytest.param({"min_p": 0.05}, marks=pytest.mark.late),
        pytest.param({"top_k": 20, "top_p": 0.9}, marks=pytest.mark.late),
    ],
)
def test_many_draws_have_the_distribution_that_is_left(sampler, logits, filters) -> None:
    counts = histogram(sampler, logits, **filters)
    assert chi_square(counts, left(logits, **filters), 4000) < 5


def test_one_sequence_draws_the_distribution_along_its_positions(sampler, logits) -> None:
    """Neighbouring positions of one seed are as independent as two seeds."""
    rows = [row([1] * n, temperature=1.0, seed=3) for n in range(4000)]
    drawn = draw(sampler, logits, *rows)
    expected = torch.softmax(logits, -1)
    assert chi_square(Counter(drawn), expected, 4000) < 5
    pairs = Counter(a * VOCAB + b for a, b in pairwise(drawn))
    assert chi_square(pairs, torch.outer(expected, expected).flatten(), 3999) < 5


def test_the_whole_of_top_p_and_k_of_one_is_greedy_whatever_the_temperature(sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[[30, 7, 9]] = 1.0
    hot = {"temperature": 50.0}
    for only in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}):
        assert set(histogram(sampler, logits, count=50, **hot, **only)) == {7}
    assert set(histogram(sampler, logits, count=50, **hot, min_p=1.0)) == {7, 9, 30}


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_fair(sampler, logits) -> None:
    best = int(logits.argmax())
    assert set(histogram(sampler, logits, count=50, temperature=1e-4)) == {best}
    counts = histogram(sampler, logits, temperature=1e9)
    assert chi_square(counts, torch.full((VOCAB,), 1 / VOCAB), 4000) < 5


# ----------------------------------------------------------------- allowed tokens
def test_only_allowed_tokens_are_drawn_and_told_of_the_raw_distribution(sampler, logits) -> None:
    allowed = (3, 31, 32, 49)
    counts = histogram(sampler, logits, count=500, temperature=5.0, allowed_token_ids=allowed)
    assert set(counts) == set(allowed)
    best = max(allowed, key=lambda t: float(logits[t]))
    greedy = row(allowed_token_ids=allowed, logprobs=1, logit_bias={5: 100.0})
    [one] = sampler.sample(logits[None].clone(), [greedy])
    assert one.token == best
    expected = torch.log_softmax(logits, -1)
    assert one.logprobs.logprob == pytest.approx(float(expected[best]), abs=1e-5)
    assert one.logprobs.top[0][0] == int(logits.argmax())


def test_a_steps_mask_narrows_what_a_request_allows_and_no_other_row(sampler, logits) -> None:
    rows = [row(name="a"), row(name="b", allowed_token_ids=(4, 5, 6)), row(name="c")]
    masks = {1: mask_of((5, 40), VOCAB), 2: mask_of((33,), VOCAB)}
    drawn = sampler.finish(sampler.launch(logits.repeat(3, 1), rows, masks=masks))
    assert [one.token for one in drawn] == [int(logits.argmax()), 5, 33]
    assert draw(sampler, logits, rows[2]) == [int(logits.argmax())], "it was for one step"


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 50])
def test_a_mask_has_a_bit_for_each_token(vocab: int) -> None:
    allowed = range(0, vocab, 3)
    words = mask_of(allowed, vocab)
    assert len(words) == -(-vocab // 32)
    assert [i for i in range(vocab) if words[i // 32] >> (i % 32) & 1] == list(allowed)


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (None, None),
        ((0, VOCAB - 1), None),
        ((), "allowed_token_ids is empty; name at least one token or leave it out"),
        ((0, VOCAB), "allowed_token_ids holds 50, which is outside 0..49"),
        ((-1,), "allowed_token_ids holds -1, which is outside 0..49"),
    ],
)
def test_impossible_lists_are_named(allowed, message) -> None:
    assert problem(SamplingParams(allowed_token_ids=allowed), VOCAB) == message


# ----------------------------------------------------------------- nothing to draw from
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("wish", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
def test_logits_that_are_not_finite_end_their_own_sequence(sampler, logits, value, wish) -> None:
    rows = logits.repeat(3, 1)
    rows[1, 17] = value
    ids = torch.full((4,), 9, dtype=torch.int64)
    params = [row(seed=1, name=str(i), **wish) for i in range(3)]
    drawn = sampler.finish(sampler.launch(rows, params, tokens=ids))
    assert drawn[1].doom.code == "internal_error" and "not finite" in drawn[1].doom.message
    assert drawn[0] == drawn[2] and drawn[0].doom is None
    assert ids.tolist() == [drawn[0].token, 0, drawn[0].token, 9], "the next step needs a real id"


def test_a_sequence_that_rules_everything_out_ends_with_a_reason(sampler, logits) -> None:
    only_the_end = row(allowed_token_ids=(EOS,), min_tokens=1)
    fine = row(allowed_token_ids=(EOS,), name="fine")
    one, other = sampler.sample(logits.repeat(2, 1), [only_the_end, fine])
    assert one.doom.code == "invalid_value" and "ruled out" in one.doom.message
    assert other.token == EOS and other.doom is None


# ----------------------------------------------------------------- sequences that grow
def test_a_sequence_that_grows_asks_for_what_a_new_one_would(sampler, logits) -> None:
    """Penalties, bias and bans are kept up to date token by token."""
    params = {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {4: 1.0, 11: -1.0, EOS: 2.0},
        "min_tokens": 5,
        "stop_token_ids": (11, 12),
    }
    limits = SamplerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,))
    planner = Planner(limits, b"", 1)
    tokens = [3, 4, 3, 60, 9]  # one beyond the tokenizer's
    growing = row(list(tokens), num_prompt=len(tokens), **params)
    draws = np.random.default_rng(0)
    for n in range(80):
        fresh = row(list(growing.tokens), num_prompt=len(tokens), **params)
        known, new = planner.plan([growing]), Planner(limits, b"", 1).plan([fresh])
        assert entries(known) == entries(new), n
        growing.tokens += draws.integers(0, VOCAB, n % 3).tolist()


def entries(plan) -> dict[int, tuple[int, float]]:
    ids, counts, biases = plan.words[16:].reshape(3, -1)
    assert len(set(ids.tolist())) == len(ids)
    pairs = zip(counts.tolist(), biases.view(np.float32).tolist(), strict=True)
    return dict(zip(ids.tolist(), pairs, strict=True))


def test_a_planner_forgets_who_has_left() -> None:
    planner = Planner(SamplerLimits(VOCAB, (EOS,)), b"", 2)
    stays = row(name="stays", temperature=1.0)
    for n in range(20):
        planner.plan([stays, row(name=str(n), presence_penalty=1.0)])
        assert len(planner._known) <= 6


# ----------------------------------------------------------------- in the engine
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_sequence_without_a_token_ends_alone(start_core, prompt, lookahead) -> None:
    alone = start_core()
    right = alone.submit("right", prompt(9, 1), max_tokens=8)
    alone.finish()
    driver = start_core(lookahead=lookahead)
    beside = driver.submit("beside", prompt(9, 1), max_tokens=8)
    wishes = {
        "not finite": {"logit_bias": {7: float("nan")}},
        "ruled out": {"allowed_token_ids": (2,), "min_tokens": 4},
        "told its prompt": {"allowed_token_ids": (2,), "min_tokens": 4, "prompt_logprobs": 0},
    }
    ends = {
        name: driver.submit(name, prompt(5, n), max_tokens=8, **wish)
        for n, (name, wish) in enumerate(wishes.items())
    }
    driver.finish()
    driver.until(lambda: driver.core.idle)
    assert beside.tokens == right.tokens and beside.finish == "length"
    codes = {name: (story.finish, story.code, story.tokens) for name, story in ends.items()}
    assert codes == {
        "not finite": ("error", "internal_error", []),
        "ruled out": ("error", "invalid_value", []),
        "told its prompt": ("error", "invalid_value", []),
    }
    assert driver.core.snapshot().pool.kv_active == 0


@pytest.mark.parametrize("allowed", [(), (5, 256), (-3,)])
def test_an_impossible_list_is_refused_before_anything_runs(start_core, prompt, allowed) -> None:
    driver = start_core()
    story = driver.submit("r", prompt(5), allowed_token_ids=allowed)
    driver.finish()
    assert (story.finish, story.code) == ("error", "invalid_value")
    assert story.message.startswith("allowed_token_ids ")
    assert driver.core.runner.forward_passes == 0


def test_an_engine_draws_allowed_tokens_alone(start_core, prompt) -> None:
    driver = start_core()
    story = driver.submit(
        "r", prompt(5), max_tokens=12, allowed_token_ids=(7, 8, 200), temperature=2.0, seed=1
    )
    driver.finish()
    assert len(story.tokens) == 12 and len(set(story.tokens)) > 1
    assert set(story.tokens) <= {7, 8, 200}
