"""Adapters of long prompts as guests of the base's products, through the whole engine on Triton's
interpreter, where prompts are long from 25 rows on.  `tests/gpu` has the same in bf16."""

import os
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine import assembly, startup
from engine.config import PoolsToo
from engine.kernels import backend, lora_augment, tiles
from engine.messages import Evict, Load
from engine.models.layers import LoraLinear
from engine.pooling.requests import PoolRequest, unpacked

LONG = 24
ROOM = 32


@pytest.fixture
def took(monkeypatch) -> list[int]:
    """Switches to a card's way, with room behind the weights that is NaN; what comes out is the
    columns of each launch for guests."""
    columns: list[int] = []
    augment, made = lora_augment.augment, LoraLinear.__init__

    def counted(*args) -> int:
        columns.append(args[-1].kind.columns)
        return augment(*args)

    def poisoned(self, *args, **named) -> None:
        made(self, *args, **named)
        self.roomy.fill_(torch.nan)

    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    monkeypatch.setattr(assembly, "is_card", lambda device: True)
    monkeypatch.setattr(startup, "room_for", lambda *told: ROOM)
    monkeypatch.setattr(tiles, "PREFILL_ROWS", LONG)
    monkeypatch.setattr(LoraLinear, "__init__", poisoned)
    monkeypatch.setattr(lora_augment, "augment", counted)
    return columns


def start(start_core, **settings):
    sizes = {"max_num_seqs": 4, "max_rank": 64, "slots": 3, "max_batch_tokens": 64}
    sizes |= {"graph_tokens": LONG, "mixed_tokens": 64}
    driver = start_core(lookahead=True, deterministic=False, **{**sizes, **settings})
    driver.core.runner.graphs.use_graphs = False
    return driver


def ask(driver, name, tokens, adapter, **more):
    rev = adapter.rev if adapter else None
    return driver.submit(name, tokens, rev, **{"max_tokens": 2, "logprobs": 0, **more})


def one_by_one(start_core, asked, **more):
    """What torch says of (prompt, adapter), each alone."""
    told = []
    for tokens, adapter in asked:
        driver = start_core()
        driver.add(*([adapter] if adapter else []))
        told.append(ask(driver, "r", tokens, adapter, **more))
        driver.finish()
    return told


def check(stories, right) -> None:
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        values = [[one.logprob for one in each.logprobs] for each in (story, want)]
        assert values[0] == pytest.approx(values[1], abs=2e-3)


def loaded(driver, *adapters):
    driver.add(*adapters)
    for one in adapters:
        driver.call(lambda i, rev=one.rev: Load(command_id=i, rev=rev))


def test_prompts_whose_adapters_are_guests_answer_as_plain_torch(
    start_core, adapters, make_adapter, prompt, request
) -> None:
    """Two that share a step, the second of which lacks modules; one of a rank that fills the room;
    one beside the base, where there are no guests."""
    wide = make_adapter("wide", rank=29, seed=12, strength=0.2)
    asked = [
        (prompt(30, 0), adapters[0]),
        (prompt(20, 1), adapters[3]),
        (prompt(41, 2), wide),
        (prompt(33, 3), adapters[1]),
        (prompt(11, 4), None),
    ]
    right = one_by_one(start_core, asked)
    took = request.getfixturevalue("took")
    driver = start(start_core, slots=4)
    loaded(driver, adapters[0], adapters[1], adapters[3], wide)
    stories, expected = [], []
    for together, columns in ((asked[:2], 32), (asked[2:3], 32), (asked[3:], 0)):
        before = len(took)
        stories += [ask(driver, f"{len(stories)} {i}", *each) for i, each in enumerate(together)]
        driver.finish()
        new = took[before:]
        assert set(new) == ({columns} if columns else set()), new
        expected.append(len(new))
    assert expected[0] == expected[1] == 3 * 2  # of each layer: qkv, gate and up, down
    check(stories, right)


def test_a_slot_that_changed_hands_brings_the_new_adapter_as_a_guest(
    start_core, adapters, prompt, request
) -> None:
    asked = [(prompt(30), adapters[0]), (prompt(30), adapters[2]), (prompt(30), adapters[1])]
    right = one_by_one(start_core, asked)
    took = request.getfixturevalue("took")
    driver = start(start_core, slots=1)
    driver.add(*adapters)
    stories = []
    for tokens, adapter in asked:
        stories.append(ask(driver, adapter.rev, tokens, adapter))
        driver.finish()
        driver.call(lambda i, a=adapter: Evict(command_id=i, rev=a.rev))
    assert set(took) == {16}
    check(stories, right)


@pytest.mark.slow
def test_rows_ahead_of_an_invocation_are_the_bases_and_those_behind_it_may_be_guests(
    start_core, adapters, prompt, request
) -> None:
    tokens = prompt(90, 5)
    called = replace(
        adapters[0],
        manifest=msgspec.structs.replace(adapters[0].manifest, alora_tokens=tuple(tokens[10:12])),
    )
    asked = [(tokens, called)]
    right = one_by_one(start_core, asked)
    took = request.getfixturevalue("took")
    driver = start(start_core, max_batch_tokens=40, mixed_tokens=40)
    driver.add(called)
    stories = [ask(driver, "r", tokens, called)]
    with np.errstate(all="ignore"):  # padded steps have rows of nobody, which hold anything
        driver.finish()
    assert len(took) == 6  # of the chunks of 40, 40 and 10 the second has no rows of the base
    check(stories, right)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_inputs_that_are_pooled_may_be_guests_too(
    start_core, adapters, prompt, model_dir, request, kind
) -> None:
    pools = PoolsToo(root=str(model_dir), pooling=kind)
    asked = [prompt(n, n) for n in (30, 14, 3)]

    def pool(driver):
        loaded(driver, adapters[0])
        for n, tokens in enumerate(asked):
            driver.core.take(PoolRequest(request_id=f"p{n}", tokens=tokens, rev=adapters[0].rev))
        told = {}
        while len(told) < len(asked):
            told |= {one.request_id: unpacked(one) for one in driver.step().pooled}
        return [told[f"p{n}"] for n in range(len(asked))]

    plain = pool(start_core(pools=pools))
    took = request.getfixturevalue("took")
    rows = pool(start(start_core, pools=pools, pooled_tokens=64))
    assert took
    for one, other in zip(plain, rows, strict=True):
        assert np.abs(one.values - other.values).max() < 2e-3 * np.abs(one.values).max()
