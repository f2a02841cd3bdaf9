"""Pins that had no room, tried again when somebody else has made some."""

import asyncio
from types import SimpleNamespace

import pytest

from lorad.errors import LoradError
from lorad.service.standing import Standing


class Link:
    """An engine that has room for so many pins, or is dead."""

    def __init__(self, room):
        self.room, self.dead = room, False
        self.known, self.pinned = {"a", "b", "c"}, set()
        self.next_id = iter(range(100)).__next__

    async def call(self, command):
        if self.dead:
            raise LoradError("engine_restarting", "killed")
        self.pinned.discard(command.rev)
        if command.pinned:
            if len(self.pinned) >= self.room:
                raise LoradError("no_room", "too many pins")
            self.pinned.add(command.rev)


@pytest.fixture
def standing():
    wants = {"a": True, "b": True, "c": True}
    link, told = Link(1), []
    news = SimpleNamespace(publish=lambda kind, rev, *words: told.append((kind, rev)))
    catalog = SimpleNamespace(wanted=lambda rev: (wants[rev], 50))
    one = Standing(link, catalog, news, lambda: None)
    return SimpleNamespace(it=one, link=link, wants=wants, told=told)


def test_a_pin_without_room_has_the_room_of_the_next_that_leaves(standing):
    async def scenario():
        for rev in ("a", "b"):
            await standing.it.follow(rev)
        assert standing.told == [("pin.refused", "b")] and standing.it.unpinned == {"b"}
        standing.link.pinned.discard("a")
        await standing.it.forget("a")
        assert standing.link.pinned == {"b"} and not standing.it.unpinned

    asyncio.run(scenario())


def test_whoever_makes_room_is_not_told_that_the_engine_died_before_another_had_it(standing):
    async def scenario():
        for rev in ("a", "b"):
            await standing.it.follow(rev)
        standing.link.dead = True
        await standing.it.forget("a")  # its retiring goes on
        assert standing.it.unpinned == {"b"}
        with pytest.raises(LoradError, match="killed"):
            await standing.it.apply("c")  # who asks for itself is told

    asyncio.run(scenario())


def test_nor_is_an_operator_who_takes_a_pin_away(standing):
    async def scenario():
        for rev in ("a", "b"):
            await standing.it.follow(rev)
        standing.wants["a"] = False
        call = standing.link.call

        async def once(command):
            await call(command)
            standing.link.dead = True

        standing.link.call = once
        await standing.it.apply("a")
        assert standing.it.unpinned == {"b"}

    asyncio.run(scenario())
