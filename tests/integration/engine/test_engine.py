"""The library face, and sampling as requests see it."""

import math

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, LoadFailed, NoRoom, UnknownRevision
from engine.messages import AddRevision, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


@pytest.fixture
def engine(model_dir):
    settings = {"num_blocks": 128, "max_num_seqs": 8, "slots": 4, "ram_cache": 1 << 20}
    config = EngineConfig(model=str(model_dir), device="cpu", deterministic=True, **settings)
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(model_dir):
    """reference(ids): the log-probabilities after each token, by transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def logprobs(ids):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)

    return logprobs


def test_generate_serves_base_and_adapters_in_order(engine, adapters, prompt) -> None:
    engine.add_adapter(adapters[0].manifest)
    prompts = [prompt(9), prompt(30, 1), prompt(9)]
    together = engine.generate(prompts, GREEDY, [None, adapters[0].rev, adapters[0].rev])
    apart = [
        engine.generate([ids], GREEDY, [rev])[0]
        for ids, rev in zip(prompts, [None, adapters[0].rev, adapters[0].rev], strict=True)
    ]
    assert [g.tokens for g in together] == [g.tokens for g in apart]
    assert together[0].tokens != together[2].tokens
    assert {g.finish_reason for g in together} == {"length"}
    assert [g.cached_tokens for g in together] == [0, 0, 0] and apart[1].cached_tokens == 16


def test_greedy_tokens_and_logprobs_equal_transformers(engine, reference, prompt) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True)
    ids = prompt(25)
    [done] = engine.generate([ids], params)
    table = reference(ids + done.tokens)[len(ids) - 1 : -1]
    assert done.tokens == table.argmax(-1).tolist()
    for one, row in zip(done.logprobs, table, strict=True):
        best = torch.topk(row, 3)
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [t for t, _ in one.top] == best.indices.tolist()
        assert [v for _, v in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_equal_transformers_even_when_the_prompt_is_cached_and_cut(
    model_dir, reference, prompt, max_tokens
) -> None:
    config = EngineConfig(
        model=str(model_dir), device="cpu", num_blocks=64, max_num_seqs=4, max_batch_tokens=16
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=2)
    ids = prompt(50)
    with Engine(config) as engine:
        engine.generate([ids], GREEDY)
        [done] = engine.generate([ids], params)
    assert done.prompt_logprobs[0] is None and len(done.prompt_logprobs) == 50
    assert len(done.tokens) == max_tokens
    table = reference(ids)
    for i, one in enumerate(done.prompt_logprobs[1:], start=1):
        row = table[i - 1]
        assert one.token == ids[i]
        assert one.logprob == pytest.approx(float(row[ids[i]]), abs=1e-4)
        assert [t for t, _ in one.top] == torch.topk(row, 2).indices.tolist()


def test_a_seed_gives_the_same_text_alone_in_a_crowd_and_after_a_restart(
    engine, start_core, adapters, prompt
) -> None:
    engine.add_adapter(adapters[0].manifest)
    seeded = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=20, seed=42, ignore_eos=True)
    other = SamplingParams(temperature=1.0, max_tokens=20, seed=43, ignore_eos=True)
    [alone] = engine.generate([prompt(12)], seeded)
    crowd = engine.generate(
        [prompt(31, 1), prompt(12), prompt(12), prompt(7, 2)],
        [GREEDY, seeded, other, other],
        [adapters[0].rev, None, None, adapters[0].rev],
    )
    assert crowd[1].tokens == alone.tokens != crowd[2].tokens
    driver = start_core(max_batch_tokens=8)
    story = driver.submit(
        "again", prompt(12), temperature=1.0, top_p=0.95, max_tokens=20, seed=42, ignore_eos=True
    )
    driver.finish()
    assert story.tokens == alone.tokens


def test_frequency_penalty_ends_repetition(engine, prompt) -> None:
    bias = {7: 20.0, 8: 19.0, 9: 18.0}
    plain = SamplingParams(
        temperature=0.0, max_tokens=9, logit_bias={k: 40 * v for k, v in bias.items()}
    )
    [stuck] = engine.generate([prompt(5)], plain)
    assert set(stuck.tokens) == {7}
    params = SamplingParams(
        temperature=0.0, max_tokens=9, logit_bias=plain.logit_bias, frequency_penalty=2.0
    )
    [same] = engine.generate([prompt(5)], params)
    assert set(same.tokens) == {7}, "2.0 a token is less than the bias's distance of 40"
    strong = SamplingParams(
        temperature=0.0, max_tokens=9, logit_bias=plain.logit_bias, frequency_penalty=50.0
    )
    [varied] = engine.generate([prompt(5)], strong)
    assert set(varied.tokens) == {7, 8, 9}


def test_generation_stops_at_its_stop_ids_and_not_before_min_tokens(engine, prompt) -> None:
    [free] = engine.generate([prompt(9)], SamplingParams(temperature=0.0, max_tokens=30))
    stop = free.tokens[2]
    params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(stop,))
    [stopped] = engine.generate([prompt(9)], params)
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    late = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=5, stop_token_ids=(stop,))
    [forced] = engine.generate([prompt(9)], late)
    assert stop not in forced.tokens[:5] and len(forced.tokens) >= 5


def test_errors_have_their_own_class(engine, make_adapter, adapters, prompt) -> None:
    with pytest.raises(UnknownRevision):
        engine.generate([prompt(5)], GREEDY, ["f" * 64])
    with pytest.raises(UnknownRevision):
        engine.load("f" * 64)
    with pytest.raises(EngineError, match="empty"):
        engine.generate([[]], GREEDY)
    huge = make_adapter("huge", rank=400, seed=51)
    assert huge.manifest.num_blocks > 128
    engine.add_adapter(huge.manifest)
    with pytest.raises(NoRoom):
        engine.load(huge.rev)
    with pytest.raises(NoRoom):
        engine.generate([prompt(5)], GREEDY, [huge.rev])
    gone = make_adapter("gone", seed=52)
    engine.add_adapter(gone.manifest)
    from pathlib import Path

    Path(gone.manifest.path).unlink()
    with pytest.raises(LoadFailed, match="No such file"):
        engine.load(gone.rev)


def test_the_library_walks_an_adapter_through_its_life(engine, adapters, prompt) -> None:
    rev = adapters[1].rev
    engine.add_adapter(adapters[1].manifest)
    engine.load(rev)
    [status] = engine.snapshot().revisions
    assert (status.state, status.loads, status.gpu_bytes > 0) == ("idle", 1, True)
    engine.generate([prompt(20)], GREEDY, [rev])
    engine.evict(rev)
    [status] = engine.snapshot().revisions
    assert (status.state, status.slot, status.generated_tokens) == ("ram", None, 10)
    engine.remove_adapter(rev)
    snapshot = engine.snapshot()
    assert snapshot.revisions == () and snapshot.ram_used_bytes == 0
    assert snapshot.pool.free == snapshot.pool.total, "its cached KV went with it"


def test_the_snapshot_adds_up(engine, adapters, prompt) -> None:
    engine.add_adapter(adapters[0].manifest)
    engine.generate([prompt(40), prompt(40)], GREEDY, [None, adapters[0].rev])
    engine.generate([prompt(40)], GREEDY, [adapters[0].rev])
    snapshot = engine.snapshot()
    pool = snapshot.pool
    parts = pool.free + pool.kv_active + pool.kv_cached + pool.adapter_active + pool.adapter_idle
    assert parts == pool.total == 128
    assert pool.adapter_idle == adapters[0].manifest.num_blocks and pool.kv_active == 0
    assert snapshot.generated_tokens == 30 and snapshot.prompt_tokens == 40 + 40 + 8
    [status] = snapshot.revisions
    assert (status.prefix_query_tokens, status.prefix_hit_tokens) == (80, 32)
    assert (snapshot.prefix.query_tokens, snapshot.prefix.hit_tokens) == (120, 32)
    assert snapshot.prefix.saved_seconds == status.prefix_saved_seconds > 0
    assert (sum(snapshot.prefix.found_blocks), snapshot.prefix.lost_blocks) == (2, ())
    assert (snapshot.base.generated_tokens, status.generated_tokens) == (10, 20)
    assert math.isclose(snapshot.forward_passes, snapshot.step)


def test_a_rank_above_what_the_engine_was_built_for_is_refused(start_core, make_adapter) -> None:
    """The device's tables are sized by max_rank: a larger one must never reach a step."""
    driver = start_core(max_rank=4)
    large = make_adapter("too-large", rank=8, seed=3)
    answer = driver.call(lambda i: AddRevision(command_id=i, manifest=large.manifest))
    assert answer.code == "load_failed"
    assert "rank 8 exceeds max_rank = 4" in answer.message
