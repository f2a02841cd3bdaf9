"""Graphs, lookahead and the draw on a card: the same bits as without, and no waiting."""

import warnings

import pytest
import torch

from engine.messages import Load, SamplingParams
from engine.sampler import Sampler, SamplerLimits
from engine.sequence import Sequence

pytestmark = pytest.mark.gpu

CUDA = {"device": "cuda", "dtype": "float32", "deterministic": False}
WISHES = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.8},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"logit_bias": {9: 3.0}, "min_tokens": 5},
]


def told(stories) -> list:
    return [(story.tokens, story.logprobs, story.finish) for story in stories]


def play(driver, prompt, count: int, revs=(None,), **sampling) -> list:
    """`count` requests of one length, so that steps with and without lookahead are alike."""
    wishes = {"logprobs": 2, "max_tokens": 24, "ignore_eos": True, **sampling}
    stories = [
        driver.submit(f"r{n}", prompt(17, n), revs[n % len(revs)], **wishes, **WISHES[n % 5])
        for n in range(count)
    ]
    driver.finish()
    return stories


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_graph_computes_the_bits_of_the_eager_step(start_core, prompt, count) -> None:
    answers = []
    for graphs in (False, True):
        driver = start_core(**CUDA)
        decode = driver.core.runner.decode
        decode.use_graphs = graphs
        answers.append(told(play(driver, prompt, count)))
        assert (decode.num_replays > 20) == graphs
    assert answers[0] == answers[1]


@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_graph_with_adapters_computes_the_bits_of_the_eager_step(
    start_core, adapters, prompt, count
) -> None:
    answers = []
    for graphs in (False, True):
        driver = start_core(**CUDA)
        driver.add(*adapters)
        for adapter in adapters:
            assert driver.call(lambda i, rev=adapter.rev: Load(command_id=i, rev=rev)).code == ""
        decode = driver.core.runner.decode
        decode.use_graphs = graphs
        revs = [a.rev for a in adapters[:2]] + [None]
        answers.append(told(play(driver, prompt, count, revs)))
        assert (decode.num_replays > 15) == graphs
    assert answers[0] == answers[1]


@pytest.mark.parametrize("count", [1, 5, 8])
def test_lookahead_changes_no_bit(start_core, prompt, count) -> None:
    answers = []
    for lookahead in (False, True):
        driver = start_core(lookahead=lookahead, **CUDA)
        answers.append(told(play(driver, prompt, count)))
    assert answers[0] == answers[1]


def test_ends_that_come_by_themselves_leave_nothing_behind(start_core, prompt) -> None:
    driver = start_core(**CUDA)
    assert driver.core.lookahead
    for turn in range(3):
        play(driver, prompt, 8, ignore_eos=False, stop_token_ids=tuple(range(3, 90)))
        driver.until(lambda: driver.core.idle)
        driver.core.scheduler.check()
        assert driver.core.pool.counts.kv_active == 0
        driver.stories.clear()
        driver.core.prefix.drop("base")
        assert driver.core.pool.num_free == driver.core.pool.num_blocks, turn


def test_decode_steps_allocate_nothing(start_core, prompt) -> None:
    driver = start_core(**CUDA)
    reserved = torch.cuda.memory_reserved()
    for count in (1, 3, 8):
        play(driver, prompt, count)
        driver.stories.clear()
    assert torch.cuda.memory_reserved() == reserved


def test_launching_and_drawing_never_wait_for_the_device(start_core, prompt) -> None:
    driver = start_core(**CUDA)
    runner = driver.core.runner
    launch, sample = runner.launch, runner.sample

    def watched(act):
        def call(argument):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
            try:
                return act(argument)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    stories = [
        driver.submit(f"r{n}", prompt(17, n), logprobs=2, max_tokens=24, **WISHES[n])
        for n in range(len(WISHES))
    ]
    driver.until(lambda: all(len(story.tokens) > 2 for story in stories))  # prefill may wait
    runner.launch, runner.sample = watched(launch), watched(sample)
    driver.finish()
    assert runner.decode.num_replays > 10


def test_the_memory_plan_is_kept(start_core, prompt) -> None:
    driver = start_core(device="cuda", num_blocks=0, gpu_memory_utilization=0.3)
    plan = driver.core.machine.memory
    assert plan.graphs > 0 and plan.steps > 0 and plan.total > plan.arena
    play(driver, prompt, 8)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.3 * total + (256 << 20), plan.table()


def test_a_draw_on_a_card_is_the_hosts() -> None:
    """Rows of every kind, with more history than the pinned buffer has room for, and without."""
    limits = SamplerLimits(vocab_size=500, eos_token_ids=(2,))
    logits = torch.randn(10, 512, generator=torch.Generator().manual_seed(1)) * 3
    rows = [
        Sequence(
            request_id=str(i),
            tokens=[1, 7, 9, 9] * (2000 if i == 3 else 1),
            num_prompt=2,
            sampling=SamplingParams(**{"temperature": 0.0, "logprobs": i % 4, **WISHES[i % 5]}),
            rev=None,
            identity="base",
            salt="",
            priority=50,
            order=i,
        )
        for i in range(10)
    ]
    host = Sampler(limits).sample(logits.clone(), rows)
    for max_rows in (1, 64):
        card = Sampler(limits, device=torch.device("cuda"), max_rows=max_rows)
        drawn = [card.launch(logits.cuda(), rows) for _ in range(3)]  # three on their way at once
        for each in map(card.finish, drawn):
            assert [s.token for s in each] == [s.token for s in host]
            for one, other in zip(each, host, strict=True):
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
                assert [t for t, _ in one.logprobs.top] == [t for t, _ in other.logprobs.top]
