"""Revisions that a gateway has kept askable while it moves a name on several daemons."""

import pytest

from lorad.errors import LoradError
from lorad.wire_operate import HoldAsk


def ask(seconds):
    return HoldAsk(name="a", seconds=seconds)


def test_a_replaced_revision_can_be_asked_for_as_long_as_it_is_held(world, eventually):
    async def scenario(w):
        await w.add("a", 1)
        old = f"a@{w.rev(1)}"
        assert w.adapters.hold(ask(60)).revs == (w.rev(1),)
        await w.add("a", 2, replace=True)
        assert w.adapters.resolve("a").rev == w.rev(2)
        assert w.adapters.resolve(f"a@{w.rev(2)}").rev == w.rev(2)
        assert w.adapters.resolve(old).rev == w.rev(1)
        assert w.adapters.resolve(old[:10]).rev == w.rev(1)
        assert w.adapters.hold(ask(0)).revs == ()
        with pytest.raises(LoradError, match="does not exist"):
            w.adapters.resolve(old)
        await eventually(lambda: not w.catalog.in_use() & {w.rev(1)})
        assert w.adapters.resolve("a").rev == w.rev(2)

    world(scenario)


def test_a_hold_ends_by_itself_and_one_that_is_renewed_later(world, eventually):
    async def scenario(w):
        await w.add("a", 1)
        w.adapters.hold(ask(60))
        w.adapters.hold(ask(0.01))
        assert w.catalog.leases(w.rev(1)) == 1, "held twice is leased once"
        await w.add("a", 2, replace=True)
        await eventually(lambda: w.adapters.holds.of("a") == ())
        with pytest.raises(LoradError, match="does not exist"):
            w.adapters.resolve(f"a@{w.rev(1)}")

    world(scenario)


def test_a_name_that_is_removed_takes_what_was_held_along(world):
    async def scenario(w):
        await w.add("a", 1)
        w.adapters.hold(ask(60))
        await w.adapters.remove("a")
        assert w.adapters.holds.of("a") == () and not w.catalog.leases(w.rev(1))
        with pytest.raises(LoradError, match="does not exist"):
            w.adapters.resolve(f"a@{w.rev(1)}")

    world(scenario)


def test_what_is_not_known_holds_nothing(world):
    async def scenario(w):
        assert w.adapters.hold(ask(60)).revs == ()
        with pytest.raises(LoradError, match="does not exist"):
            w.adapters.resolve("a@")

    world(scenario)
