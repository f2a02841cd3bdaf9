"""Which model an adapter is for, and how several are seen as one."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest
from msgspec import structs

from engine.config import EngineConfig
from engine.messages import AddRevision, RemoveRevision
from engine.pooling.config import PoolingConfig
from lorad import wire
from lorad.errors import LoradError
from lorad.registry.store import StagingDir
from lorad.service.catalog import Catalog, Entry
from lorad.service.choosing import choose
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.explain import Explaining
from lorad.service.lineup import Lineup, ModelAdapters
from lorad.service.meter import Meter
from lorad.service.names import Names, entry_of
from lorad.service.picture import Picture
from lorad.service.pictures import Pictures, together
from lorad.service.reception import Reception
from lorad.service.registration import Registration
from lorad.service.requests import RequestService
from lorad.service.revisions import Revisions
from lorad.service.seams import Backend
from lorad.service.shares import Shares
from lorad.service.tenants import Tenant, account_of


class Home:
    """A world of two models: "base" takes what its config's `fits` names, and so does "other"."""

    def __init__(self, world, fake):
        self.world, self.clients = world, []
        w = world
        w.names.models = ("base", "other")
        w.intake._inspect = self.inspecting("base")
        intake = w.intake.alike(inspect=self.inspecting("other"), pack=w.pack)

        def new_client():
            self.clients.append(fake.Client())
            return self.clients[-1]

        self.link = EngineLink(
            w.link.config, w.events, new_client=new_client, first_pause=0.0, model="other"
        )
        self.revisions = Revisions(
            w.registry,
            self.link,
            intake,
            w.catalog,
            w.events,
            w.tasks,
            w.revisions.shelf,
            model="other",
        )
        registration = Registration(
            "other",
            w.names,
            self.link,
            intake,
            self.revisions,
            w.events,
            check_pin=w.check_pin,
        )
        self.model = ModelAdapters(
            "other",
            w.names,
            self.link,
            intake,
            self.revisions,
            registration,
            w.events,
            w.tasks,
            check_pin=w.check_pin,
            refresh=w.picture.refresh,
        )
        w.adapters.models = Lineup(w.catalog, [w.model, self.model])
        w.adapters.outcomes._models = w.adapters.models
        self.pictures = Pictures({"base": w.picture, "other": Picture(self.link)})
        self.engines = {"base": lambda rev: (w.link, ""), "other": lambda rev: (self.link, "")}

    def inspecting(self, model):
        def inspect(folder, /):
            config = json.loads((folder / "adapter_config.json").read_text())
            if model not in config.get("fits", ["base", "other"]):
                error = LoradError("adapter_invalid", f"{model} has no such layers")
                error.details["reason"] = "E_NO_MATCH"
                raise error
            return self.world.inspect(folder)

        return inspect

    async def start(self):
        self.link.start()
        async with asyncio.timeout(5):
            await self.link.ready.wait()

    def known(self, model):
        client = self.clients[-1] if model == "other" else self.world.engine
        return {c.manifest.rev for c in client.kinds(AddRevision)}

    async def add(self, name, n, fits=("base", "other"), base="", **options):
        staging = await self.world.adapters.stage()
        config = {"n": n, "fits": fits, "base_model_name_or_path": base}
        (staging.path / "adapter_config.json").write_text(json.dumps(config))
        return await self.world.adapters.add(
            staging, name, **{"source": "upload", "model": "", **options}
        )


@pytest.fixture
def home(world, fake):
    """home(scenario): `scenario(home)` with two models, both of whose engines are up."""

    def run(scenario):
        async def inner(w):
            home = Home(w, fake)
            await home.start()
            try:
                await scenario(home)
            finally:
                await home.link.stop()

        world(inner)

    return run


def test_an_adapter_goes_to_the_engine_of_the_only_model_that_it_fits(home, eventually):
    async def scenario(h):
        await h.add("one", 1, fits=["base"])
        await h.add("two", 2, fits=["other"], load=True)
        w = h.world
        assert (w.registry.get("one").model, w.registry.get("two").model) == ("base", "other")
        assert h.known("base") == {w.rev(1)} and h.known("other") == {w.rev(2)}
        assert w.adapters.resolve("one").model == "base"
        assert w.adapters.resolve("two").model == "other"
        assert w.adapters.resolve("other").base and w.adapters.resolve("other").model == "other"
        await eventually(lambda: h.revisions.resident(w.rev(2)))
        assert not w.revisions.resident(w.rev(2))

    home(scenario)


def test_what_fits_several_is_refused_until_somebody_says_for_which(home):
    async def scenario(h):
        with pytest.raises(LoradError, match="it fits base, other") as refused:
            await h.add("a", 1)
        assert refused.value.details["reason"] == "E_MODEL"
        assert "--model base" in refused.value.hint
        await h.add("a", 1, model="other")
        assert h.world.registry.get("a").model == "other"
        await h.add("b", 2, base="somebody/other")
        assert h.world.registry.get("b").model == "other", "its config names a base"
        await h.add("a", 3, replace=True)
        assert h.world.registry.get("a").model == "other", "a name stays with its model"

    home(scenario)


def test_what_fits_none_says_what_each_model_has_against_it(home):
    async def scenario(h):
        with pytest.raises(LoradError, match=r"base: base has .*; other: other has") as refused:
            await h.add("a", 1, fits=[])
        assert refused.value.details["reason"] == "E_MODEL"
        with pytest.raises(LoradError, match="other has no such layers") as refused:
            await h.add("a", 1, fits=["base"], model="other")
        assert refused.value.details["reason"] == "E_NO_MATCH"
        with pytest.raises(LoradError, match="no model 'nobody' is served here"):
            await h.add("a", 1, model="nobody")
        with pytest.raises(LoradError, match="'other' is the base model's name"):
            await h.add("other", 1)

    home(scenario)


def test_a_name_and_its_content_are_of_one_model_at_a_time(home, eventually):
    async def scenario(h):
        await h.add("a", 1, model="base")
        with pytest.raises(LoradError, match="is an adapter of base, and not of other") as refused:
            await h.add("a", 2, model="other", replace=True)
        assert refused.value.code == "name_taken"
        with pytest.raises(LoradError, match="an adapter of base already") as refused:
            await h.add("b", 1, model="other")
        assert refused.value.details["reason"] == "E_MODEL"
        assert refused.value.hint == "loractl rm a, or add it for base"
        w = h.world
        w.adapters.lease(w.rev(1))
        await w.adapters.remove("a")
        with pytest.raises(LoradError, match="an adapter of base already") as refused:
            await h.add("b", 1, model="other")  # a request uses it on the other engine yet
        assert "rm" not in refused.value.hint, "there is no name to remove"
        w.adapters.release(w.rev(1))
        await eventually(lambda: w.catalog.model_of(w.rev(1)) is None)
        assert w.engine.kinds(RemoveRevision)
        await h.add("b", 1, model="other")
        assert w.adapters.resolve("b").model == "other"

    home(scenario)


def test_an_engine_that_dies_takes_only_its_own_adapters_along(home, eventually):
    async def scenario(h):
        await h.add("one", 1, fits=["base"], load=True)
        await h.add("two", 2, fits=["other"], load=True)
        w, dead = h.world, h.clients[-1]
        dead.die()
        await eventually(lambda: len(h.clients) == 2 and h.link.state == "ready")
        await eventually(lambda: h.revisions.resident(w.rev(2)))
        assert w.revisions.resident(w.rev(1)) and len(w.clients) == 1
        assert h.clients[-1].revisions == {w.rev(2): "gpu"}
        died = [e for e in w.events.newest(100) if e.type == "engine.died"]
        assert [event.message.partition(":")[0] for event in died] == ["other"]

    home(scenario)


def test_adapters_of_a_model_that_is_not_served_wait_and_harm_nothing(home):
    async def scenario(h):
        await h.add("two", 2, fits=["other"])
        record = h.world.registry.get("two")
        entry = entry_of(record, ("base", "third"))
        assert (entry.rev, entry.model) == (None, "")
        assert entry_of(record, ("renamed",)).model == "renamed", "all are of a model that is alone"
        assert entry_of(record, ("base", "other")).rev == h.world.rev(2)
        assert h.world.names.serving("two") == h.world.rev(2)
        h.world.names.models = ("base", "third")
        with pytest.raises(LoradError, match="is an adapter of 'other', which is not") as refused:
            h.world.names.serving("two")
        assert 'a [[models]] with name = "other"' in refused.value.hint
        with pytest.raises(LoradError, match="is an adapter of 'other', which is not") as refused:
            await h.add("two", 3, fits=["base"], replace=True)
        assert (refused.value.code, refused.value.hint[:14]) == ("name_taken", "loractl rm two")
        assert h.world.registry.get("two") == record, "its content is not another base's now"

    home(scenario)


def test_content_that_waits_for_its_model_is_nobody_elses_meanwhile(home):
    async def scenario(h):
        w = h.world
        await h.add("waits", 1, model="other")
        w.names.models = ("base", "third")  # as after a start with another configuration
        w.names.refresh("waits")
        w.catalog.forget(w.rev(1))
        with pytest.raises(LoradError, match=r"an adapter of other already \(waits\)") as refused:
            await h.add("b", 1, model="base")
        assert refused.value.details["reason"] == "E_MODEL"
        asked = wire.Names(names=("waits",))
        for wish in (w.adapters.load, w.adapters.pin, w.adapters.evict):
            (item,) = (await wish(asked)).items
            assert not item.ok and "which is not served here" in item.message
        (item,) = (await w.adapters.unpin(asked)).items
        assert item.ok and item.state == "registered"

    home(scenario)


def test_a_name_whose_content_is_another_models_is_told_so(home):
    async def scenario(h):
        w = h.world
        await h.add("later", 1, model="other", load=True)
        w.listing._picture = h.pictures
        await h.pictures.refresh()
        assert w.listing.page().items[0].state == "idle"
        w.catalog.drop("later")
        w.catalog.put(Entry("first", w.rev(1), model="base"))  # as a registry of old may have it
        w.names.refresh("later")
        with pytest.raises(LoradError, match="'later' does not exist"):
            w.adapters.resolve("later")
        (item,) = (await w.adapters.load(wire.Names(names=("later",)))).items
        assert item.message == "'later' has the content of first, an adapter of base"
        (row,) = w.listing.page().items
        assert (row.state, row.slot) == ("registered", None), "what the engine has is another's"
        explaining = Explaining(w.names, h.engines)
        told = await explaining.explain("later")
        assert not told.served and "an adapter of base by another name" in told.why

    home(scenario)


def test_an_adapter_whose_name_became_a_bases_is_not_asked_for(home):
    async def scenario(h):
        w = h.world
        await h.add("later", 1, model="base")
        assert w.names.shadowed() == []
        w.names.models = ("base", "other", "later")  # as after a start with another configuration
        w.names.refresh("later")
        assert w.names.shadowed() == ["later"]
        assert w.catalog.get("later").rev is None and w.catalog.count("base") == 0
        (item,) = (await w.adapters.load(wire.Names(names=("later",)))).items
        assert item.code == "name_taken" and "a base model's name now" in item.message
        told = await Explaining(w.names, h.engines).explain("later")
        assert "base model has this name" in told.why
        await w.adapters.remove("later")
        assert w.names.shadowed() == []

    home(scenario)


def test_content_that_two_models_claim_is_served_on_the_first_alone():
    names = Names(SimpleNamespace(), Catalog(), models=("x", "y"))
    catalog = names.catalog
    catalog.put(Entry("a", "r1", model="x"))
    catalog.put(Entry("b", "r1", "r2", model="y"))
    assert catalog.names_of("r1") == ("a",) and catalog.model_of("r1") == "x"
    assert catalog.get("b").rev is None and not catalog.referenced("r2")
    record = SimpleNamespace(model="y", serving_rev="r1", candidate_rev=None)
    assert names.elsewhere(record) == "x"
    catalog.drop("a")
    catalog.put(Entry("b", "r1", model="y"))
    assert catalog.model_of("r1") == "y" and catalog.get("b").rev == "r1"


def test_pictures_of_several_are_added_up_in_a_common_block(home):
    async def scenario(h):
        await h.add("one", 1, fits=["base"], load=True)
        await h.add("two", 2, fits=["other"], load=True)
        await h.pictures.refresh()
        both, w = h.pictures.snapshot, h.world
        assert set(h.pictures.by_rev) == {w.rev(1), w.rev(2)}
        assert (both.slots_total, both.slots_used, both.pid) == (16, 2, 0)
        assert both.pool.total == 128 and both.prefix.query_tokens == 180
        h.clients[-1].die()
        h.pictures.by_model["other"].snapshot = None
        assert h.pictures.snapshot.slots_total == 8 and set(h.pictures.by_rev) == {w.rev(1)}

    home(scenario)


def test_blocks_of_other_sizes_are_counted_in_the_largest_that_divides_both(fake):
    one = fake.Client().snapshot()
    other = fake.Client().snapshot()
    small = type(other.pool)(
        total=10,
        free=4,
        kv_active=0,
        kv_cached=0,
        adapter_active=3,
        adapter_idle=3,
        block_bytes=3 << 14,
        block_size=0,
    )

    pool = together([one, structs.replace(other, pool=small)]).pool
    assert (pool.block_bytes, pool.block_size) == (1 << 14, 0), "16 tokens are four of these"
    assert pool.total == 64 * 4 + 10 * 3 and pool.free == 60 * 4 + 4 * 3
    assert together([one, other]).pool.block_size == 16
    assert together([]) is None and together([one]) is one


def test_each_base_of_several_has_counters_of_its_own():
    alone, several = Meter(models=("a",)), Meter(models=("a", "b"))
    assert set(alone.names) == {"__base__"}
    several.pooled(
        "embeddings", name=None, model="b", tenant="", num_inputs=2, num_tokens=7, received=0.0
    )
    assert several.names["__base__:b"].prompt_tokens == 7
    assert several.names["__base__:a"].prompt_tokens == 0
    several.keep([])
    assert set(several.names) == {"__base__:a", "__base__:b"}


def test_a_catalog_remembers_whose_content_was_until_it_is_forgotten():
    catalog = Catalog([Entry("a", "r1", model="x"), Entry("b", "r2", "r3", model="y")])
    assert [entry.name for entry in catalog.of("y")] == ["b"]
    assert [catalog.count(model) for model in "xyz"] == [1, 1, 0]
    assert [catalog.model_of(rev) for rev in ("r1", "r2", "r3", "r4")] == ["x", "y", "y", None]
    catalog.drop("a")
    assert catalog.model_of("r1") == "x" and catalog.count("x") == 0
    catalog.put(Entry("b", None, model="y"))
    assert catalog.count("y") == 0
    catalog.forget("r1")
    assert catalog.model_of("r1") is None


def test_one_model_alone_is_asked_no_question(tmp_path):
    lineup = Lineup(Catalog(), [SimpleNamespace(model="a")])
    names = Names(SimpleNamespace(), Catalog(), models=("a",))

    async def scenario():
        found = await choose(lineup, names, StagingDir(tmp_path), "x", "", None)
        assert found == (lineup.first, None), "nothing was looked at"

    asyncio.run(scenario())


def test_engines_on_one_card_start_in_turn_and_are_told_what_is_taken_already():
    def link(share):
        return SimpleNamespace(
            config=EngineConfig(model="m", gpu_memory_utilization=share), info=None, pid=None
        )

    one, two = link(0.5), link(0.4)
    vectors = SimpleNamespace(config=PoolingConfig(model="m"), info=None, pid=None)
    shares, order = Shares([one, two, vectors]), []

    async def start(link, pid):
        async with shares.turn(link) as config:
            order.append(pid)
            link.pid = pid
            await asyncio.sleep(0)
            return config

    async def scenario():
        told = await asyncio.gather(start(one, 1), start(two, 2), start(vectors, 3))
        assert [config.gpu_memory_utilization for config in told[:2]] == [0.5, 0.9]
        assert told[2] is vectors.config
        one.pid = None  # it died: what the others hold is there still
        assert (await start(one, 4)).gpu_memory_utilization == 0.9
        two.pid, two.config = None, structs.replace(two.config, gpu_memory_utilization=0.5)
        assert (await start(two, 5)).gpu_memory_utilization == 0.98, "all that an engine takes"

    asyncio.run(scenario())
    assert order == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("card", "told"), [(1000, 0.52), (0, 0.4)], ids=["card", "cpu"])
def test_a_generator_that_is_replaced_is_told_what_one_that_pools_holds(card, told):
    info = SimpleNamespace(weight_bytes=70, arena_bytes=50, card_bytes=card)
    vectors = SimpleNamespace(config=PoolingConfig(model="m"), info=info, pid=7)
    config = EngineConfig(model="m", gpu_memory_utilization=0.4)
    one = SimpleNamespace(config=config, info=None, pid=None)

    async def scenario():
        async with Shares([vectors, one]).turn(one) as config:
            assert config.gpu_memory_utilization == pytest.approx(told)

    asyncio.run(scenario())


def test_an_engine_that_waits_for_its_turn_is_loaded_after_the_other(fake, eventually):
    made = []

    def new_client():
        made.append(fake.Client())
        return made[-1]

    async def scenario():
        config, events = EngineConfig(model="m"), EventRing()
        links = [EngineLink(config, events, new_client=new_client, model=n) for n in ("a", "b")]
        shares = Shares(links)
        for link in links:
            link.turn = partial(shares.turn, link)
            link.start()
        try:
            async with asyncio.timeout(5):
                for link in links:
                    await link.ready.wait()
        finally:
            for link in links:
                await link.stop()

    asyncio.run(scenario())
    assert len(made) == 2


def test_a_model_that_is_swamped_keeps_nobody_from_another():
    limits = SimpleNamespace(queue=1, queue_per_tenant=9, deadline=9.0)
    reception = Reception(SimpleNamespace(), limits=limits)
    account = account_of(None, None, None)

    def ask(model):
        resolved = SimpleNamespace(name=None, rev=None, model=model, priority=None)
        return reception.admit(resolved, account, 1, deadline=1e9)

    first, other = ask("a"), ask("b")
    with pytest.raises(LoradError, match="1 sequences wait already") as refused:
        ask("a")
    assert refused.value.code == "queue_full" and reception.waiting == 2
    first.leave()
    ask("a").leave()
    other.leave()
    assert reception.waiting == 0 and reception.active == 0


def test_text_and_facts_are_those_of_the_model_that_is_meant():
    def resolve(model):
        return SimpleNamespace(name=None, rev=None, model=model, priority=None)

    links = {name: SimpleNamespace(check=lambda: None, info=name.upper()) for name in "ab"}
    backends = {
        name: Backend(link, lambda rev, name=name: f"text of {name}", "0")
        for name, link in links.items()
    }
    adapters = SimpleNamespace(resolve=resolve)
    service = RequestService(adapters, backends, limits=None, version="0")

    async def scenario():
        for name in "ab":
            assert await service.with_text(name, str) == (f"text of {name}", name)
            assert service.engine(name) == service.facts(name) == name.upper()
        links["b"].info = None
        with pytest.raises(LoradError, match="still loading"):
            service.engine("b")
        assert service.engine("a") == "A"

    asyncio.run(scenario())


def test_a_tenant_without_the_base_has_none_of_the_bases():
    for base in (True, False):
        tenant = Tenant("acme", adapters=("acme/*",), base=base, models=("a", "b"))
        assert tenant.may("a") is base and tenant.may("b") is base
        assert tenant.may("acme/x") and not tenant.may("other/x")
