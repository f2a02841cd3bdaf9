"""What is told of drafts has the distribution of draws without them, whatever shapes that."""

from collections import Counter

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampler import Sampler, SamplerLimits
from engine.sequence import Sequence
from engine.speculation import verified
from engine.token_changes import TokenChanges

VOCAB, EOS, COUNT = 12, 2, 800
PROMPT, OUTPUT = [5, 6, 7], [8, 6]
#: Log-odds of the next token, and of the one behind it if DRAFT was drawn.
FIRST, DRAFT = [0.1, -1.0, 0.5, 1.5, -0.3, 0.9, 0.2, 0.0, 0.7, -2.0, 0.4, 0.3], 3
SECOND = [0.8, 0.2, 0.1, 1.1, 0.6, -0.5, 0.9, 0.4, -0.2, 0.3, 0.0, 1.2]
WISHES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.3, "temperature": 1.2},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.8, "presence_penalty": 0.6, "frequency_penalty": 0.5},
    {"logit_bias": {DRAFT: -1.0, 4: 1.5, 0: -100.0}},
    {"min_tokens": 4, "stop_token_ids": (11,)},
    {"min_tokens": 3},
    {"allowed_token_ids": (1, DRAFT, 4, 6), "temperature": 2.0},
]
#: Of these the statistics are among the quick tests.
QUICK = (1, 5, 6, 8)


def sequence(seed: int, tokens=(*PROMPT, *OUTPUT), **params) -> Sequence:
    return Sequence(
        request_id="r",
        tokens=list(tokens),
        num_prompt=len(PROMPT),
        sampling=SamplingParams(seed=seed, **params),
        rev=None,
        identity="base",
        salt="",
        priority=50,
        order=0,
    )


def chances(odds: list[float], output: list[int], params: SamplingParams) -> np.ndarray:
    """(VOCAB,): the definition, token by token."""
    x = np.array(odds)
    for token in range(VOCAB):
        if token in (*PROMPT, *output):
            factor = params.repetition_penalty
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
        x[token] += params.logit_bias.get(token, 0.0)
    if len(output) < params.min_tokens:
        x[[EOS, *params.stop_token_ids]] = -np.inf
    if params.allowed_token_ids is not None:
        x[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    p = np.exp(x / params.temperature)
    p /= p.sum()
    order = sorted(range(VOCAB), key=lambda t: (-p[t], t))
    kept = order[: params.top_k or VOCAB]
    total, spent, left = p[kept].sum(), 0.0, []
    for token in kept:
        if spent < params.top_p * total and p[token] >= params.min_p * p[order[0]]:
            left.append(token)
        spent += p[token]
    q = np.zeros(VOCAB)
    q[left] = p[left] / p[left].sum()
    return q


@pytest.mark.parametrize(
    "wish",
    [pytest.param(w, marks=() if n in QUICK else pytest.mark.slow) for n, w in enumerate(WISHES)],
    ids=str,
)
def test_told_tokens_follow_the_final_distribution(wish) -> None:
    sampler = Sampler(SamplerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,)))
    seqs = [seq for seed in range(COUNT) for seq in [sequence(seed, **wish)] * 2]
    logits = torch.tensor([FIRST, SECOND], dtype=torch.float32).repeat(COUNT, 1)
    ahead = dict.fromkeys(range(1, 2 * COUNT, 2), (DRAFT,))
    drawn = sampler.finish(sampler.launch(logits, seqs, ahead=ahead))
    told: Counter[tuple[int, ...]] = Counter()
    for n in range(0, 2 * COUNT, 2):
        one = verified((DRAFT,), drawn[n : n + 2])
        told[one.token, *(other.token for other in one.more)] += 1
    params = SamplingParams(**wish)
    p = chances(FIRST, OUTPUT, params)
    q = chances(SECOND, [*OUTPUT, DRAFT], params)
    right = {(t,): p[t] for t in range(VOCAB) if t != DRAFT}
    right |= {(DRAFT, t): p[DRAFT] * q[t] for t in range(VOCAB)}
    assert sum(right.values()) == pytest.approx(1.0)
    for tokens, chance in right.items():
        spread = (chance * (1 - chance) / COUNT) ** 0.5
        assert told[tokens] / COUNT == pytest.approx(chance, abs=4 * spread), tokens
    assert told.total() == sum(told[tokens] for tokens, chance in right.items() if chance)


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_a_row_behind_drafts_draws_what_it_would_behind_tokens(wish) -> None:
    """The same noise too: an answer with a seed is one and the same with drafts and without."""
    sampler = Sampler(SamplerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,)))
    for drafts in ((3,), (3, 9, 3), (9, 9, 9, 200)):
        behind = [sequence(seed, **wish) for seed in range(40)]
        there = [sequence(seed, (*PROMPT, *OUTPUT, *drafts), **wish) for seed in range(40)]
        logits = torch.tensor([SECOND], dtype=torch.float32).repeat(40, 1)
        ahead = dict.fromkeys(range(40), drafts)
        one = sampler.finish(sampler.launch(logits.clone(), behind, ahead=ahead))
        other = sampler.finish(sampler.launch(logits.clone(), there))
        assert one == other


def test_entries_ahead_leave_nothing_behind() -> None:
    wish = {"repetition_penalty": 1.1, "min_tokens": 4, "logit_bias": {3: 1.0, EOS: 0.5}}
    seq = sequence(0, **wish)
    changes = TokenChanges(seq, VOCAB, (EOS,))

    def as_dicts(entries):
        ids, *values = (entry.tolist() for entry in entries)
        return dict(zip(ids, zip(*values, strict=True), strict=True))

    before = as_dicts(changes.entries(seq.tokens))
    for drafts in ([3], [9, 9], [EOS, 3, 10, 10]):
        longer = [*seq.tokens, *drafts]
        afresh = TokenChanges(sequence(0, **wish), VOCAB, (EOS,)).entries(longer)
        assert as_dicts(changes.entries(seq.tokens, drafts)) == as_dicts(afresh)
        assert as_dicts(changes.entries(seq.tokens)) == before


# ------------------------------------------------------------------- drafts of a model
#: Log-odds of a model that drafts: those of FIRST, but not quite.
GUESSED = [0.4, -1.0, 0.9, 1.1, -0.3, 1.3, 0.2, -0.6, 0.7, -1.0, 0.0, 0.3]


def drafted(sampler: Sampler, seqs: list[Sequence], coupled: bool) -> list[int]:
    odds = torch.tensor([GUESSED], dtype=torch.float32).repeat(len(seqs), 1)
    drafts = torch.zeros(len(seqs), dtype=torch.int64)
    sampler.draft(odds, seqs, 0, drafts, coupled=coupled)
    return drafts.tolist()


@pytest.mark.parametrize("coupled", [True, pytest.param(False, marks=pytest.mark.late)])
@pytest.mark.parametrize(
    "wish",
    [pytest.param(w, marks=() if n in QUICK else pytest.mark.slow) for n, w in enumerate(WISHES)],
    ids=str,
)
def test_drafts_that_know_the_noise_change_no_chances(wish, coupled) -> None:
    """They are drawn with the very noise that the draw will have, and nothing leans to them."""
    sampler = Sampler(SamplerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,)))
    one_each = [sequence(seed, **wish) for seed in range(COUNT)]
    drafts = drafted(sampler, one_each, coupled)
    seqs = [seq for seq in one_each for _ in range(2)]
    logits = torch.tensor([FIRST, SECOND], dtype=torch.float32).repeat(COUNT, 1)
    ahead = {2 * n + 1: (draft,) for n, draft in enumerate(drafts)}
    drawn = sampler.finish(sampler.launch(logits, seqs, ahead=ahead))
    told = [verified((drafts[n],), drawn[2 * n : 2 * n + 2]) for n in range(COUNT)]
    firsts = Counter(one.token for one in told)
    params = SamplingParams(**wish)
    close(firsts, COUNT, chances(FIRST, OUTPUT, params))
    right = Counter(one.token for one in told if one.more)
    assert right or not coupled, "the likeliest token may be one that is not allowed"
    for draft, _ in right.most_common(1):
        behind = Counter(one.more[0].token for one in told if one.more and one.token == draft)
        close(behind, behind.total(), chances(SECOND, [*OUTPUT, draft], params))


def close(told: Counter[int], count: int, right: np.ndarray) -> None:
    for token, chance in enumerate(right):
        spread = (chance * (1 - chance) / count) ** 0.5
        assert told[token] / count == pytest.approx(chance, abs=4 * spread), token


def test_a_draft_that_is_drawn_as_its_token_will_be_is_right_more_often_than_the_likeliest() -> (
    None
):
    sampler = Sampler(SamplerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,)))
    seqs = [sequence(seed) for seed in range(COUNT)]
    logits = torch.tensor([FIRST], dtype=torch.float32).repeat(COUNT, 1)
    drawn = [one.token for one in sampler.finish(sampler.launch(logits.clone(), seqs))]
    right = {
        coupled: sum(map(int.__eq__, drafted(sampler, seqs, coupled), drawn)) / COUNT
        for coupled in (True, False)
    }
    p, q = (chances(odds, OUTPUT, SamplingParams()) for odds in (FIRST, GUESSED))
    assert right[False] == pytest.approx(p[q.argmax()], abs=0.07)
    most = np.minimum(p, q).sum()  # what no draft can do better
    assert most / (2 - most) - 0.05 < right[True] < most + 0.05
    assert right[True] > 2 * right[False]
