"""Explaining: what is said of an adapter in every state, and from whose word."""

import msgspec
import pytest

from engine.status_messages import CostInputs, Explanation, Holder, RoomStatus
from lorad.errors import LoradError
from lorad.service.explain import Explaining, tell
from lorad.service.gate import HELD, Gate

COST = CostInputs(
    policy="cost",
    pinned=False,
    priority=50,
    uses=2.0,
    uses_a_second=0.005,
    reuse_chance=0.26,
    return_seconds=0.002,
    blocks=4,
    num_bytes=4 << 16,
    saved=1e-9,
    place=3,
    victims=7,
)
HOLDERS = (Holder(rev="p", blocks=9, pinned=True), Holder(rev="r", blocks=4, running=2))
ROOM = RoomStatus(
    total=64,
    free=1,
    kv_active=30,
    kv_cached=0,
    kv_floor=6,
    idle=0,
    num_idle=0,
    free_slots=4,
    holders=HOLDERS,
    num_holders=2,
)
FACTS = Explanation(
    rev="a",
    state="registered",
    state_seconds=1.0,
    removing=False,
    in_ram=False,
    reading=False,
    running=0,
    waiting=0,
    starve_after=2.0,
    load_seconds=0.03,
    room=ROOM,
    cost=COST,
)


def told(pinned_as=(), **facts):
    cost, room = facts.pop("cost", {}), facts.pop("room", {})
    changed = msgspec.structs.replace(
        FACTS,
        cost=msgspec.structs.replace(COST, **cost),
        room=msgspec.structs.replace(ROOM, **room),
        **facts,
    )
    return tell(changed, lambda rev: f"name-of-{rev}", pinned_as)


def test_one_on_the_gpu_is_served_and_says_when_it_makes_way():
    said = told(state="idle")
    assert said.served and said.why == "it is on the GPU"
    assert said.next == "it makes way as number 3 of 7 when room is short"
    assert told(state="idle", cost={"pinned": True}).next == "it is pinned and stays"
    shared = told(["jargon"], state="idle", cost={"pinned": True})
    assert shared.next == "it stays: jargon has the same content, and is pinned"
    twins = told(["a", "b"], state="idle", cost={"pinned": True})
    assert twins.next == "it stays: a, b have the same content, and are pinned"
    assert told(state="active", cost={"place": 0}).next == "it stays while requests run on it"
    waits = told(state="active", running=1, waiting=2, queue_turn=2, queue_turns=5)
    assert waits.served and "2 of its requests wait" in waits.why
    assert "its turn is 2 of 5" in waits.next


def test_one_that_drains_says_for_whom_and_until_when():
    said = told(state="draining", drain_cause="starvation", drain_for="b", tokens_left=12)
    assert "makes room for name-of-b" in said.why and "12 tokens to go" in said.next
    assert not said.served and said.seconds is None
    said = told(state="draining", drain_cause="manual", drain_seconds=4.5, tokens_left=12)
    assert "(manual)" in said.why and said.seconds == 4.5


def test_one_on_its_way_says_how_and_when():
    said = told(state="loading", reading=True, eta_seconds=0.4, waiting=3)
    assert said.why == "it is being read from the store, and 3 of its requests wait for it"
    assert (said.next, said.seconds) == ("it is up", 0.4)
    assert told(state="loading", eta_seconds=0.0).why == "it is being copied to the GPU"


def test_one_that_nobody_asks_for_says_how_long_it_takes_or_what_it_would_wait_for():
    said = told(room={"free": 2, "kv_cached": 2})
    assert said.why == "nobody asks for it; it is on disk"
    assert (said.next, said.seconds) == ("a request brings it up", 0.03)
    said = told(state="ram", in_ram=True, error="cut.bin: no such file")
    assert "in host memory; its last load failed: cut.bin" in said.why
    assert said.next.startswith("a request waits for room: 2 adapters in use (1 pinned)")
    assert said.seconds is None
    no_slot = told(room={"free": 60, "free_slots": 0})
    assert "waits for room" in no_slot.next


def test_one_without_room_says_who_holds_it_and_what_comes_next():
    asked = {"waiting": 2, "wanted_seconds": 0.5}
    said = told(**asked)
    assert said.why == "2 of its requests wait, and other loads are under way"
    asked["blocked_seconds"] = 0.4
    said = told(**asked)
    assert "there is no room for it: 2 adapters in use (1 pinned)" in said.why
    assert said.seconds == 1.5
    said = told(**asked, room={"reserved_for": "b"})
    assert said.next == "name-of-b has waited longer, and is helped first"
    said = told(**asked, starving=True, room={"reserved_for": "a"})
    assert said.next == "all room that comes free is kept for it"
    said = told(**asked, starving=True, victim="v", victim_tokens=9)
    assert said.next.startswith("name-of-v drains for it: 9 tokens to go at most")


def test_one_that_can_never_have_room_says_so_first():
    said = told(hopeless="10 blocks do not fit beside 9 pinned ones", waiting=1, wanted_seconds=1.0)
    assert "10 blocks do not fit" in said.why and said.next == "requests end with no_room"


def explaining(w):
    return Explaining(w.names, {"base": lambda rev: (w.link, "")})


def test_what_the_registry_knows_needs_no_engine(world):
    async def scenario(w):
        with pytest.raises(LoradError) as caught:
            await explaining(w).explain("nobody")
        assert (caught.value.code, caught.value.exit) == ("model_not_found", 4)
        w.registry.quarantine("bad", "inbox", "E_RANK_LIMIT", "rank 600").result()
        w.names.refresh("bad")
        said = await explaining(w).explain("bad")
        assert (said.state, said.reason, said.tier) == ("quarantined", "E_RANK_LIMIT", "-")
        assert said.why == "it was refused: E_RANK_LIMIT: rank 600" and said.hint
        assert said.room is None and said.cost is None
        await w.add("cold", 1)
        w.link.known.discard(w.rev(1))
        said = await explaining(w).explain("cold")
        assert (said.state, said.tier, said.served) == ("registered", "disk", False)
        assert "since the engine started" in said.why
        w.registry.mark_missing("cold").result()
        w.names.refresh("cold")
        said = await explaining(w).explain("cold")
        assert (said.state, said.hint) == ("missing", "loractl add DIR --name cold")

    world(scenario)


def test_the_engines_numbers_come_in_bytes_and_under_names(world):
    async def scenario(w):
        await w.add("a", 1)
        await w.add("b", 2, pin=True)
        await w.revisions.prepare(w.rev(1))
        room = msgspec.structs.replace(
            ROOM, holders=(Holder(rev=w.rev(2), blocks=2, pinned=True),), num_holders=3
        )
        w.engine.explanations[w.rev(1)] = msgspec.structs.replace(
            FACTS, rev=w.rev(1), state="ram", in_ram=True, room=room
        )
        said = await explaining(w).explain("a")
        assert (said.name, said.rev, said.state, said.tier) == ("a", w.rev(1), "ram", "ram")
        (holder,) = said.room.holders
        assert (holder.name, holder.num_bytes, holder.pinned) == ("b", 2 << 16, True)
        assert said.room.more_holders == 2 and said.room.total_bytes == 64 << 16
        assert said.cost.uses_a_minute == pytest.approx(0.3)
        assert said.cost.saved_seconds == pytest.approx(3600 * 2**30 * 1e-9)
        del w.engine.explanations[w.rev(1)]  # the engine has just forgotten it
        assert "since the engine started" in (await explaining(w).explain("a")).why

    world(scenario)


def test_the_same_content_stays_for_another_names_pin(world):
    async def scenario(w):
        await w.add("a", 1)
        await w.add("twin", 1, pin=True)
        w.engine.explanations[w.rev(1)] = msgspec.structs.replace(
            FACTS, rev=w.rev(1), state="idle", cost=msgspec.structs.replace(COST, pinned=True)
        )
        said = await explaining(w).explain("a")
        assert said.next == "it stays: twin has the same content, and is pinned"
        assert (await explaining(w).explain("twin")).next == "it is pinned and stays"

    world(scenario)


def test_an_engine_that_is_away_is_the_reason(world):
    async def scenario(w):
        await w.add("a", 1)
        w.link.state, w.link.progress = "engine_restarting", "it crashed"
        said = await explaining(w).explain("a")
        assert said.why == "the engine is not ready: it crashed" and said.hint == "loractl status"
        w.link.state = "ready"

    world(scenario)


def test_files_that_are_only_where_they_came_from_are_fetched_first(world):
    async def scenario(w):
        await w.add("a", 1)
        w.store.remote.add(w.rev(1))
        said = await explaining(w).explain("a")
        assert (said.state, said.tier) == ("remote", "remote")
        assert "fetches and packs them first" in said.next
        w.store.remote.discard(w.rev(1))

    world(scenario)


def test_one_whose_tokenizer_does_not_fit_the_base_any_more_says_so_whatever_it_is_asked(world):
    async def scenario(w):
        await w.add("a", 1)
        w.link.known.discard(w.rev(1))
        error = LoradError("adapter_invalid", "ids up to 300", hint="train it with rows")
        w.revisions.news.publish_unfit(w.rev(1), error)
        for _ in range(2):
            said = await explaining(w).explain("a")
            assert said.why.endswith("do not fit the base as it is now: ids up to 300")
            assert "refused, until a start" in said.next and said.hint == "train it with rows"
            with pytest.raises(LoradError), w.revisions.news.for_request(w.rev(1)):
                raise error
        assert w.types("a").count("adapter.not_loaded") == 1
        await w.revisions.prepare(w.rev(1))
        assert not w.catalog.unfit, "the engine took it: it fits after all"
        w.revisions.news.publish_unfit(w.rev(1), error)
        w.catalog.forget(w.rev(1))
        assert not w.catalog.unfit

    world(scenario)


def test_one_that_an_operator_drains_says_so_before_all_else_but_a_refusal(world):
    async def scenario(w):
        await w.add("a", 1)
        gate = Gate()
        one = Explaining(w.names, {"base": lambda rev: (w.link, "")}, gate=gate)
        gate.held = {"a", "bad"}
        said = await one.explain("a")
        assert said.why == "an operator drains it: it takes no new requests"
        assert (said.served, said.hint) == (False, "loractl resume a")
        gate.held, gate.closed = set(), HELD
        said = await one.explain("a")
        assert (said.why, said.hint) == (HELD, "loractl resume")
        w.registry.quarantine("bad", "inbox", "E_RANK_LIMIT", "rank 600").result()
        w.names.refresh("bad")
        assert (await one.explain("bad")).why == "it was refused: E_RANK_LIMIT: rank 600"

    world(scenario)
