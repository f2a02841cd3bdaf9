"""How much may be pinned."""

import pytest
from msgspec import structs

from engine.messages import PackedModule
from lorad.config_sections import Lora
from lorad.errors import LoradError
from lorad.service.pins import PinRoom


def room(w, **settings):
    return PinRoom(w.registry, w.catalog, w.link, Lora(**settings), model="base")


def of_rank(rank):
    """A pair has two rows a rank, and a block holds four."""
    return (PackedModule(0, "q_proj", rank, 2.0),)


def test_pins_leave_the_kv_floor_and_the_largest_adapter(world):
    async def scenario(w):
        for n in range(3):
            await w.add(f"a{n}", n, pin=True)
        await w.add("b", 9)
        pins = room(w)
        # 64 blocks: 6 are the floor, 2 the largest adapter, 6 are pinned
        pins.check(w.rev(9))
        pins.check("0" * 64, of_rank(100))
        with pytest.raises(LoradError) as caught:
            pins.check("0" * 64, of_rank(102))
        assert f"takes {51 << 16}," in caught.value.message
        assert (caught.value.code, caught.value.exit) == ("no_room", 9)

    world(scenario)


def test_a_limit_in_bytes_is_a_limit(world):
    async def scenario(w):
        await w.add("a", 1, pin=True)
        await w.add("b", 2)
        room(w, pin_limit=4 << 16).check(w.rev(2))
        with pytest.raises(LoradError, match=f"takes {2 << 16},"):
            room(w, pin_limit=3 << 16).check(w.rev(2))

    world(scenario)


def test_what_is_pinned_does_not_count_against_itself(world):
    async def scenario(w):
        await w.add("a", 1, pin=True)
        room(w, pin_limit=1).check(w.rev(1))

    world(scenario)


def test_before_the_arena_is_known_any_pin_is_taken(world):
    async def scenario(w):
        w.link.info = None
        room(w, pin_limit=1).check(w.rev(1), of_rank(1 << 20))

    world(scenario, start=False)


def test_what_is_not_packed_yet_counts_as_what_it_will_take_whatever_its_file_has(world):
    async def scenario(w):
        inspect = w.inspect

        def wide(folder):
            manifest, rev = inspect(folder)
            return structs.replace(manifest, file_bytes=1 << 30, dtype="mixed"), rev

        w.intake._inspect = wide
        w.link.info, info = None, w.link.info  # the base is loading: registered, and not packed
        await w.add("a", 3)
        w.link.info = info
        assert w.registry.revision(w.rev(3)).packed == {}
        room(w, pin_limit=2 << 16).check(w.rev(3))
        with pytest.raises(LoradError, match=f"takes {2 << 16},"):
            room(w, pin_limit=1 << 16).check(w.rev(3))

    world(scenario)
