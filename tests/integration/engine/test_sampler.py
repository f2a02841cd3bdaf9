"""The sampler against plain arithmetic, one row at a time."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from engine.messages import SamplingParams
from engine.sampler import Sampler, SamplerLimits

VOCAB = 50
EOS = 2


def row(
    tokens: list[int] | None = None, *, num_prompt: int | None = None, name: str = "r", **params
) -> SimpleNamespace:
    tokens = [1, 2, 3] if tokens is None else tokens
    return SimpleNamespace(
        request_id=name,
        tokens=tokens,
        num_prompt=len(tokens) if num_prompt is None else num_prompt,
        sampling=SamplingParams(**{"temperature": 0.0, **params}),
    )


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(SamplerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,)))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def draw(sampler: Sampler, logits: torch.Tensor, *rows: SimpleNamespace) -> list[int]:
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
