"""A model that drafts, beside the tiny one: answers stay what they are, and it sees all that it has
to see.

A model that drafts for itself is right on every token, greedy or drawn, as long as its KV is; so
drafts that are wrong show a hole in it, whatever was cached, preempted, aborted or thrown away.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from engine import grammar, speculation
from engine.drafting import pass_rows
from engine.errors import ConfigError
from engine.messages import GetSnapshot
from engine.rehearsal import rehearse_drafts
from tests.fakes.disturbed_core import disturb

WISHES = [
    {"max_tokens": 30},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.2, "seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logprobs": 3, "presence_penalty": 0.5, "max_tokens": 20},
    {"prompt_logprobs": 2, "max_tokens": 5},
    {"max_tokens": 2},
    {"min_tokens": 6, "stop_token_ids": tuple(range(3, 130)), "temperature": 1.0, "seed": 5},
    {"logit_bias": {2: 4.0}, "temperature": 1.5, "seed": 12, "max_tokens": 40},
    {"allowed_token_ids": tuple(range(40, 90)), "temperature": 2.0, "seed": 1, "logprobs": 0},
    {"temperature": 1.0, "seed": 3, "draft_tokens": 0, "max_tokens": 30},
    {"temperature": 1.0, "seed": 4, "draft_tokens": 1, "max_tokens": 30},
]
DRAWN = {"temperature": 1.0, "top_p": 0.9}


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory) -> Path:
    """One layer of other widths and heads, of the same vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small-llama")
    torch.manual_seed(8)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def always_worth_it(monkeypatch) -> None:
    monkeypatch.setattr(speculation, "WORTH", 0.0)


@pytest.fixture
def drafting(start_core, always_worth_it, adapters_beside):
    """drafting(folder, tokens, ...): a core whose drafts are that model's, whatever they cost."""

    def start(folder, tokens=4, **settings):
        more = {"speculation": "draft", "draft_model": str(folder), "speculation_tokens": tokens}
        driver = start_core(**more, **settings)
        driver.core.scheduler.speculation.cost = 0.0
        driver.add(*adapters_beside(driver.core.info.draft_block_bytes))
        return driver

    return start


def told(story):
    return story.tokens, story.logprobs, story.prompt_logprobs, story.finish


def play(driver, revs, prompt, seed: int) -> dict:
    """Requests of every wish arrive a few a step, in an order and on adapters of their own."""
    draw = random.Random(seed)
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


def compare(start_core, drafting, adapters, prompt, folder, seed, tokens, device=None, **sizes):
    device = device or {}
    revs = [None, *(a.rev for a in adapters)]
    plain = start_core(max_batch_tokens=48, **device)
    plain.add(*adapters)
    right = play(plain, revs, prompt, seed)
    driver = drafting(folder, tokens, max_batch_tokens=48, **sizes, **device)
    assert play(driver, revs, prompt, seed) == right
    snapshot = driver.call(GetSnapshot).snapshot
    assert snapshot.running == snapshot.pool.kv_active == 0
    assert not driver.core.scheduler.drafting._places, "kept for answers that have ended"
    return driver.core.stats


@pytest.mark.parametrize("tokens, lookahead, tight", [(4, True, True), (2, False, False)])
def test_answers_are_those_without_drafts(
    start_core, drafting, adapters, prompt, model_dir, tokens, lookahead, tight
) -> None:
    sizes = {"num_blocks": 24, "max_num_seqs": 4} if tight else {}
    stats = compare(
        *(start_core, drafting, adapters, prompt, model_dir, 0, tokens),
        lookahead=lookahead,
        **sizes,
    )
    assert stats.accepted_by_rev.total() > 30
    assert any(stats.accepted_by_rev[a.rev] for a in adapters)
    assert stats.drafted_by_rev.total() > stats.accepted_by_rev.total()


@pytest.mark.late
def test_nor_does_a_smaller_model_of_other_widths_change_any(
    start_core, drafting, adapters, prompt, small_dir
) -> None:
    stats = compare(start_core, drafting, adapters, prompt, small_dir, 1, 3, lookahead=True)
    assert stats.drafted_by_rev.total() > 50


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 24, "max_num_seqs": 4}], ids=["", "tight"])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_answers_are_those_without_drafts_of_any_length(
    start_core, drafting, adapters, prompt, model_dir, small_dir, tokens, lookahead, sizes
) -> None:
    for seed, folder in ((1, model_dir), (2, small_dir)):
        compare(
            *(start_core, drafting, adapters, prompt, folder, seed, tokens),
            lookahead=lookahead,
            **sizes,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_answers_on_a_card_are_those_without_drafts(
    start_core, drafting, adapters, prompt, small_dir, tokens, lookahead
) -> None:
    """Deterministic, so that a row's bits are the same whoever stands beside it."""
    card = {"device": "cuda", "dtype": "float32", "deterministic": True, "max_rank": 16}
    compare(
        *(start_core, drafting, adapters, prompt, small_dir, 1, tokens, card), lookahead=lookahead
    )


# ------------------------------------------------------------------- what it has to see
def submit_all(driver, prompt, number, **wish):
    for n in range(number):
        driver.submit(f"r{n}", prompt(10 + 7 * n, n), ignore_eos=True, **wish)


@pytest.mark.parametrize(
    "wish, sizes",
    [
        ({}, {}),
        pytest.param(DRAWN, {}, marks=pytest.mark.late),
        pytest.param({}, {"num_blocks": 17}, marks=pytest.mark.late),
        (DRAWN, {"num_blocks": 17}),
    ],
    ids=["greedy", "drawn", "greedy, tight", "drawn, tight"],
)
def test_a_model_that_drafts_for_itself_is_always_right(
    drafting, model_dir, prompt, wish, sizes
) -> None:
    """Whatever of its KV is cached, and however often a sequence gives way."""
    driver = drafting(model_dir, 4, lookahead=True, max_num_seqs=4, **sizes)
    for _ in range(2):  # the second time, prompts are found in the cache
        submit_all(driver, prompt, 6, max_tokens=60, **wish)
        driver.finish()
        driver.stories.clear()
    stats = driver.core.stats
    assert stats.drafted_by_rev.total() == stats.accepted_by_rev.total() > 200
    assert bool(sizes) == bool(driver.core.snapshot().preemptions)


def test_it_computes_nothing_that_others_have_computed_for_it(drafting, model_dir, prompt) -> None:
    driver = drafting(model_dir, 4)
    ids, rows = prompt(100), []
    model, propose = driver.core.draft_model, driver.core.draft_model.propose

    def note(asks, fences=()):
        rows.extend(ask.length for ask in asks)
        return propose(asks, fences)

    model.propose = note
    for name in ("first", "again"):
        driver.submit(name, ids, max_tokens=8, ignore_eos=True)
        driver.finish()
        told, rows[:] = list(rows), []
        assert told == {"first": [64, 38], "again": [5, 2]}[name]


def test_a_long_prompt_is_seen_a_part_at_a_time_and_keeps_nobody_waiting(
    drafting, model_dir, prompt
) -> None:
    driver = drafting(model_dir, 4, mixed_tokens=16)
    short = driver.submit("short", prompt(5), max_tokens=150, ignore_eos=True)
    driver.until(lambda: len(short.tokens) > 6)
    long = driver.submit("long", prompt(150, 1), max_tokens=60, ignore_eos=True)
    passes = []
    model, propose = driver.core.draft_model, driver.core.draft_model.propose

    def note(asks, fences=()):
        passes.append({ask.seq.request_id: (ask.length, ask.count) for ask in asks})
        return propose(asks, fences)

    model.propose = note
    driver.finish()
    parts = [told["long"] for told in passes if "long" in told]
    catching_up = [length for length, count in parts if not count]
    assert len(catching_up) >= 2 and all(length % 16 == 0 for length in catching_up)
    assert all(sum(length for length, _ in told.values()) <= 64 for told in passes)
    both = [told for told in passes if told.get("long", (0, 1))[1] == 0]
    assert any(told["short"][1] > 0 for told in both if "short" in told)
    assert long.finish == short.finish == "length"
    stats = driver.core.stats
    assert stats.drafted_by_rev.total() == stats.accepted_by_rev.total()


def test_an_adapter_is_drafted_for_by_the_base(drafting, model_dir, adapters, prompt) -> None:
    """Its own blocks hold the base's KV beside its own, and are right in both."""
    driver = drafting(model_dir, 3)
    rev = adapters[3].rev
    for name in ("a", "b"):
        driver.submit(name, prompt(50), rev, max_tokens=40, ignore_eos=True)
        driver.finish()
    assert driver.stories["a"].tokens == driver.stories["b"].tokens
    assert driver.stories["b"].cached == 48
    stats = driver.core.stats
    assert 0 < stats.accepted_by_rev[rev] < stats.drafted_by_rev[rev]


@pytest.mark.late
def test_an_activated_lora_is_drafted_for_in_blocks_that_it_shares_with_the_base(
    start_core, drafting, adapters, adapters_beside, model_dir, prompt
) -> None:
    """What the base's sequence has filled before the invocation is not computed again."""
    ids = prompt(60)

    def called(adapter):
        manifest = msgspec.structs.replace(
            adapter.manifest, rev="ca11" * 16, alora_tokens=tuple(ids[40:42])
        )
        return replace(adapter, manifest=manifest)

    right: dict[str, list[int]] = {}
    for driver in (start_core(), drafting(model_dir, 5)):
        own = called(adapters_beside(driver.core.info.draft_block_bytes)[0])
        driver.add(own)
        for name, rev in (("base", None), ("called", own.rev), ("again", own.rev)):
            driver.submit(name, ids, rev, max_tokens=40, ignore_eos=True)
            driver.finish()
        right = right or {name: story.tokens for name, story in driver.stories.items()}
    assert {name: story.tokens for name, story in driver.stories.items()} == right
    assert driver.stories["called"].cached == 32, "the base's blocks"
    stats = driver.core.stats
    assert stats.drafted_by_rev[None] == stats.accepted_by_rev[None] > 20
    assert stats.drafted_by_rev[own.rev] > 0


@pytest.mark.late
def test_guided_answers_beside_drafts_stay_what_they_are_and_have_none(
    start_core, drafting, worded_dir, prompt
) -> None:
    schema = {"enum": ["a word", "another one", "and a third, which is longer"]}
    text = grammar.json_schema(json.dumps(schema))
    answers = []
    for driver in (start_core(worded_dir), drafting(worded_dir, 4, model=worded_dir)):
        for n in range(2):
            driver.submit(f"guided {n}", prompt(9, n), grammar=text, temperature=1.0, seed=n)
            driver.submit(f"free {n}", prompt(12, n), max_tokens=30, ignore_eos=True)
        driver.finish()
        answers.append({name: story.tokens for name, story in driver.stories.items()})
    assert answers[0] == answers[1]
    stats, free = driver.core.stats, sum(len(answers[0][f"free {n}"]) for n in range(2))
    assert 0 < stats.drafted_by_rev[None] == stats.accepted_by_rev[None] < free


class Chaos:
    """Requests, aborts, loads and evictions at random in a pool that is too small."""

    def __init__(self, adapters, prompt, seed: int, wish) -> None:
        self.adapters, self.draw, self.wish = adapters, random.Random(seed), wish
        draw = self.draw
        self.asked = {
            f"r{n}": (prompt(draw.randrange(3, 60), n % 5), draw.choice([None, *adapters]))
            for n in range(16)
        }

    def submit(self, driver, name) -> None:
        ids, adapter = self.asked[name]
        seed = int(name[1:])
        driver.submit(name, ids, adapter and adapter.rev, max_tokens=40, seed=seed, **self.wish)

    def answers(self, driver) -> dict[str, list[int]]:
        driver.add(*self.adapters)
        for name in self.asked:
            self.submit(driver, name)
        driver.finish()
        return {name: story.tokens for name, story in driver.stories.items()}

    def play(self, driver) -> None:
        draw = self.draw
        for name in self.asked:
            self.submit(driver, name)
            disturb(driver, draw, self.adapters)
        driver.finish()
        driver.core.scheduler.check()


def chaos(start_core, drafting, adapters, prompt, folder, seed, tokens, lookahead, wish) -> dict:
    right = Chaos(adapters, prompt, seed, wish).answers(start_core())
    sizes = {"num_blocks": 21, "max_num_seqs": 5, "mixed_tokens": 24, "max_batch_tokens": 64}
    driver = drafting(folder, tokens, lookahead=lookahead, **sizes)
    Chaos(adapters, prompt, seed, wish).play(driver)
    ends: dict = {"preemptions": driver.core.snapshot().preemptions}
    for name, story in driver.stories.items():
        ends[story.finish] = ends.get(story.finish, 0) + 1
        whole = story.finish in ("length", "stop")
        assert story.tokens == (right[name] if whole else right[name][: len(story.tokens)])
    assert driver.core.snapshot().pool.kv_active == 0
    stats = driver.core.stats
    return ends | {"base": (stats.drafted_by_rev[None], stats.accepted_by_rev[None])}


@pytest.mark.late
def test_aborts_evictions_and_preemptions_leave_no_hole(
    start_core, drafting, adapters, prompt, model_dir
) -> None:
    world = start_core, drafting, adapters, prompt, model_dir
    ends = chaos(*world, 3, 5, True, {"temperature": 0.0})
    assert ends["preemptions"] and ends["abort"] and ends["length"]
    drafted, accepted = ends["base"]
    lost = drafted - accepted
    assert accepted > 20
    assert lost <= 5 * ends["abort"] + 5 * ends.get("stop", 0), "only what ended in between"


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_nor_do_they_in_many_lives(
    start_core, drafting, adapters, prompt, model_dir, tokens, lookahead
) -> None:
    accepted = 0
    for seed in range(10, 14):
        for wish in ({"temperature": 0.0}, {"temperature": 1.0}):
            world = start_core, drafting, adapters, prompt, model_dir
            accepted += chaos(*world, seed, tokens, lookahead, wish)["base"][1]
    assert accepted > 50


def test_what_drafts_take_counts_as_a_part_of_their_step(drafting, model_dir, prompt) -> None:
    driver, taken = drafting(model_dir, 4), []
    model, take = driver.core.draft_model, driver.core.draft_model.take_seconds

    def note() -> float:
        taken.append(take())
        return taken[-1]

    model.take_seconds = note
    driver.submit("r", prompt(20), max_tokens=20, ignore_eos=True)
    driver.finish()
    assert sum(map(bool, taken)) >= 4 and take() == 0.0
    assert driver.core.stats.base_steps.seconds.total > sum(taken)


# ------------------------------------------------------------------- before it is ready
@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 1, "mixed_tokens": 100}], ids=str)
def test_a_rehearsal_runs_the_largest_passes_that_can_come(drafting, model_dir, sizes) -> None:
    driver = drafting(model_dir, 4, **sizes)
    model, config = driver.core.draft_model, driver.core.config
    packed, pack = [], model._batcher.pack

    def note(work, drawing):
        packed.append([(chunk.length, chunk.start) for chunk in work.chunks])
        return pack(work, drawing)

    model._batcher.pack = note
    rehearse_drafts(model, config, max_len=config.max_model_len, num_blocks=config.num_blocks)
    rows = pass_rows(config.mixed_tokens)
    assert max(sum(length for length, _ in chunks) for chunks in packed) == rows
    assert {len(chunks) for chunks in packed} == {1, config.max_num_seqs}
    assert any(all(length == 2 for length, _ in chunks) for chunks in packed)
    assert any(start and length > 2 for chunks in packed for length, start in chunks)
    assert model.forward_passes == 0, "they were a rehearsal"


@pytest.mark.parametrize(
    "told, why",
    [
        ({"max_position_embeddings": 128}, "it reaches 128 tokens, and sequences may have 256"),
        ({"vocab_size": 200}, "another vocabulary: 200 tokens, and not 256"),
        ({"num_hidden_layers": 3}, "weights and the model that it drafts for"),
    ],
)
def test_a_model_that_cannot_draft_ends_a_start_before_its_weights_are_read(
    start_core, model_dir, tmp_path, told, why
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | told))
    with pytest.raises(ConfigError, match=why):
        start_core(speculation="draft", draft_model=str(tmp_path), max_model_len=256)
