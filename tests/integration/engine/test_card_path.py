"""The way that steps take on a card, on Triton's interpreter: padding, device plans, lookahead.

Only pinned memory, streams and graphs are missing, which `test_cuda_graphs.py` has.
"""

import json
import os
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine.config import PoolsToo
from engine.messages import Abort, Evict, Load
from engine.pooling.requests import PoolRequest, unpacked

ROWS = (20, 16, 8, 4, 2, 1)  # of decode steps of up to 20 sequences


def start(start_core, **settings):
    sizes = {"max_num_seqs": 3, "max_rank": 16, "slots": 2, "max_batch_tokens": 40}
    driver = start_core(lookahead=True, deterministic=False, **{**sizes, **settings})
    driver.core.runner.graphs.use_graphs = True
    driver.core.runner.capture()
    if driver.core.draft_model is not None:
        driver.core.draft_model.graphs.use_graphs = True
        driver.core.draft_model.capture()
    return driver


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
        (0, 7, None, 3),
        (1, 30, adapters[0], 3),
        (2, 18, adapters[1], 2),
        (3, 3, None, 2),
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
    runner = driver.core.runner
    assert runner.graphs.num_replays == runner.forward_passes, "a step ran eagerly"


@pytest.mark.slow
def test_an_embeddings_adapter_is_applied_ahead_of_graphs_that_are_captured_when_it_comes_back(
    start_core, make_adapter, prompt, expected, request
) -> None:
    both = [
        make_adapter("an embedding", modules=(), ends=("embed_tokens",), seed=9),
        make_adapter("both ends", ends=("embed_tokens", "lm_head"), seed=10, rank=3),
    ]
    rows = make_adapter(
        "rows of its own", rows={"embed_tokens": tuple(range(9, 300, 2)), "lm_head": ()}, seed=11
    )
    asked = [(0, 7, both[0], 7), (1, 9, both[1], 7), (2, 12, rows, 2), (3, 3, None, 3)]
    right = expected(asked)
    request.getfixturevalue("on_card_path")
    driver = start(start_core, max_num_seqs=4, slots=3)
    driver.add(rows, *both)
    graphs = driver.core.runner.graphs
    usual = graphs.num_graphs
    stories = [
        driver.submit(f"r{n}", prompt(length, n), a and a.rev, max_tokens=tokens, logprobs=0)
        for n, length, a, tokens in asked
    ]
    driver.finish()
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        assert values(story) == pytest.approx(values(want), abs=2e-3)
    assert graphs.num_graphs > usual and graphs.num_replays > 0


@pytest.mark.slow
def test_heads_of_adapters_are_applied_behind_the_graphs_and_to_their_own_rows(
    start_core, adapters, make_adapter, prompt, expected, request
) -> None:
    """Slots change hands: one of an adapter with a head is taken by one without, and back."""
    heads = [
        make_adapter("only a head", modules=(), ends=("lm_head",), seed=7),
        make_adapter("a head too", ends=("lm_head",), seed=8, rank=6),
    ]
    asked = [
        (0, 7, heads[0], 5),
        (1, 30, adapters[0], 4),
        (2, 18, heads[1], 4),
        (3, 3, None, 3),
        (4, 9, heads[0], 3),
    ]
    right = expected(asked)
    request.getfixturevalue("on_card_path")
    driver = start(start_core)
    driver.add(adapters[0], *heads)
    stories = [
        driver.submit(f"r{n}", prompt(length, n), a and a.rev, max_tokens=tokens, logprobs=0)
        for n, length, a, tokens in asked
    ]
    driver.finish()
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        assert values(story) == pytest.approx(values(want), abs=2e-3)
    runner = driver.core.runner
    assert runner.graphs.num_replays == runner.forward_passes, "a step ran eagerly"


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


@pytest.mark.slow
def test_chunks_of_every_size_answer_as_plain_torch_with_a_graph_and_without(
    start_core, adapters, prompt, expected, request
) -> None:
    """Few and many sequences in graphs of one size; steps of more than 24 rows are eager."""
    asked = [(0, 23, adapters[1], 3), (1, 2, None, 5), (2, 49, None, 2), (3, 9, adapters[1], 2)]
    right = expected(asked)
    request.getfixturevalue("on_card_path")
    driver = start(start_core, graph_tokens=24, max_num_seqs=4)
    driver.add(adapters[1])
    driver.call(lambda i: Load(command_id=i, rev=adapters[1].rev))
    stories = []
    for n, length, a, tokens in asked:
        rev = a.rev if a else None
        ids = prompt(length, n)
        stories.append(driver.submit(f"r{n}", ids, rev, max_tokens=tokens, logprobs=0))
        driver.step()
    driver.finish()
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        assert values(story) == pytest.approx(values(want), abs=2e-3)
    runner = driver.core.runner
    assert 0 < runner.forward_passes - runner.graphs.num_replays <= 2


@pytest.mark.slow
def test_an_activated_lora_in_chunks_beside_others_answers_as_plain_torch(
    start_core, adapters, prompt, expected, request
) -> None:
    """A chunk ends before, in and after the invocation; a slot's rows are cut by base rows."""
    called = [
        replace(
            one,
            manifest=msgspec.structs.replace(
                one.manifest, alora_tokens=tuple(prompt(49, n)[at : at + 2])
            ),
        )
        for one, n, at in ((adapters[0], 0, 19), (adapters[1], 1, 20))
    ]
    asked = [(0, 49, called[0], 3), (1, 30, called[1], 4), (2, 9, adapters[2], 3), (3, 7, None, 3)]
    right = expected(asked)
    request.getfixturevalue("on_card_path")
    driver = start(start_core, max_num_seqs=4, slots=3, max_batch_tokens=20)
    driver.add(*called, adapters[2])
    stories = [
        driver.submit(f"r{n}", prompt(length, n), a and a.rev, max_tokens=tokens, logprobs=0)
        for n, length, a, tokens in asked
    ]
    driver.finish()
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        assert values(story) == pytest.approx(values(want), abs=2e-3)


def test_a_prompts_log_probabilities_come_from_padded_steps_too(
    start_core, prompt, expected, request
) -> None:
    ids = prompt(19)
    driver = start_core()
    want = driver.submit("r", ids, prompt_logprobs=1, max_tokens=2)
    driver.finish()
    request.getfixturevalue("on_card_path")
    driver = start(start_core)
    story = driver.submit("r", ids, prompt_logprobs=1, max_tokens=2)
    driver.finish()
    assert story.tokens == want.tokens
    assert [p.token for p in story.prompt_logprobs[1:]] == ids[1:]
    for one, other in zip(story.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-3)


@pytest.mark.slow
def test_a_plan_that_no_graph_holds_gets_one_when_it_comes_back(
    start_core, make_adapter, prompt, request
) -> None:
    """Two rows of rank 70 are more work than any graph of two rows that is captured at start."""
    request.getfixturevalue("on_card_path")
    high = [
        make_adapter(f"high {n}", rank=70, modules=("q_proj",), layers=(0,), seed=n)
        for n in range(2)
    ]
    driver = start(start_core, max_num_seqs=2, max_rank=80, max_batch_tokens=6)
    driver.add(*high)
    for adapter in high:
        driver.call(lambda i, a=adapter: Load(command_id=i, rev=a.rev))
    graphs, runner = driver.core.runner.graphs, driver.core.runner
    usual, eager = graphs.num_graphs, []
    for n, adapter in enumerate(high):
        driver.submit(str(n), prompt(3, n), adapter.rev, max_tokens=5, ignore_eos=True)
    while not all(story.finish for story in driver.stories.values()):
        before = runner.forward_passes - graphs.num_replays
        driver.step()
        eager.append(runner.forward_passes - graphs.num_replays - before)
    assert graphs.num_graphs == usual + 1
    assert eager[1:5] == [1, 1, 0, 0], "the third time it is captured, and replayed at once"


def test_the_choice_of_graphs_is_coarser_where_there_would_be_too_many(
    start_core, request, monkeypatch
) -> None:
    request.getfixturevalue("on_card_path")
    runner = start(start_core, max_num_seqs=20, max_rank=64).core.runner
    fine = runner.usual()
    assert [rung for rung, plan in fine if plan is None] == [(40, 20), *((n, n) for n in ROWS)]
    monkeypatch.setattr("engine.runner.START_GRAPHS", len(fine) - 1)
    coarse = runner.usual()
    assert len(coarse) < len(fine)
    assert [rung for rung, plan in coarse if plan is None] == [
        rung for rung, plan in fine if plan is None
    ]


@pytest.mark.slow
def test_steps_with_drafts_are_mixed_ones_and_replay_graphs_too(
    start_core, adapters, prompt, expected, request, monkeypatch
) -> None:
    """More is drawn for than there are sequences; the last of three drafts is wrong."""
    asked = [(0, 7, None, 8), (1, 12, adapters[0], 8)]
    right = expected(asked)
    known = {f"r{n}": want.tokens for (n, *_), want in zip(asked, right, strict=True)}

    def guess(seq, most: int) -> tuple[int, ...]:
        told = known[seq.request_id][seq.num_generated :][:most]
        return tuple(t + (i == 2) for i, t in enumerate(told))

    request.getfixturevalue("on_card_path")
    driver = start(start_core, max_num_seqs=2, speculation="ngram", speculation_tokens=3)
    monkeypatch.setattr(driver.core.scheduler.speculation, "_guess", guess)
    driver.add(adapters[0])
    driver.call(lambda i: Load(command_id=i, rev=adapters[0].rev))
    stories = [
        driver.submit(
            f"r{n}", prompt(length, n), a and a.rev, max_tokens=tokens, logprobs=0, ignore_eos=True
        )
        for n, length, a, tokens in asked
    ]
    driver.finish()
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        assert values(story) == pytest.approx(values(want), abs=2e-3)
    runner = driver.core.runner
    assert driver.core.stats.accepted_by_rev.total() >= 6
    assert runner.graphs.num_replays == runner.forward_passes, "a step ran eagerly"


@pytest.mark.slow
def test_a_model_that_drafts_replays_graphs_of_its_own(
    adapters_beside, model_dir, prompt, expected, request, monkeypatch
) -> None:
    """It drafts for itself: all that it says of the base is right."""
    start_core = request.getfixturevalue("start_core")
    monkeypatch.setattr("engine.speculation.WORTH", 0.0)
    plain = adapters_beside(0)[0]
    asked = [(0, 7, None, 8), (1, 20, plain, 8)]
    right = expected(asked)
    request.getfixturevalue("on_card_path")
    sizes = {"speculation": "draft", "draft_model": str(model_dir), "speculation_tokens": 3}
    driver = start(start_core, max_num_seqs=2, **sizes)
    driver.core.scheduler.speculation.cost = 0.0
    adapter = adapters_beside(driver.core.info.draft_block_bytes)[0]
    driver.add(adapter)
    driver.call(lambda i: Load(command_id=i, rev=adapter.rev))
    stories = [
        driver.submit(
            f"r{n}", prompt(length, n), a and a.rev, max_tokens=tokens, logprobs=0, ignore_eos=True
        )
        for n, length, a, tokens in asked
    ]
    driver.finish()
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        assert values(story) == pytest.approx(values(want), abs=2e-3)
    stats, model = driver.core.stats, driver.core.draft_model
    assert stats.accepted_by_rev[None] == stats.drafted_by_rev[None] >= 5
    assert model.graphs.num_replays == model.forward_passes > 4, "a pass ran eagerly"
    runner = driver.core.runner
    assert runner.graphs.num_replays == runner.forward_passes, "a step ran eagerly"


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


@pytest.mark.slow
def test_deterministic_requests_get_the_same_bits_in_any_company_on_a_cards_way(
    start_core, adapters, prompt, request
) -> None:
    """In chunks beside others, and alone behind a cached prefix, with adapters on the device."""
    asked = [(0, 18, adapters[0]), (1, 3, None), (2, 21, adapters[1])]
    request.getfixturevalue("on_card_path")
    driver = start_core(max_num_seqs=3, max_rank=16, slots=2, max_batch_tokens=24)
    driver.add(*adapters[:2])
    for one in adapters[:2]:
        driver.call(lambda i, rev=one.rev: Load(command_id=i, rev=rev))

    def ask(company, told):
        stories = []
        for n, length, a in told:
            name, rev = f"{n} {company}", a.rev if a else None
            stories.append(driver.submit(name, prompt(length, n), rev, max_tokens=2, logprobs=2))
        driver.finish()
        return [(story.tokens, story.logprobs) for story in stories]

    together = ask("together", asked)
    for one, want in zip(asked, together, strict=True):
        assert ask("alone", [one]) == [want]
    assert [driver.stories[f"{n} alone"].cached for n in range(3)] == [16, 0, 16]


@pytest.mark.slow
def test_guided_rows_follow_their_grammar_beside_free_ones(
    start_core, worded_dir, adapters, prompt, request
) -> None:
    pytest.importorskip("llguidance")
    from engine import grammar

    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2}
    wishes = [
        (None, {"grammar": grammar.json_schema(json.dumps(schema)), "max_tokens": 24}),
        (adapters[0].rev, {"grammar": grammar.regex("[a-f]{3}"), "temperature": 1.0, "seed": 3}),
        (adapters[0].rev, {"max_tokens": 6, "ignore_eos": True}),
    ]

    def run(driver) -> list:
        driver.add(adapters[0])
        for n, (rev, wish) in enumerate(wishes):
            driver.submit(f"r{n}", prompt(5 + n, n), rev, **wish)
        driver.finish()
        return list(driver.stories.values())

    right = run(start_core(worded_dir))
    request.getfixturevalue("on_card_path")
    driver = start(start_core, model=worded_dir)
    stories = run(driver)
    assert [story.tokens for story in stories] == [story.tokens for story in right]
    tokenizer = Tokenizer.from_file(str(worded_dir / "tokenizer.json"))
    texts = [tokenizer.decode(story.tokens) for story in stories[:2]]
    assert set(json.loads(texts[0])) <= {"red", "green"}
    assert re.fullmatch("[a-f]{3}", texts[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_inputs_that_are_pooled_in_padded_steps_give_what_plain_torch_gives(
    start_core, adapters, prompt, model_dir, request, kind
) -> None:
    """Their hidden states lie where the next step writes its own, beside rows of nobody."""
    pools = PoolsToo(root=str(model_dir), pooling=kind)
    shared = prompt(20, 3)
    asked = [(shared + prompt(n, n), adapters[0].rev if n % 2 else None) for n in (1, 9, 14, 30)]

    def pool(driver):
        driver.add(*adapters[:1])
        story = driver.submit("g", prompt(5, 1), adapters[0].rev, max_tokens=6)
        for n, (tokens, rev) in enumerate(asked):
            driver.core.take(PoolRequest(request_id=f"p{n}", tokens=tokens, rev=rev))
        told = {}
        while len(told) < len(asked) or not story.finish:
            told |= {one.request_id: unpacked(one) for one in driver.step().pooled}
        return story.tokens, [told[f"p{n}"] for n in range(len(asked))]

    tokens, plain = pool(start_core(pools=pools))
    request.getfixturevalue("on_card_path")
    driver = start(start_core, pools=pools, pooled_tokens=16, mixed_tokens=24)
    assert driver.core.lookahead
    same, padded = pool(driver)
    assert same == tokens
    for one, other in zip(plain, padded, strict=True):
        assert np.abs(one.values - other.values).max() < 2e-3 * np.abs(one.values).max()
    assert driver.core.runner.graphs.num_replays > 5
    assert (sum(one.num_cached for one in padded) > 0) == (kind == "last")
