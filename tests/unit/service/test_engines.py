"""The engine processes of one model: which GPU each has, and what it is called."""

import asyncio

import pytest

from engine.config import EngineConfig
from engine.messages import Fatal
from lorad.config_sections import Model
from lorad.engines import Engines, on_cards, visible
from lorad.errors import NoUsableDevice
from lorad.service.events import EventRing
from lorad.service.replicas import Replicas


@pytest.mark.parametrize(
    "told, each",
    [
        ({}, ["0", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, ["4", "6", "-1"]),
        ({"CUDA_VISIBLE_DEVICES": " GPU-a , GPU-b "}, ["GPU-a", "GPU-b", "-1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["-1", "-1", "-1"]),
    ],
)
def test_each_replica_sees_one_gpu_of_those_that_the_daemon_sees(told, each):
    assert [visible(n, told) for n in range(3)] == each


def test_engines_of_several_gpus_each_have_the_next_few():
    assert [visible(n, {}, 2) for n in range(2)] == ["0,1", "2,3"]
    told = {"CUDA_VISIBLE_DEVICES": "7,5,GPU-a"}
    assert [visible(n, told, 2) for n in range(2)] == ["7,5", "-1"]


@pytest.fixture
def make(fake):
    """make(replicas, device, several): inside a loop; `dies` is each client's last word."""

    def make(replicas, device="cuda", *, several=False, dies=None, info=fake.INFO, ranks=1):
        entry = Model(base="m", name="tiny", replicas=replicas, device=device)
        config = EngineConfig(model="m", device=device, tensor_parallel=ranks)
        engines = Engines(entry, config, EventRing(), several=several)
        engines.clients = []
        for one in engines.each:
            one.link.env = one.link._new_client.keywords["env"]

            def new_client(name=one.replica):
                client = fake.Client(info, dies if name == "1" else None)
                engines.clients.append(client)
                return client

            one.link._new_client = new_client
        return engines

    return make


def test_one_engine_is_nothing_but_that_one(make):
    async def scenario():
        engines = make(1)
        (one,) = engines.each
        assert engines.replicas is None and (engines.link, engines.picture) == (
            one.link,
            one.picture,
        )
        assert one.replica == "" and one.link.env == {}

    asyncio.run(scenario())


def test_each_of_several_has_a_number_and_on_cards_a_gpu(make):
    async def scenario():
        engines = make(3)
        assert isinstance(engines.link, Replicas)
        assert [one.replica for one in engines.each] == ["0", "1", "2"]
        assert [one.link.env for one in engines.each] == [
            {"CUDA_VISIBLE_DEVICES": n} for n in ("0", "1", "2")
        ]
        assert [one.link._replica for one in engines.each] == ["0", "1", "2"]
        assert [one.link._model for one in engines.each] == ["", "", ""], "it is the only model"
        second = make(2, several=True).each[1].link
        assert (second._model, second._replica) == ("tiny", "1")
        assert [one.link.env for one in make(2, "cpu").each] == [{}, {}]

    asyncio.run(scenario())


def test_engines_of_several_models_that_are_on_one_card_share_it(make):
    async def scenario():
        wide, narrow, off = make(2), make(1), make(2, "cpu")
        (shared,) = on_cards([wide, narrow, off])
        assert shared == [wide.each[0].link, narrow.each[0].link]

    asyncio.run(scenario())


def test_an_engine_of_several_gpus_shares_with_all_that_are_on_one_of_them(make):
    async def scenario():
        wide, narrow, pair = make(3), make(1), make(1, ranks=2)
        (shared,) = on_cards([wide, narrow, pair])
        on_both = (*(one.link for one in wide.each[:2]), narrow.each[0].link, pair.each[0].link)
        assert sorted(map(id, shared)) == sorted(map(id, on_both))

    asyncio.run(scenario())


def test_more_replicas_than_gpus_are_refused_in_one_line(make):
    async def scenario():
        engines = make(2, dies=Fatal("no_device", "no CUDA device is usable"))
        link = engines.each[1].link
        link.start()
        async with asyncio.timeout(5):
            with pytest.raises(NoUsableDevice) as refused:
                await link.failed
        await link.stop()
        assert refused.value.message == (
            "replica 1: models.replicas = 2, and there is no GPU of its own for it"
        )
        assert "as many replicas" in refused.value.hint

    asyncio.run(scenario())


def test_what_is_auto_becomes_what_the_first_one_found(make, fake):
    async def scenario():
        engines = make(2, "auto")
        engines.agree()
        first, second = (one.link for one in engines.each)
        second.start()
        await asyncio.sleep(0)
        assert len(engines.clients) == 1 and second.info is None  # it waits for the first one
        first.start()
        async with asyncio.timeout(5):
            await second.ready.wait()
        assert (first.config.device, second.config.device) == ("auto", "cpu")
        await first.stop()
        await second.stop()

    asyncio.run(scenario())
