"""A step of lookahead, switched on where it is off by itself: every answer stays what it was."""

import random

import pytest

from engine.messages import Abort, Evict, GetSnapshot, Load

WISHES = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.2, "seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logprobs": 3, "presence_penalty": 0.5},
    {"prompt_logprobs": 2, "max_tokens": 5},
    {"prompt_logprobs": 0, "max_tokens": 0},
    {"max_tokens": 1},
    {"min_tokens": 6, "stop_token_ids": tuple(range(3, 130))},
    {"stop_token_ids": tuple(range(3, 60)), "temperature": 1.0, "seed": 3},
    {"logit_bias": {2: 4.0}, "temperature": 1.5, "seed": 12, "max_tokens": 40},
]


def told(story):
    return story.tokens, story.logprobs, story.prompt_logprobs, story.finish, story.cached


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
    driver.until(lambda: driver.core.idle)  # a row for nobody may still be under way
    driver.core.scheduler.check()
    return {name: told(story) for name, story in driver.stories.items()}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.late) for seed in range(1, 6))]
)
@pytest.mark.parametrize(
    "sizes", [{}, {"num_blocks": 24, "max_num_seqs": 4}], ids=["roomy", "tight"]
)
def test_answers_are_those_without_it(start_core, adapters, prompt, sizes, seed) -> None:
    answers = []
    for lookahead in (False, True):
        driver = start_core(lookahead=lookahead, max_batch_tokens=48, **sizes)
        driver.add(*adapters)
        answers.append(play(driver, adapters, prompt, seed))
        snapshot = driver.call(GetSnapshot).snapshot
        assert snapshot.running == snapshot.pool.kv_active == 0
        tokens = sum(len(story.tokens) for story in driver.stories.values())
        scored = sum(1 for story in driver.stories.values() if not story.tokens)
        assert snapshot.generated_tokens == tokens + scored, "a row for nobody was counted"
    # What is cached hangs on when a step is settled, which is what differs.
    plain, ahead = ({k: v[:4] for k, v in answer.items()} for answer in answers)
    assert ahead == plain


def test_a_step_is_launched_before_the_last_one_is_told(start_core, prompt) -> None:
    driver = start_core(lookahead=True)
    story = driver.submit("r", prompt(9), max_tokens=3)
    passes = []
    while not story.finish:
        driver.step()
        passes.append((driver.core.runner.forward_passes, len(story.tokens)))
    assert passes == [(1, 0), (2, 1), (3, 2), (3, 3)]
    assert not driver.core.idle, "the last step had something to settle"
    driver.step()
    assert driver.core.idle


@pytest.mark.parametrize("tokens", [0, 5])
def test_abort_frees_everything_within_two_steps(start_core, adapters, prompt, tokens) -> None:
    driver = start_core(lookahead=True)
    driver.add(adapters[0])
    driver.call(lambda i: Load(command_id=i, rev=adapters[0].rev))
    stories = [
        driver.submit(f"r{n}", prompt(20, n), rev, max_tokens=100)
        for n, rev in enumerate((None, adapters[0].rev))
    ]
    driver.until(lambda: all(len(s.tokens) >= tokens for s in stories))
    for n in range(2):
        driver.core.take(Abort(f"r{n}"))
    driver.step()
    driver.step()
    assert [s.finish for s in stories] == ["abort", "abort"]
    pool = driver.call(GetSnapshot).snapshot.pool
    assert pool.kv_active == 0 and pool.adapter_active == 0
    assert driver.status(adapters[0].rev).leases == 0
    told = sum(len(s.tokens) for s in stories)
    assert driver.call(GetSnapshot).snapshot.generated_tokens == told, "a token that nobody got"


def test_an_evicted_adapters_last_row_is_its_own(start_core, adapters, prompt) -> None:
    """Its requests are aborted with a row under way; the slot's next adapter is not touched."""
    expected = start_core()
    expected.add(*adapters[:2])
    right = expected.submit("right", prompt(30, 1), adapters[1].rev, logprobs=0)
    expected.finish()
    driver = start_core(lookahead=True, slots=1)
    driver.add(*adapters[:2])
    for turn in range(3):
        gone = driver.submit(f"gone {turn}", prompt(20, turn), adapters[0].rev, max_tokens=200)
        driver.until(lambda gone=gone, turn=turn: len(gone.tokens) > turn)
        driver.call(lambda i: Evict(command_id=i, rev=adapters[0].rev, abort_running=True))
        next_one = driver.submit(f"next {turn}", prompt(30, 1), adapters[1].rev, logprobs=0)
        driver.finish()
        assert gone.finish == "abort"
        assert (next_one.tokens, next_one.logprobs) == (right.tokens, right.logprobs)
        driver.core.scheduler.check()


def test_shutdown_ends_what_is_under_way(start_core, prompt) -> None:
    driver = start_core(lookahead=True)
    story = driver.submit("r", prompt(9), max_tokens=200, ignore_eos=True)
    driver.until(lambda: len(story.tokens) > 2)
    frame = driver.core.shutdown()
    for delta in frame.deltas:
        driver.stories[delta.request_id].add(delta, frame.step)
    assert story.finish == "abort"


def test_deterministic_and_cpu_engines_have_none(start_core) -> None:
    assert not start_core().core.lookahead
    assert not start_core(deterministic=False).core.lookahead
