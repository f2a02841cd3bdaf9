"""The same engine on a card: pinned host memory, a copy stream, fences, one upload a step."""

import pytest
import torch

from engine.messages import Evict, Load, SamplingParams
from engine.sampler import Sampler, SamplerLimits
from engine.sequence import Sequence

pytestmark = pytest.mark.gpu

#: A start compiles for all that may come: it is short where ranks are low and sizes are shared.
SIZES = {"max_rank": 16, "max_batch_tokens": 512}
CUDA = {"device": "cuda", "dtype": "float32", "deterministic": False, **SIZES}


def values(story) -> list[float]:
    return [one.logprob for one in story.logprobs]


@pytest.fixture
def on_cpu(start_core):
    """What the CPU says to one request."""

    def run(ids, adapter=None):
        driver = start_core()
        if adapter is not None:
            driver.add(adapter)
        story = driver.submit("cpu", ids, adapter.rev if adapter else None, logprobs=0)
        driver.finish()
        return story

    return run


def test_auto_is_the_card_and_the_arena_stays_within_its_share(start_core, prompt) -> None:
    before, _ = torch.cuda.mem_get_info()  # others may be on the card
    driver = start_core(device="auto", num_blocks=0, gpu_memory_utilization=0.2, **SIZES)
    info = driver.core.info
    assert (info.device, info.dtype) == ("cuda", "float32") and "NVIDIA" in info.device_name
    free, total = torch.cuda.mem_get_info()
    assert before - free <= 0.22 * total
    reserved = torch.cuda.memory_reserved()
    for n in range(6):
        driver.submit(f"r{n}", prompt(100, n), temperature=1.0, top_p=0.9)
    driver.finish()
    assert torch.cuda.memory_reserved() == reserved, "a step allocated from the card"


def test_a_mixed_batch_equals_the_cpu(start_core, adapters, prompt, on_cpu) -> None:
    driver = start_core(**CUDA)
    driver.add(*adapters)
    for adapter in adapters:
        assert driver.call(lambda i, rev=adapter.rev: Load(command_id=i, rev=rev)).code == ""
    stories = [
        driver.submit(f"r{n}", prompt(5 + 11 * n, n), a.rev if a else None, logprobs=0)
        for n, a in enumerate([None, *adapters])
    ]
    driver.finish()
    for n, (adapter, story) in enumerate(zip([None, *adapters], stories, strict=True)):
        expected = on_cpu(prompt(5 + 11 * n, n), adapter)
        assert story.tokens == expected.tokens
        assert values(story) == pytest.approx(values(expected), abs=1e-3)


def test_blocks_trade_places_behind_fences(
    start_core, make_adapter, adapters, prompt, on_cpu
) -> None:
    large = make_adapter("cuda-large", rank=64, seed=61)
    blocks = large.manifest.num_blocks + 20
    driver = start_core(**{**CUDA, "num_blocks": blocks, "max_rank": 64})
    driver.add(large, adapters[0])
    arena, pool = driver.core.machine.arena, driver.core.pool
    expected = {n: on_cpu(prompt(60, n), (None, large, adapters[0])[n]) for n in range(3)}
    for turn in range(6):
        driver.core.take(Load(command_id=700 + turn, rev=large.rev))
        driver.step()
        driver.core.take(Evict(command_id=800 + turn, rev=large.rev))
        free = [b for b in range(pool.num_blocks) if pool.owner(b) is None]
        arena.bytes.view(torch.float32)[free] = torch.nan
        torch.cuda.synchronize()  # copies wait for steps, and not for this
        revs = (None, large.rev, adapters[0].rev)
        stories = [
            driver.submit(f"{turn}-{n}", prompt(60, n), rev, logprobs=0)
            for n, rev in enumerate(revs)
        ]
        driver.finish()
        for n, story in enumerate(stories):
            assert story.tokens == expected[n].tokens
        for rev in revs[1:]:
            driver.call(lambda i, rev=rev: Evict(command_id=i, rev=rev))
        driver.core.scheduler.check()


def test_the_sampler_draws_the_same_on_either_device() -> None:
    limits = SamplerLimits(vocab_size=500, eos_token_ids=(2,))
    sampler, on_card = Sampler(limits), Sampler(limits, device=torch.device("cuda"))
    logits = torch.randn(6, 512, generator=torch.Generator().manual_seed(1)) * 3
    params = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.5, seed=3, min_p=0.05),
        SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, logit_bias={7: 50.0}, min_tokens=3),
    ]
    rows = [
        Sequence(
            request_id=str(i),
            tokens=[1, 7, 9, 9],
            num_prompt=2,
            sampling=p,
            rev=None,
            identity="base",
            salt="",
            priority=50,
            order=i,
        )
        for i, p in enumerate(params)
    ]
    cpu = sampler.sample(logits.clone(), rows)
    card = on_card.sample(logits.cuda(), rows)
    assert [s.token for s in cpu] == [s.token for s in card]
    assert card[0].logprobs.logprob == pytest.approx(cpu[0].logprobs.logprob, abs=1e-5)
