"""The way that steps take on a card, on Triton's interpreter: padding, device plans, lookahead.

Only pinned memory, streams and graphs are missing, which `test_cuda_graphs.py` has.
"""

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine import startup
from engine.graphs import DecodeSteps
from engine.kernels import backend
from engine.messages import Abort, Evict, Load


@pytest.fixture
def on_card_path(monkeypatch) -> None:
    monkeypatch.setattr(backend, "use_kernels", lambda x, deterministic: not deterministic)
    monkeypatch.setattr(startup, "_is_card", lambda device: True)
    forward = DecodeSteps._forward

    def as_a_graph(self, batch, lora):
        """What a graph knows when it is captured: tensors, and nothing of this step's numbers."""
        rows = len(batch.tokens)
        starts = tuple(range(rows + 1))
        attn = replace(batch.attn, seq_lens=(0,) * rows, query_starts=starts, derived={})
        return forward(self, replace(batch, attn=attn), lora)

    monkeypatch.setattr(DecodeSteps, "_forward", as_a_graph)


def start(start_core, **settings):
    sizes = {"max_num_seqs": 3, "max_rank": 16, "slots": 2, "max_batch_tokens": 40}
    return start_core(lookahead=True, deterministic=False, **{**sizes, **settings})


def values(story) -> list[float]:
    return [one.logprob for one in story.logprobs]


@pytest.fixture
def expected(start_core, prompt):
    """What torch says, one request at a time.  Made before the way is switched."""

    def run(asked):
        told = []
        for n, length, adapter, tokens in asked:
            driver = start_core()
            if adapter is not None:
                driver.add(adapter)
            rev = adapter.rev if adapter else None
            told.append(driver.submit("r", prompt(length, n), rev, max_tokens=tokens, logprobs=0))
            driver.finish()
        return told

    return run


def test_a_mixed_and_padded_batch_answers_as_plain_torch(
    start_core, adapters, prompt, expected, request
) -> None:
    asked = [
        (0, 7, None, 5),
        (1, 30, adapters[0], 4),
        (2, 18, adapters[1], 4),
        (3, 3, None, 3),
    ]
    right = expected(asked)
    request.getfixturevalue("on_card_path")
    driver = start(start_core)
    driver.add(*adapters[:2])
    stories = [
        driver.submit(
            f"r{n}", prompt(length, n), a.rev if a else None, max_tokens=tokens, logprobs=0
        )
        for n, length, a, tokens in asked
    ]
    driver.finish()
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        assert values(story) == pytest.approx(values(want), abs=2e-3)
    decode = driver.core.runner.decode
    assert decode is not None and driver.core.runner.rungs == (1, 2, 3)


def test_padding_writes_into_no_block_and_a_slot_given_anew_is_seen(
    start_core, adapters, prompt, expected, request
) -> None:
    right = expected([(0, 9, adapters[0], 2), (0, 9, adapters[2], 2)])
    request.getfixturevalue("on_card_path")
    driver = start(start_core, max_num_seqs=4, slots=1, num_blocks=48)
    driver.add(adapters[0], adapters[2])
    arena, pool = driver.core.machine.arena, driver.core.pool
    for adapter, want in zip((adapters[0], adapters[2]), right, strict=True):
        assert driver.call(lambda i, a=adapter: Load(command_id=i, rev=a.rev)).code == ""
        free = [b for b in range(pool.num_blocks) if pool.owner(b) is None]
        arena.bytes.view(torch.float32)[free] = torch.nan
        names = [f"{adapter.rev[:8]} {n}" for n in range(3)]  # three rows of four
        stories = [
            driver.submit(name, prompt(9), adapter.rev, max_tokens=2, logprobs=0) for name in names
        ]
        driver.finish()
        for story in stories:
            assert story.tokens == want.tokens
            assert values(story) == pytest.approx(values(want), abs=2e-3)
        free = [b for b in range(pool.num_blocks) if pool.owner(b) is None]
        used = arena.bytes.view(torch.float32)[free].isnan().all(-1).logical_not()
        assert used.sum() <= 2 * 3, "blocks that the three used, and no others"
        driver.call(lambda i, a=adapter: Evict(command_id=i, rev=a.rev))


def test_an_abort_with_a_row_under_way_harms_nobody(start_core, prompt, expected, request) -> None:
    right = expected([(1, 12, None, 6)])
    request.getfixturevalue("on_card_path")
    driver = start(start_core)
    gone = driver.submit("gone", prompt(8), max_tokens=50)
    story = driver.submit("stays", prompt(12, 1), max_tokens=6, logprobs=0)
    driver.until(lambda: len(gone.tokens) == 2)
    driver.core.take(Abort("gone"))
    driver.finish()
    assert gone.finish == "abort" and story.tokens == right[0].tokens
