"""One engine that generates and pools: its vectors and scores are those of an engine that pools
alone, whatever else is in its steps, and what it generates does not change by them."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.admission import StepBuilder
from engine.config import EngineConfig, PoolsToo
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.messages import Abort, SamplingParams, SequenceDelta, Submit
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from engine.pooling.keeping import keeping
from engine.pooling.requests import AbortPool, PoolRequest
from engine.pooling_messages import NO_GENERATION, Pooled
from tests.fakes.tiny_qwen3 import HIDDEN, NO, YES, write_qwen3, write_qwen3_adapter

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
KINDS = ("last", "mean", "cls", "max", "weighted_mean", "mean_sqrt_length")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("both")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return write_qwen3(root / "base")


@pytest.fixture(scope="module")
def adapters(root: Path) -> dict[str, Path]:
    """Two that change hidden states, and one with a head of three classes too."""
    labels = {"one": 0, "two": 0, "head": 3}
    return {
        name: write_qwen3_adapter(root / name, seed, labels=count)
        for seed, (name, count) in enumerate(labels.items(), start=1)
    }


class Both:
    """An engine, and what it has told of requests that were given to its core."""

    def __init__(
        self, model: Path, pools: dict[str, Any], lookahead: bool | None = None, **told: Any
    ) -> None:
        small = {"cpu_pool": 8 << 20, "ram_cache": 1 << 20, "device": "cpu", "threads": 1}
        wish = PoolsToo(root=str(model), **pools)
        config = EngineConfig(model=str(model), pools=wish, **(small | told))
        self.engine = Engine(config, lookahead=lookahead)
        self.core = self.engine.core
        self.pooled: dict[str, Pooled] = {}
        self.deltas: list[SequenceDelta] = []

    def step(self) -> None:
        frame = self.core.step()
        for one in frame.pooled:
            assert one.request_id not in self.pooled, "a second result"
            self.pooled[one.request_id] = one
        self.deltas += frame.deltas
        self.core.scheduler.check()

    def run(self) -> None:
        while self.core.scheduler.has_work or not self.core.idle:
            self.step()

    def ask(self, name: str, tokens: list[int], **more: Any) -> None:
        self.core.take(PoolRequest(request_id=name, tokens=tokens, **more))

    def prefix(self) -> tuple[int, int]:
        told = self.engine.snapshot().prefix
        return told.query_tokens, told.hit_tokens


@pytest.fixture
def both(model: Path) -> Iterator[Callable[..., Both]]:
    made: list[Both] = []

    def make(pools: dict[str, Any] | None = None, **told: Any) -> Both:
        made.append(Both(model, pools or {}, **told))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture
def alone(model: Path) -> Iterator[Callable[..., PoolingEngine]]:
    made: list[PoolingEngine] = []

    def make(**told: Any) -> PoolingEngine:
        small = {"adapter_pool": 2 << 20, "ram_cache": 1 << 20, "device": "cpu", "threads": 1}
        made.append(PoolingEngine(PoolingConfig(model=str(model), **small, **told)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def texts(count: int, *, seed: int = 0, longest: int = 150) -> list[list[int]]:
    random = np.random.default_rng(seed)
    lengths = [1, 2, 15, 16, 17, *random.integers(3, longest, count)][:count]
    return [random.integers(0, 250, n).tolist() for n in lengths]


def add(engine: Engine | PoolingEngine, adapters: dict[str, Path], store: Path) -> dict[str, str]:
    store = store / type(engine).__name__
    store.mkdir(exist_ok=True)
    return {name: engine.add_folder(folder, store) for name, folder in adapters.items()}


def worst(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_in_chunks_are_those_of_whole_inputs(
    kind: str, both: Callable[..., Both], alone: Callable[..., PoolingEngine]
) -> None:
    inputs = texts(20)
    mine = both({"pooling": kind}, max_batch_tokens=96)
    wanted = alone(pooling=kind).embed(inputs)
    assert worst(mine.engine.embed(inputs), wanted) < 1e-5 * max(np.abs(wanted[-1]).max(), 1)


def test_adapters_are_mixed_in_one_step_of_inputs_and_of_answers(
    both: Callable[..., Both],
    alone: Callable[..., PoolingEngine],
    adapters: dict[str, Path],
    root: Path,
) -> None:
    mine, other = both(max_batch_tokens=64, mixed_tokens=48, pooled_tokens=24), alone()
    revs = add(mine.engine, adapters, root)
    there = {None: None, **add(other, adapters, root)}
    names = [None, "one", "two", "head"] * 6
    inputs, prompts = texts(24, seed=1), texts(6, seed=2, longest=40)
    on = [None if name is None else revs[name] for name in names]
    quiet = mine.engine.generate(prompts, GREEDY, revs=on[:6])
    for n, (prompt, rev) in enumerate(zip(prompts, on, strict=False)):
        mine.core.take(Submit(request_id=f"g{n}", prompt=prompt, sampling=GREEDY, rev=rev))
    for n, (tokens, rev) in enumerate(zip(inputs, on, strict=True)):
        mine.ask(f"p{n}", tokens, rev=rev)
    mine.run()
    for n, one in enumerate(quiet):
        told = [t for d in mine.deltas if d.request_id == f"g{n}" for t in d.tokens]
        assert told == one.tokens
    wanted = other.embed(inputs, revs=on)
    got = [np.frombuffer(mine.pooled[f"p{n}"].values, "<f4") for n in range(24)]
    assert worst(got, wanted) < 1e-5 * max(float(np.abs(x).max()) for x in wanted)
    assert len(mine.pooled) == 24
    rows = {rev: 0 for rev in on}
    for tokens, rev in zip(inputs, on, strict=True):
        rows[rev] += len(tokens)
    cached = sum(one.num_cached for one in mine.pooled.values())
    counted = mine.core.stats.pooled_by_rev
    assert counted.keys() == rows.keys() and counted.total() == sum(rows.values()) - cached
    told = {one.rev: one.pooled_tokens for one in mine.engine.snapshot().revisions}
    assert told == {rev: counted[rev] for rev in revs.values()}
    assert other.core.stats.pooled_by_rev == Counter(
        {there[name]: rows[rev] for name, rev in [(None, None), *revs.items()]}
    )


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_step_that_is_launched_ahead_changes_nothing(
    kind: str, both: Callable[..., Both], alone: Callable[..., PoolingEngine]
) -> None:
    mine = both({"pooling": kind}, lookahead=True, max_batch_tokens=64, mixed_tokens=24)
    inputs = [[9] * 40 + tail for tail in texts(10, seed=9)]
    wanted = alone(pooling=kind).embed(inputs)
    mine.core.take(Submit(request_id="g", prompt=[5] * 8, sampling=GREEDY))
    for n, tokens in enumerate(inputs):
        mine.ask(f"p{n}", tokens)
    mine.core.take(AbortPool("p9"))
    for _ in range(4):
        mine.step()
    mine.core.take(AbortPool("p8"))  # rows of it may be under way
    mine.run()
    got = [np.frombuffer(mine.pooled[f"p{n}"].values, "<f4") for n in range(8)]
    assert worst(got, wanted[:8]) < 1e-5 * max(float(np.abs(wanted[0]).max()), 1)
    assert len(mine.pooled) == 8 and mine.core.pool.counts.kv_active == 0
    [quiet] = both().engine.generate([[5] * 8], GREEDY)
    assert [t for d in mine.deltas for t in d.tokens] == quiet.tokens


def test_what_many_begin_with_is_computed_once(
    both: Callable[..., Both], alone: Callable[..., PoolingEngine]
) -> None:
    """As a reranker asks: one query, many documents, all at once."""
    mine = both({"score_tokens": (YES, NO)}, max_batch_tokens=256)
    query = texts(6, seed=3)[5][:1] * 100
    pairs = [query + document for document in texts(30, seed=4, longest=40)]
    got = mine.engine.classify(pairs)
    wanted = alone(score_tokens=(YES, NO)).classify(pairs)
    assert worst([r.logits for r in got], [r.logits for r in wanted]) < 1e-5
    assert worst([r.values for r in got], [r.values for r in wanted]) < 1e-5
    asked, hit = mine.prefix()
    assert asked == sum(map(len, pairs))
    assert hit == 29 * 96, "all but the first find the query's six whole blocks"
    assert [r.num_cached for r in got] == [0] + [96] * 29
    assert [r.num_tokens for r in got] == [len(pair) for pair in pairs]


def test_a_cache_that_is_off_finds_nothing_and_gives_the_same(both: Callable[..., Both]) -> None:
    inputs = [[7] * 64 + tail for tail in texts(8, seed=5, longest=20)]
    on, off = both().engine, both({"prefix_cache": "off"})
    assert worst(on.embed(inputs), off.engine.embed(inputs)) < 1e-5
    assert off.prefix() == (0, 0)


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_where_every_row_is_read_nothing_is_left_out(kind: str, both: Callable[..., Both]) -> None:
    mine = both({"pooling": kind})
    inputs = [[7] * 64 + tail for tail in texts(4, seed=5, longest=20)]
    first, again = mine.engine.embed(inputs), mine.engine.embed(inputs)
    assert worst(first, again) < 1e-6 and mine.prefix() == (0, 0)
    assert mine.core.pool.counts.kv_cached == 0, "nobody could use what it leaves"


@pytest.mark.parametrize("name", ["prefix_cache", "chunked_prefill"])
def test_what_cannot_be_is_refused_with_the_reason(name: str, both: Callable[..., Both]) -> None:
    value = "on" if name == "prefix_cache" else "off"
    with pytest.raises(ConfigError, match=f"{name} = '{value}': ") as told:
        both({"pooling": "mean", name: value})
    assert "\n" not in told.value.message


def test_tokens_and_heads_and_prompts_of_many_chunks(
    both: Callable[..., Both],
    alone: Callable[..., PoolingEngine],
    adapters: dict[str, Path],
    root: Path,
) -> None:
    mine, other = both(max_batch_tokens=64), alone()
    engines = (mine.engine, other)
    heads = [add(engine, {"head": adapters["head"]}, root)["head"] for engine in engines]
    inputs = texts(12, seed=6)
    one, two = (engine.embed_tokens(inputs, dimensions=8) for engine in engines)
    assert worst(one, two) < 1e-5 and one[-1].shape == (len(inputs[-1]), 8)
    one, two = (
        [r.logits for r in engine.classify(inputs, revs=[head] * 12)]
        for engine, head in zip(engines, heads, strict=True)
    )
    assert worst(one, two) < 2e-5 * float(np.abs(two).max()) and one[0].shape == (3,)
    with pytest.raises(EngineError, match="has no classifier"):
        mine.engine.classify(inputs[:1])


def test_who_is_taken_back_is_told_nothing_and_holds_nothing(both: Callable[..., Both]) -> None:
    mine = both(max_batch_tokens=64)
    for name in ("a", "b", "c"):
        mine.ask(name, [3] * 200)
    mine.step()
    mine.core.take(AbortPool("a"))
    mine.core.take(AbortPool("c"))
    mine.core.take(AbortPool("nobody"))
    mine.core.take(Abort("b"))  # of a Submit of that id, which there is none of
    mine.run()
    assert list(mine.pooled) == ["b"] and not mine.pooled["b"].code and not mine.deltas
    assert mine.core.pool.counts.kv_active == 0


def test_wrong_requests_are_told_so_one_by_one(both: Callable[..., Both]) -> None:
    mine = both(max_model_len=64)
    mine.ask("empty", [])
    mine.ask("foreign", [10_000])
    mine.ask("long", [1] * 65)
    mine.ask("unknown", [1], rev="f" * 64)
    mine.ask("late", [1] * 8, deadline_seconds=0.0)
    mine.ask("wide", [1], dimensions=HIDDEN + 1)
    mine.ask("right", [1] * 65, truncate=True)
    mine.run()
    codes = {name: one.code for name, one in mine.pooled.items()}
    assert codes == {
        "empty": "invalid_value",
        "foreign": "invalid_value",
        "long": "context_length_exceeded",
        "unknown": "model_not_found",
        "late": "deadline_exceeded",
        "wide": "invalid_value",
        "right": "",
    }
    assert mine.pooled["right"].num_cut == 1


def test_a_shutdown_ends_them_with_a_word(both: Callable[..., Both]) -> None:
    mine = both(max_batch_tokens=64)
    mine.ask("under way", [3] * 200)
    mine.step()
    mine.ask("waits", [4])
    frame = mine.core.shutdown()
    assert {(one.request_id, one.code) for one in frame.pooled} == {
        ("under way", "draining"),
        ("waits", "draining"),
    }
    assert not frame.deltas


def test_one_that_gives_way_begins_anew_and_ends_the_same(both: Callable[..., Both]) -> None:
    """Of sums over chunks nothing is counted twice."""
    for kind in ("mean", "last"):
        mine = both({"pooling": kind}, max_batch_tokens=64)
        [wanted] = mine.engine.embed([list(range(200))])
        mine.ask("a", list(range(200)), cache_salt="another")
        mine.step()
        mine.step()
        [seq] = mine.core.scheduler._running
        assert 0 < seq.num_computed < 200
        mine.core.scheduler._preempt(seq, StepBuilder(mine.core.scheduler.limits))
        mine.run()
        got = np.frombuffer(mine.pooled["a"].values, "<f4")
        assert np.abs(got - wanted).max() < 1e-5
        assert mine.core.scheduler.num_preemptions == 1


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_unless_told_they_are_half_as_many_as_those_who_wait(
    streams: int, both: Callable[..., Both]
) -> None:
    mine = both()
    for n in range(streams):
        mine.core.take(Submit(request_id=f"g{n}", prompt=[5] * 8, sampling=GREEDY))
    while len({d.request_id for d in mine.deltas}) < streams:
        mine.step()
    mine.ask("p", [1] * 90)
    before = mine.core.stats.prompt_tokens
    mine.step()
    assert mine.core.stats.prompt_tokens - before == (streams + 1) // 2


def test_rows_beside_those_who_wait_for_a_token_are_few(both: Callable[..., Both]) -> None:
    mine = both(max_batch_tokens=256, mixed_tokens=64, pooled_tokens=12)
    mine.core.take(Submit(request_id="g", prompt=[5] * 8, sampling=GREEDY))
    while not any(d.tokens for d in mine.deltas):
        mine.step()
    for n in range(8):
        mine.ask(f"p{n}", [n + 1] * 90)
    rows = []
    while not mine.deltas[-1].finish_reason:
        before = mine.core.stats.prompt_tokens
        mine.step()
        rows.append(mine.core.stats.prompt_tokens - before)
    assert set(rows) == {12} and all(d.tokens for d in mine.deltas)
    before = mine.core.stats.prompt_tokens
    mine.step()
    assert mine.core.stats.prompt_tokens - before == 256, "nobody waits: steps are as large as any"
    mine.run()
    assert len(mine.pooled) == 8


class Frames:
    """What a served core says, as the daemon's side hears it."""

    def __init__(self, config: PoolingConfig) -> None:
        kept = keeping(config)
        assert kept is not None
        self.core = EngineCore(kept)
        self.pooled: dict[str, Pooled] = {}
        self.deltas: list[SequenceDelta] = []

    def run(self) -> None:
        while self.core.scheduler.has_work or not self.core.idle:
            frame = self.core.step()
            self.pooled |= {one.request_id: one for one in frame.pooled}
            self.deltas += frame.deltas


def told(model: Path, **more: Any) -> PoolingConfig:
    small = {"adapter_pool": 2 << 20, "ram_cache": 1 << 20, "device": "cpu", "threads": 1}
    return PoolingConfig(model=str(model), **(small | more))


@pytest.mark.parametrize("embeds", [True, False])
def test_a_decoder_that_only_pools_shares_beginnings_too(embeds: bool, root: Path) -> None:
    folder = write_qwen3(root / f"alone-{embeds}", embeds=embeds)
    words = {} if embeds else {"score_tokens": (YES, NO)}
    config = told(folder, **words)
    kept, task = Frames(config), "embed" if embeds else "classify"
    assert kept.core.info.purpose == "pool" and kept.core.info.pooling is not None
    inputs = [[9] * 70 + tail for tail in texts(20, seed=8, longest=60)]
    for n, tokens in enumerate(inputs):
        kept.core.take(PoolRequest(request_id=f"{n}", tokens=tokens, task=task))
    kept.core.take(Submit(request_id="g", prompt=[1], sampling=GREEDY))
    kept.run()
    with PoolingEngine(config) as whole:
        wanted = [r.values for r in whole.pool(task, inputs)]
    got = [np.frombuffer(kept.pooled[f"{n}"].values, "<f4") for n in range(20)]
    assert worst(got, wanted) < 1e-5
    assert sum(one.num_cached for one in kept.pooled.values()) == 19 * 64
    [refused] = kept.deltas
    assert (refused.code, refused.message) == ("invalid_value", NO_GENERATION)
    kept.core.close()


def test_a_decoder_keeps_nothing_where_that_is_told_or_would_take_too_much(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keeping(told(model)) is not None
    assert keeping(told(model, prefix_cache="off")) is None
    assert keeping(told(model, chunked_prefill="off")) is None
    assert keeping(told(model, pooling="mean")) is None
    longest = keeping(told(model, max_length=64, prefix_cache="on"))
    assert longest is not None and longest.max_model_len == 64
    monkeypatch.setattr("engine.pooling.keeping.KV_BYTES", longest.kv_floor)
    assert keeping(told(model, max_length=64)) is not None
    assert keeping(told(model)) is None
    with pytest.raises(ConfigError, match="prefix_cache = 'on': keys and values of an input of"):
        keeping(told(model, prefix_cache="on"))
