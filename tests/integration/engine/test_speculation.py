"""Drafts on the tiny model: answers stay what they are without, token for token, whatever is asked.

`Oracle` drafts what was answered without drafts, wrong here and there, so that drafts of all
lengths are right up to every place.  What n-grams find by themselves has tests of its own.
"""

import json
import random
from dataclasses import replace
from zlib import crc32

import msgspec
import pytest

from engine import grammar, guides, speculation
from engine.messages import GetSnapshot
from tests.fakes.disturbed_core import disturb

WISHES = [
    {"max_tokens": 30},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.2, "seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logprobs": 3, "presence_penalty": 0.5, "max_tokens": 20},
    {"prompt_logprobs": 2, "max_tokens": 5},
    {"prompt_logprobs": 0, "max_tokens": 0},
    {"max_tokens": 2},
    {"min_tokens": 6, "stop_token_ids": tuple(range(3, 130)), "temperature": 1.0, "seed": 5},
    {"stop_token_ids": tuple(range(3, 20)), "temperature": 1.0, "seed": 3, "max_tokens": 30},
    {"logit_bias": {2: 4.0}, "temperature": 1.5, "seed": 12, "max_tokens": 40},
    {"allowed_token_ids": tuple(range(40, 90)), "temperature": 2.0, "seed": 1, "logprobs": 0},
]


class Oracle:
    """Knows the answers; `known`: request id -> tokens."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self.known = known

    def __call__(self, seq, most: int) -> tuple[int, ...]:
        right = self.known[seq.request_id][seq.num_generated :][:most]
        draw = random.Random(crc32(f"{seq.request_id} {len(seq.tokens)}".encode()))
        wrong_at = draw.randrange(most + 2)
        return tuple((t + (i >= wrong_at)) % 256 for i, t in enumerate(right))


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch) -> None:
    monkeypatch.setattr(speculation, "WORTH", 0.0)


def drafting(start_core, known, tokens=4, **settings):
    driver = start_core(speculation="ngram", speculation_tokens=tokens, **settings)
    driver.core.scheduler.speculation._guess = Oracle(known)
    return driver


def told(story):
    return story.tokens, story.logprobs, story.prompt_logprobs, story.finish


def play(driver, adapters, prompt, seed: int) -> dict:
    """Requests of every wish arrive a few a step, in an order and on adapters of their own."""
    draw = random.Random(seed)
    revs = [None, *(a.rev for a in adapters)]
    plans = [(n, draw.choice(revs), draw.randrange(3, 70), wish) for n, wish in enumerate(WISHES)]
    draw.shuffle(plans)
    while plans:
        for n, rev, length, wish in plans[:2]:
            driver.submit(f"r{n}", prompt(length, n), rev, **wish)
        del plans[:2]
        for _ in range(draw.randrange(4)):
            driver.step()
    driver.finish()
    driver.until(lambda: driver.core.idle)
    driver.core.scheduler.check()
    return {name: told(story) for name, story in driver.stories.items()}


@pytest.fixture(scope="module")
def plain() -> dict:
    """Answers without drafts, by seed."""
    return {}


def without(plain, start_core, adapters, prompt, seed, **device):
    if seed not in plain:
        driver = start_core(max_batch_tokens=48, **device)
        driver.add(*adapters)
        plain[seed] = play(driver, adapters, prompt, seed)
    return plain[seed]


def compare(plain, start_core, adapters, prompt, seed, tokens, device=None, **sizes) -> None:
    device = device or {}
    right = without(plain, start_core, adapters, prompt, seed, **device)
    known = {name: answer[0] for name, answer in right.items()}
    driver = drafting(start_core, known, tokens, max_batch_tokens=48, **sizes, **device)
    driver.add(*adapters)
    assert play(driver, adapters, prompt, seed) == right
    snapshot = driver.call(GetSnapshot).snapshot
    assert snapshot.running == snapshot.pool.kv_active == 0
    scored = sum(1 for story in driver.stories.values() if not story.tokens)
    assert snapshot.generated_tokens == sum(map(len, known.values())) + scored
    stats = driver.core.stats
    assert stats.accepted_by_rev.total() > 10
    assert stats.drafted_by_rev.total() > stats.accepted_by_rev.total() + 10
    assert any(stats.accepted_by_rev[a.rev] for a in adapters)


@pytest.mark.parametrize("tokens, lookahead, tight", [(1, True, True), (3, False, True)])
def test_answers_are_those_without_drafts(
    plain, start_core, adapters, prompt, tokens, lookahead, tight
) -> None:
    sizes = {"num_blocks": 24, "max_num_seqs": 4} if tight else {}
    compare(plain, start_core, adapters, prompt, 0, tokens, lookahead=lookahead, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 24, "max_num_seqs": 4}], ids=["", "tight"])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_answers_are_those_without_drafts_of_any_length(
    plain, start_core, adapters, prompt, tokens, lookahead, sizes
) -> None:
    for seed in (1, 2):
        compare(plain, start_core, adapters, prompt, seed, tokens, lookahead=lookahead, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_answers_on_a_card_are_those_without_drafts(
    start_core, adapters, prompt, tokens, lookahead
) -> None:
    """Deterministic, so that a row's bits are the same whoever stands beside it."""
    card = {"device": "cuda", "dtype": "float32", "deterministic": True, "max_rank": 16}
    compare({}, start_core, adapters, prompt, 1, tokens, device=card, lookahead=lookahead)


@pytest.mark.parametrize(
    "tokens", [pytest.param(n, marks=() if n == 5 else pytest.mark.slow) for n in range(1, 9)]
)
def test_what_ngrams_find_changes_no_greedy_answer(start_core, adapters, prompt, tokens) -> None:
    """Answers of a few words that come again, on the base and on every adapter, together and
    alone."""
    wish = {"max_tokens": 40, "allowed_token_ids": (40, 41, 42)}
    revs = [None, *(a.rev for a in adapters)]
    ids = [prompt(7, n) for n in range(len(revs))]
    answers = []
    for settings in ({}, {"speculation": "ngram", "speculation_tokens": tokens}):
        driver = start_core(lookahead=True, **settings)
        driver.add(*adapters)
        for n, rev in enumerate(revs):
            driver.submit(f"r{n}", ids[n], rev, **wish)
        driver.finish()
        driver.submit("alone", ids[1], revs[1], **wish)
        driver.finish()
        answers.append({name: story.tokens for name, story in driver.stories.items()})
    assert answers[1] == answers[0]
    assert answers[1]["alone"] == answers[1]["r1"]
    assert driver.core.stats.accepted_by_rev.total() > 20, "nothing was tried"
    assert not driver.core.scheduler.speculation._indexes, "kept for answers that have ended"


class Chaos:
    """Greedy requests, aborts, loads and evictions at random in a pool that is too small."""

    def __init__(self, adapters, prompt, seed: int) -> None:
        self.adapters, self.draw = adapters, random.Random(seed)
        draw = self.draw
        self.asked = {
            f"r{n}": (prompt(draw.randrange(3, 60), n), draw.choice([None, *adapters]))
            for n in range(16)
        }

    def answers(self, driver) -> dict[str, list[int]]:
        driver.add(*self.adapters)
        for name, (ids, adapter) in self.asked.items():
            driver.submit(name, ids, adapter and adapter.rev, max_tokens=40)
        driver.finish()
        return {name: story.tokens for name, story in driver.stories.items()}

    def play(self, driver) -> None:
        driver.add(*self.adapters)
        draw = self.draw
        for name, (ids, adapter) in self.asked.items():
            driver.submit(name, ids, adapter and adapter.rev, max_tokens=40)
            disturb(driver, draw, self.adapters)
        driver.finish()
        driver.core.scheduler.check()


def chaos(start_core, adapters, prompt, seed: int, tokens: int, lookahead: bool) -> dict[str, int]:
    right = Chaos(adapters, prompt, seed).answers(start_core())
    sizes = {"num_blocks": 26, "max_num_seqs": 5, "mixed_tokens": 24, "max_batch_tokens": 64}
    driver = drafting(start_core, right, tokens, lookahead=lookahead, **sizes)
    Chaos(adapters, prompt, seed).play(driver)
    ends: dict[str, int] = {"preemptions": driver.core.snapshot().preemptions}
    for name, story in driver.stories.items():
        ends[story.finish] = ends.get(story.finish, 0) + 1
        whole = story.finish in ("length", "stop")
        assert story.tokens == (right[name] if whole else right[name][: len(story.tokens)])
    assert driver.core.snapshot().pool.kv_active == 0
    ends["accepted"] = driver.core.stats.accepted_by_rev.total()
    return ends


def test_aborts_evictions_and_preemptions_under_drafts_confuse_nothing(
    start_core, adapters, prompt
) -> None:
    ends = chaos(start_core, adapters, prompt, 3, 5, lookahead=True)
    assert ends["accepted"] > 20 and ends["preemptions"] and ends["abort"] and ends["length"]


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_nor_do_they_in_many_lives(start_core, adapters, prompt, tokens, lookahead) -> None:
    for seed in range(10, 16):
        assert chaos(start_core, adapters, prompt, seed, tokens, lookahead)["accepted"]


def test_drafts_make_fewer_steps(start_core, prompt) -> None:
    ids = prompt(20)
    driver = start_core()
    right = driver.submit("r", ids, max_tokens=40, ignore_eos=True)
    driver.finish()
    plain = driver.core.runner.forward_passes
    driver = drafting(start_core, {"r": right.tokens}, 8, lookahead=True)
    story = driver.submit("r", ids, max_tokens=40, ignore_eos=True)
    driver.finish()
    assert story.tokens == right.tokens
    assert driver.core.runner.forward_passes < plain * 0.7
    outcome = driver.core.stats
    assert outcome.generated_tokens == 40 == outcome.generated_by_rev[None]
    assert driver.core.runner.forward_passes == plain - outcome.accepted_by_rev[None]


@pytest.mark.parametrize("wait", [guides.WAIT_SECONDS, 0.0])
def test_guided_answers_beside_drafts_stay_what_they_are_and_have_none(
    start_core, worded_dir, prompt, wait
) -> None:
    """Without a wait every mask is late: rows are put off in steps that hold drafts."""
    schema = {"enum": ["a word", "another one", "and a third, which is longer"]}
    text = grammar.json_schema(json.dumps(schema))
    right: dict[str, list[int]] = {}
    for speculating in (False, True):
        if speculating:
            driver = drafting(start_core, right, 4, model=worded_dir, lookahead=True)
        else:
            driver = start_core(worded_dir)
        driver.core.guides._wait_seconds = wait
        for n in range(2):
            driver.submit(f"guided {n}", prompt(9, n), grammar=text, temperature=1.0, seed=n)
            driver.submit(f"free {n}", prompt(12, n), max_tokens=60, ignore_eos=True)
        driver.finish()
        answers = {name: story.tokens for name, story in driver.stories.items()}
        right = right or answers
    assert answers == right
    drafted = sum(len(right[f"free {n}"]) for n in range(2))
    assert 20 < driver.core.stats.accepted_by_rev[None] < drafted


def test_an_activated_lora_drafts_on_its_own_rows_alone(start_core, adapters, prompt) -> None:
    """Its blocks before the invocation are the base's, and drafts come behind it."""
    ids = prompt(40)
    manifest = msgspec.structs.replace(adapters[0].manifest, alora_tokens=tuple(ids[20:22]))
    called = replace(adapters[0], manifest=manifest)
    right: dict[str, list[int]] = {}
    for speculating in (False, True):
        driver = drafting(start_core, right, 5) if speculating else start_core()
        driver.add(called)
        for name, rev in (("base", None), ("called", called.rev), ("again", called.rev)):
            driver.submit(name, ids, rev, max_tokens=40, ignore_eos=True)
            driver.finish()
        right = right or {name: story.tokens for name, story in driver.stories.items()}
    assert {name: story.tokens for name, story in driver.stories.items()} == right
    assert right["called"] == right["again"] != right["base"]
    assert driver.core.stats.accepted_by_rev[called.rev] > 10
    assert driver.stories["called"].cached == 16, "the base's block"
