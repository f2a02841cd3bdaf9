"""A model that pools is told to give way when a request runs on one that generates beside it."""

import asyncio

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.messages import SamplingParams, Submit
from engine.pooling.config import PoolingConfig
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.giving_way import ON_A_CARD, GivingWay


def submit(request_id="a"):
    return Submit(request_id=request_id, prompt=[1], sampling=SamplingParams())


@pytest.fixture
def scene(fake, eventually):
    """Run a scenario with links that are ready: g, h generate, p, q pool; one card for each letter
    pair in `cards`, all that are left out are on the CPU."""

    def scene(scenario, cards=("gp",), share=0.2):
        async def run():
            clients, links = {}, {}
            on_card = "".join(cards)

            def make(name):
                device = "cuda" if name in on_card else "cpu"
                kind = EngineConfig if name in "gh" else PoolingConfig

                def new_client():
                    clients[name] = fake.Client(replace(fake.INFO, device=device))
                    return clients[name]

                return EngineLink(
                    kind(model="m"), EventRing(), new_client=new_client, first_pause=0.0
                )

            for name in "ghpq":
                links[name] = make(name)
            rule = GivingWay(list(links.values()), [[links[n] for n in card] for card in cards])
            for name in "pq":
                links[name].share = rule.join(links[name], share)
            for link in links.values():
                link.start()
            await eventually(lambda: all(link.state == "ready" for link in links.values()))
            for client in clients.values():
                client.silent = True
                client.shares.clear()  # of warm-ups
            try:
                async with asyncio.timeout(10):
                    await scenario(links, clients)
            finally:
                for link in links.values():
                    await link.stop()

        asyncio.run(run())

    return scene


def test_it_is_told_once_when_requests_begin_and_once_when_the_last_has_ended(scene, eventually):
    async def scenario(links, clients):
        for name in "abc":
            links["g"].submit(submit(name), lambda delta: None)
        assert clients["p"].shares == [0.2] and clients["q"].shares == []
        for name in "ab":
            clients["g"].finish(name)
        await eventually(lambda: len(links["g"].flights) == 1)
        assert clients["p"].shares == [0.2]
        clients["g"].finish("c")
        await eventually(lambda: not len(links["g"].flights))
        assert clients["p"].shares == [0.2, 1.0]

    scene(scenario)


def test_inputs_of_its_own_make_nobody_give_way(scene):
    async def scenario(links, clients):
        links["q"].submit(submit(), lambda delta: None)
        assert not clients["p"].shares and not clients["q"].shares

    scene(scenario, cards=("gpq",))


def test_of_two_generators_on_a_card_the_last_to_end_counts(scene, eventually):
    async def scenario(links, clients):
        links["g"].submit(submit("a"), lambda delta: None)
        links["h"].submit(submit("b"), lambda delta: None)
        clients["g"].finish("a")
        await eventually(lambda: not len(links["g"].flights))
        assert clients["p"].shares == [0.2]
        clients["h"].finish("b")
        await eventually(lambda: not len(links["h"].flights))
        assert clients["p"].shares == [0.2, 1.0]

    scene(scenario, cards=("ghp",))


def test_only_those_give_way_that_are_on_the_generators_card(scene):
    async def scenario(links, clients):
        links["g"].submit(submit(), lambda delta: None)
        assert clients["p"].shares == [0.2] and not clients["q"].shares
        links["h"].submit(submit(), lambda delta: None)
        assert clients["p"].shares == [0.2] and clients["q"].shares == [0.2]

    scene(scenario, cards=("gp", "hq"))


def test_all_on_the_cpu_share_it_and_nothing_with_a_card(scene):
    async def scenario(links, clients):
        links["g"].submit(submit(), lambda delta: None)
        assert not clients["p"].shares and not clients["q"].shares
        links["h"].submit(submit(), lambda delta: None)
        assert clients["p"].shares == [0.2] and clients["q"].shares == [0.2]

    scene(scenario, cards=("g",))


def test_a_process_that_comes_back_meanwhile_is_told_again(scene, eventually):
    async def scenario(links, clients):
        links["g"].submit(submit(), lambda delta: None)
        dead = clients["p"]
        dead.die()
        await eventually(lambda: clients["p"] is not dead and links["p"].state == "ready")
        assert clients["p"].shares == [0.2]

    scene(scenario)


def test_the_death_of_the_generator_ends_it(scene, eventually):
    async def scenario(links, clients):
        ends = []
        links["g"].submit(submit(), ends.append)
        clients["g"].silent = False
        clients["g"].die()
        await eventually(lambda: ends)
        assert clients["p"].shares[:2] == [0.2, 1.0], "then the next one warms up"

    scene(scenario)


def test_one_that_never_gives_way_is_told_nothing(scene):
    async def scenario(links, clients):
        links["g"].submit(submit(), lambda delta: None)
        assert not clients["p"].shares

    scene(scenario, share=1.0)


def test_left_to_itself_it_gives_way_on_a_card_and_not_on_the_cpu(scene):
    async def scenario(links, clients):
        for name in "gh":
            links[name].submit(submit(name), lambda delta: None)
        assert clients["p"].shares == [ON_A_CARD]
        assert 0.0 < ON_A_CARD < 1.0 and set(clients["q"].shares) <= {1.0}

    scene(scenario, share=0.0)
