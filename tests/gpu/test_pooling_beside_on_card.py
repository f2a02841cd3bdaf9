"""One engine that generates and pools, on a card as in production: bf16, graphs, steps launched
ahead, adapters mixed.  Its vectors and scores are those of an engine that pools alone, on the CPU
in fp32, but for what bf16 rounds; what it generates beside them is what it generates without."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, PoolsToo
from engine.engine import Engine, Generation
from engine.messages import SamplingParams, Submit, TokenLogprobs
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from engine.pooling.keeping import keeping
from engine.pooling.requests import AbortPool, PoolRequest, PoolResult, unpacked
from tests.fakes.random_lora import write_lora

pytestmark = pytest.mark.gpu

CARD: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.03,
}
FAMILIES: dict[str, dict[str, Any]] = {"Qwen3": {"tie_word_embeddings": True}, "Llama": {}}
WORDS = (9, 12)  # for a text and against it
#: What two vectors have between them that differ by bf16's rounding alone.
COSINE = 0.9999
#: Log-probabilities that far apart may change places in bf16.
NEAR = 0.1
STEPS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, logprobs=3, ignore_eos=True)
#: Of inputs that come while others generate: one token, around a block, over many chunks.
LENGTHS = (1, 2, 15, 16, 17, 33, 100, 250, 301, 64, 7, 129)


@dataclass
class Rig:
    """Engines start once each: a start on a card captures its graphs."""

    root: Path
    model: Path
    adapters: list[Path]  # of unlike ranks; the last one has a head of three classes
    started: "dict[str, Both]" = field(default_factory=dict)

    def both(self, kind: str) -> "Both":
        """The engine that pools so and generates."""
        if kind not in self.started:
            self.started[kind] = Both(self, self.root / f"card-{kind}", kind)
        return self.started[kind]

    def on_cpu(self, kind: str) -> PoolingEngine:
        """The reference; its adapters get the revisions of the same files."""
        told: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "pooling": kind,
            "score_tokens": WORDS,
        }
        engine = PoolingEngine(PoolingConfig(model=str(self.model), **told))
        store = self.root / f"cpu-{kind}"
        store.mkdir(exist_ok=True)
        for folder in self.adapters:
            engine.add_folder(folder, store)
        return engine


@pytest.fixture(scope="module", params=FAMILIES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    import transformers

    root = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    config = getattr(transformers, f"{request.param}Config")(**SIZES | FAMILIES[request.param])
    built = getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16)
    built.save_pretrained(root / "model")
    model = root / "model"
    ranks = ((16, 0), (5, 0), (8, 3))
    adapters = [
        write_lora(root / f"r{rank}", model, rank, alpha=rank / 8, labels=labels)
        for rank, labels in ranks
    ]
    made = Rig(root, model, adapters)
    yield made
    for both in made.started.values():
        both.engine.close()


@dataclass
class Told:
    """What an engine had to say of everything that was asked of it at once."""

    tokens: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    results: dict[str, PoolResult] = field(default_factory=dict)
    beside: int = 0  # steps in which somebody got a token and an input went on


class Both:
    """An engine on the card, with the rig's adapters loaded."""

    def __init__(self, rig: Rig, store: Path, kind: str) -> None:
        small: dict[str, Any] = {"num_blocks": 512, "max_num_seqs": 16, "max_rank": 16, "slots": 4}
        rows: dict[str, Any] = {"max_batch_tokens": 512, "pooled_tokens": 48}
        wish = PoolsToo(root=str(rig.model), pooling=kind, score_tokens=WORDS)
        self.engine = Engine(
            EngineConfig(model=str(rig.model), pools=wish, **CARD, **small, **rows)
        )
        store.mkdir()
        self.revs = [self.engine.add_folder(folder, store) for folder in rig.adapters]
        for rev in self.revs:
            self.engine.load(rev)

    def on(self, count: int) -> list[str | None]:
        """Whose turn each of so many requests is: the base model's, and all adapters'."""
        every = [None, *self.revs]
        return [every[n % len(every)] for n in range(count)]

    def run(self, prompts: Sequence[list[int]], asked: Sequence[PoolRequest]) -> Told:
        """Streams first; an input more each time somebody got a token."""
        core, told, later = self.engine.core, Told(), list(asked)
        for n, (prompt, rev) in enumerate(zip(prompts, self.on(len(prompts)), strict=True)):
            core.take(Submit(request_id=f"g{n}", prompt=prompt, sampling=GREEDY, rev=rev))
        while core.scheduler.has_work or later or not core.idle:
            rows = core.stats.prompt_tokens
            frame = core.step()
            for delta in frame.deltas:
                assert not delta.code, delta.message
                told.tokens.setdefault(delta.request_id, []).extend(delta.logprobs)
            told.results |= {one.request_id: unpacked(one) for one in frame.pooled}
            told.beside += bool(frame.deltas) and core.stats.prompt_tokens > rows
            if later and frame.deltas:
                core.take(later.pop(0))
            core.scheduler.check()
        return told


def texts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(13, 331, n).tolist() for n in lengths]


def requests(
    inputs: Sequence[list[int]], revs: Sequence[str | None], **more: Any
) -> list[PoolRequest]:
    return [
        PoolRequest(request_id=f"p{n}", tokens=tokens, rev=rev, **more)
        for n, (tokens, rev) in enumerate(zip(inputs, revs, strict=True))
    ]


def cosines(got: Sequence[Any], wanted: Sequence[Any]) -> list[float]:
    """Of each vector, or of each input's row that is furthest off."""
    told = []
    for one, other in zip(got, wanted, strict=True):
        a, b = np.atleast_2d(one).astype(np.float64), np.atleast_2d(other).astype(np.float64)
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        told.append(float(((a * b).sum(1) / lengths).min()))
    return told


def parting(one: Sequence[TokenLogprobs], quiet: Generation) -> str:
    """ "" if the tokens are the same up to where bf16 may choose another."""
    for at, (mine, other) in enumerate(zip(one, quiet.logprobs, strict=True)):
        if mine.token != other.token:
            top = dict(other.top)
            near = mine.token in top and top[other.token] - top[mine.token] < NEAR
            return "" if near else f"token {at} is {mine}, not {other}"
        if abs(mine.logprob - other.logprob) > NEAR:
            return f"token {at} at {mine.logprob:.3f}, not {other.logprob:.3f}"
    return ""


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_vectors_beside_answers_are_those_of_a_cpu(rig: Rig, kind: str) -> None:
    """Rows of inputs share the graphs of mixed steps with those of streams."""
    prompts, inputs = texts((20, 41, 7, 90, 33, 64), seed=2), texts(LENGTHS, seed=3)
    both = rig.both(kind)
    on, graphs = both.on(len(inputs)), both.engine.core.runner.graphs
    quiet = both.engine.generate(prompts, GREEDY, both.on(len(prompts)))
    assert graphs is not None
    replays = graphs.num_replays
    told = both.run(prompts, requests(inputs, on))
    assert graphs.num_replays > replays + STEPS // 2, "steps were not those of production"
    assert both.engine.core.pool.counts.kv_active == 0
    assert told.beside > len(inputs) // 2, "they hardly met"
    partings = [parting(told.tokens[f"g{n}"], one) for n, one in enumerate(quiet)]
    assert not any(partings), "\n".join(partings)
    with rig.on_cpu(kind) as engine:
        wanted = engine.embed(inputs, revs=on)
        assert max(cosines(engine.embed(inputs[1:4]), wanted[1:4])) < 0.98, "adapters do nothing"
    got = [told.results[f"p{n}"].values for n in range(len(inputs))]
    near = cosines(got, wanted)
    assert min(near) >= COSINE, list(zip(LENGTHS, near, strict=True))


def test_the_last_row_behind_a_cached_prefix_is_the_same(rig: Rig) -> None:
    """The prefix is a prompt's: what a stream and an input begin with alike is shared."""
    [prefix] = texts((96,), seed=4)
    inputs = [prefix + tail for tail in texts((1, 5, 16, 40, 200, 31), seed=5)]
    both = rig.both("last")
    on = both.on(len(inputs))
    both.engine.generate([[*prefix, 7]] * 4, GREEDY, both.on(4))
    first = both.run([prefix[:50]], requests(inputs, on))
    again = both.run([prefix[:50]], requests(inputs, on))
    with rig.on_cpu("last") as engine:
        wanted = engine.embed(inputs, revs=on)
    for told in (first, again):
        got = [told.results[f"p{n}"] for n in range(len(inputs))]
        assert all(one.num_cached >= 96 for one in got)
        assert min(cosines([one.values for one in got], wanted)) >= COSINE
    lengths = [first.results[f"p{n}"].num_tokens for n in range(len(inputs))]
    assert lengths == list(map(len, inputs))


def test_scores_heads_and_token_vectors_are_those_of_a_cpu(rig: Rig) -> None:
    """By two words of the output head, by an adapter's own head, and each token's row."""
    inputs, streams = texts((5, 17, 40, 150, 33, 64, 90, 21), seed=6), texts((20, 9), seed=7)
    both = rig.both("last")
    on = both.on(len(inputs))
    scored = both.run(streams, requests(inputs, on, task="classify"))
    rows = both.run(streams, requests(inputs, on, task="tokens"))
    with rig.on_cpu("last") as engine:
        logits = [one.logits for one in engine.classify(inputs, revs=on)]
        vectors = engine.embed_tokens(inputs, revs=on)
    size = max(float(np.abs(one).max()) for one in logits if one is not None)
    for n, wanted in enumerate(logits):
        got = scored.results[f"p{n}"].logits
        assert got is not None and wanted is not None
        assert got.shape == ((3,) if on[n] == both.revs[2] else (1,))
        assert np.abs(got - wanted).max() < 0.03 * size, (n, got, wanted)
    # A row that is the worst of hundreds is further off than most are.
    got_rows = [rows.results[f"p{n}"].values for n in range(len(inputs))]
    assert min(cosines(got_rows, vectors)) >= 1 - 3 * (1 - COSINE)


def test_who_is_taken_back_leaves_the_others_as_they_were(rig: Rig) -> None:
    """While a step with rows of it is under way."""
    inputs = texts((300, 280, 50, 200), seed=8)
    both = rig.both("mean")
    on, core = both.on(len(inputs)), both.engine.core
    core.take(Submit(request_id="g0", prompt=[5] * 30, sampling=GREEDY))
    while not core.step().deltas:
        pass
    for request in requests(inputs, on):
        core.take(request)
    results: dict[str, PoolResult] = {}
    for n in itertools.count():
        results |= {one.request_id: unpacked(one) for one in core.step().pooled}
        if n == 2:
            core.take(AbortPool("p0"))
            core.take(AbortPool("p3"))
        if core.idle and not core.scheduler.has_work:
            break
    assert sorted(results) == ["p1", "p2"] and core.pool.counts.kv_active == 0
    with rig.on_cpu("mean") as engine:
        wanted = engine.embed(inputs, revs=on)
    got = [results[name].values for name in ("p1", "p2")]
    assert min(cosines(got, wanted[1:3])) >= COSINE


def test_an_embedder_alone_that_keeps_its_keys_gives_the_same(rig: Rig, tmp_path: Path) -> None:
    """`prefix_cache = "on"`: the same engine without streams, and without an output head."""
    told: dict[str, Any] = {"pooling": "last", "max_rank": 16, "slots": 4, "max_num_seqs": 8}
    config = keeping(PoolingConfig(model=str(rig.model), prefix_cache="on", **CARD, **told))
    assert config is not None and config.pools is not None and config.pools.alone
    [prefix] = texts((64,), seed=9)
    inputs = [prefix + tail for tail in texts(LENGTHS, seed=10)]
    with Engine(config) as engine:
        revs = [engine.add_folder(folder, tmp_path) for folder in rig.adapters]
        on = [(None, *revs)[n % 4] for n in range(len(inputs))]
        got, again = (engine.pool("embed", inputs, revs=on) for _ in range(2))
    with rig.on_cpu("last") as other:
        wanted = other.embed(inputs, revs=on)
    assert min(cosines([one.values for one in got], wanted)) >= COSINE
    assert min(cosines([one.values for one in again], wanted)) >= COSINE
    assert all(one.num_cached >= 64 for one in again)
