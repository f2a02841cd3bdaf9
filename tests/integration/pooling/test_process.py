"""A pooling engine as a process behind the daemon's link: answers, adapters, cancelling, deaths."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters.pack import pack_into
from engine.client import EngineClient
from engine.messages import (
    AddRevision,
    Evict,
    GetSnapshot,
    Load,
    PackedManifest,
    RemoveRevision,
    SamplingParams,
    SequenceDelta,
    Submit,
)
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from engine.pooling.requests import Floats, PoolRequest
from engine.status_messages import EngineSnapshot
from lorad.errors import LoradError
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from tests.fakes.tiny_bert import HIDDEN, write_bert, write_bert_adapter

DEADLINE = 120.0  # seconds: what no test ever needs
PACKED = {"block_size": 0, "dtype": "float32", "max_rank": 64}
TEXTS = [[256, 1, 2, 3, 257], [256, 9, 257], [256, *range(40), 257]]


@dataclass
class Scene:
    """A link, its engine's process, and the loop that both live in."""

    runner: asyncio.Runner
    link: EngineLink
    config: PoolingConfig
    manifests: list[PackedManifest]
    added: list[str] = field(default_factory=list)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, DEADLINE))

    async def pool(self, name: str, tokens: list[int], rev: str | None = None) -> Floats:
        result = await self.link.pool(PoolRequest(request_id=name, tokens=tokens, rev=rev))
        assert result.values is not None
        return result.values

    async def snapshot(self) -> EngineSnapshot:
        picture = (await self.link.call(GetSnapshot(self.link.next_id()))).snapshot
        assert picture is not None
        return picture

    async def add(self, rev: str) -> None:
        """As the daemon's services do for a revision that the engine does not know."""
        (manifest,) = (m for m in self.manifests if m.rev == rev)
        await self.link.call(AddRevision(command_id=self.link.next_id(), manifest=manifest))
        self.link.known.add(rev)
        self.added.append(rev)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[PackedManifest]]:
    model = write_bert(tmp_path_factory.mktemp("bert"), pooling="cls")
    store, sources = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("adapters")
    folders = [write_bert_adapter(sources / str(seed), seed) for seed in range(3)]
    return model, [pack_into(folder, model, store, **PACKED) for folder in folders]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def scene(manifests: tuple[Path, list[PackedManifest]]) -> Iterator[Scene]:
    model, packed = manifests
    config = PoolingConfig(
        model=str(model),
        device="cpu",
        adapter_pool=1 << 20,
        ram_cache=1 << 20,
        max_num_seqs=4,
        threads=1,
        deterministic=True,
    )
    with asyncio.Runner() as runner:

        async def start() -> EngineLink:
            link = EngineLink(config, EventRing(), new_client=EngineClient, first_pause=600.0)
            link.start()
            await asyncio.wait({asyncio.ensure_future(link.ready.wait()), link.failed}, **first)
            return link

        first: dict[str, Any] = {"return_when": asyncio.FIRST_COMPLETED}
        link = runner.run(asyncio.wait_for(start(), DEADLINE))
        assert link.state == "ready", link.progress
        scene = Scene(runner, link, config, packed)
        link.prepare = scene.add
        yield scene
        runner.run(link.stop())


def test_it_is_ready_and_says_how_it_pools(scene: Scene) -> None:
    info = scene.link.info
    assert info is not None and info.pooling is not None
    assert info.pooling.kinds == ("cls",) and info.pooling.pooling_origin == "1_Pooling/config.json"
    assert (info.pooling.width, info.block_size) == (HIDDEN, 0)


def test_vectors_are_those_of_the_library_on_the_base_and_on_adapters(scene: Scene) -> None:
    revs = [None, *(m.rev for m in scene.manifests[:2])]
    cases = [(tokens, rev) for tokens in TEXTS for rev in revs]

    async def ask() -> list[Floats]:
        asked = (scene.pool(f"{n}", tokens, rev) for n, (tokens, rev) in enumerate(cases))
        return await asyncio.gather(*asked)

    told = scene.run(ask())
    with PoolingEngine(scene.config) as engine:
        for manifest in scene.manifests[:2]:
            engine.add_adapter(manifest)
        expected = engine.embed([tokens for tokens, _ in cases], [rev for _, rev in cases])
    np.testing.assert_allclose(told, expected, atol=1e-6)
    assert not np.allclose(told[0], told[1], atol=1e-2), "the adapter does nothing"


def test_what_it_refuses_is_raised_with_its_code(scene: Scene) -> None:
    async def refused(request: PoolRequest) -> str:
        with pytest.raises(LoradError) as caught:
            await scene.link.pool(request)
        return caught.value.code

    too_long = PoolRequest(request_id="long", tokens=[1] * 65)
    foreign = PoolRequest(request_id="foreign", tokens=[999])
    unscored = PoolRequest(request_id="unscored", tokens=[1], task="classify")
    assert scene.run(refused(too_long)) == "context_length_exceeded"
    assert scene.run(refused(foreign)) == "invalid_value"
    assert scene.run(refused(unscored)) == "invalid_value"


def test_to_generate_is_an_error_and_not_silence(scene: Scene) -> None:
    async def ask() -> SequenceDelta:
        done: asyncio.Future[SequenceDelta] = asyncio.get_running_loop().create_future()
        submit = Submit(request_id="text", prompt=[1], sampling=SamplingParams())
        scene.link.submit(submit, done.set_result)
        return await done

    assert scene.run(ask()).code == "invalid_value"


def test_adapters_are_loaded_evicted_and_replaced_while_requests_run(scene: Scene) -> None:
    old, new = scene.manifests[0].rev, scene.manifests[2].rev
    link = scene.link

    async def churn() -> None:
        expected = {rev: await scene.pool("first", TEXTS[0], rev) for rev in (None, old, new)}
        over = asyncio.Event()
        rounds = 0

        async def keep_asking(worker: int, rev: str | None) -> None:
            nonlocal rounds
            while not over.is_set():
                values = await scene.pool(f"{worker}-{rounds}", TEXTS[0], rev)
                np.testing.assert_array_equal(values, expected[rev])
                rounds += 1

        asking = enumerate((None, old, old, new))
        workers = [asyncio.ensure_future(keep_asking(n, rev)) for n, rev in asking]
        for to in ("ram", "disk") * 4:
            asked = rounds
            await link.call(Evict(command_id=link.next_id(), rev=old, to=to))
            await link.call(Load(command_id=link.next_id(), rev=old))
            while rounds < asked + len(workers):
                await asyncio.sleep(0.001)
        over.set()
        await asyncio.gather(*workers)
        await link.call(RemoveRevision(link.next_id(), old))
        link.known.discard(old)
        assert old not in {r.rev for r in (await scene.snapshot()).revisions}
        np.testing.assert_array_equal(await scene.pool("last", TEXTS[0], new), expected[new])
        np.testing.assert_array_equal(await scene.pool("back", TEXTS[0], old), expected[old])

    scene.run(churn())


def test_who_is_cancelled_leaves_the_queue_and_the_others_are_answered(scene: Scene) -> None:
    rev, pid = scene.manifests[1].rev, scene.link.pid
    assert pid is not None

    async def cancel() -> None:
        before = (await scene.snapshot()).prompt_tokens
        os.kill(pid, signal.SIGSTOP)  # nothing is answered meanwhile
        try:
            asked = [asyncio.ensure_future(scene.pool(f"c{n}", TEXTS[0], rev)) for n in range(12)]
            await asyncio.sleep(0)
            assert scene.link.running == 12
            for task in asked[:10]:
                task.cancel()
            await asyncio.wait(asked[:10])
            assert scene.link.running == 2
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*asked[10:])
        picture = await scene.snapshot()
        assert (picture.waiting, picture.running) == (0, 0)
        assert {r.leases for r in picture.revisions} == {0}
        # Those who were taken back before a step began cost nothing.
        assert picture.prompt_tokens - before < 12 * len(TEXTS[0])

    scene.run(cancel())


def test_a_killed_engine_ends_each_waiting_request_with_an_error(scene: Scene) -> None:
    """The last one here: the next process is not waited for."""
    pid = scene.link.pid
    assert pid is not None

    async def kill() -> None:
        os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.ensure_future(scene.pool(f"k{n}", TEXTS[0])) for n in range(9)]
        await asyncio.sleep(0)
        assert scene.link.running == 9
        os.kill(pid, signal.SIGKILL)
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert {getattr(error, "code", error) for error in ended} == {"engine_restarting"}
        assert scene.link.running == 0 and scene.link.state == "engine_restarting"
        with pytest.raises(LoradError) as caught:
            await scene.pool("after", TEXTS[0])
        assert caught.value.code == "engine_restarting"

    scene.run(kill())
