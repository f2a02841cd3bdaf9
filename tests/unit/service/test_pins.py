"""How much may be pinned."""

import pytest

from lorad.config_sections import Lora
from lorad.errors import LoradError
from lorad.service.pins import PinRoom


def room(w, **settings):
    return PinRoom(w.registry, w.catalog, w.link, Lora(**settings), model="base")


def test_pins_leave_the_kv_floor_and_the_largest_adapter(world):
    async def scenario(w):
        for n in range(3):
            await w.add(f"a{n}", n, pin=True)
        await w.add("b", 9)
        pins = room(w)
        # 64 blocks: 6 are the floor, 2 the largest adapter, 6 are pinned
        pins.check(w.rev(9))
        pins.check("0" * 64, 50 << 16)
        with pytest.raises(LoradError) as caught:
            pins.check("0" * 64, 51 << 16)
        assert f"takes {51 << 16} by its file," in caught.value.message
        assert "pin it once it is packed" in caught.value.hint
        assert (caught.value.code, caught.value.exit) == ("no_room", 9)

    world(scenario)


def test_a_limit_in_bytes_is_a_limit(world):
    async def scenario(w):
        await w.add("a", 1, pin=True)
        await w.add("b", 2)
        room(w, pin_limit=4 << 16).check(w.rev(2))
        with pytest.raises(LoradError, match=f"takes {2 << 16},") as caught:
            room(w, pin_limit=3 << 16).check(w.rev(2))
        assert "packed" not in caught.value.hint

    world(scenario)


def test_what_is_pinned_does_not_count_against_itself(world):
    async def scenario(w):
        await w.add("a", 1, pin=True)
        room(w, pin_limit=1).check(w.rev(1))

    world(scenario)


def test_before_the_arena_is_known_any_pin_is_taken(world):
    async def scenario(w):
        w.link.info = None
        room(w, pin_limit=1).check(w.rev(1), 1 << 30)

    world(scenario, start=False)
