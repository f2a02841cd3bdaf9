"""Keys mashed at random, over boards that come, go and lie: nothing may raise, no line may slip."""

import random

import pytest
from msgspec.structs import replace

from lorad.tui.messages import Changed, Happened, Lost, Whole
from lorad.wire import EventItem
from lorad.wire_stream import Delta

KEYS = (
    *"sSpledxyYwrtgGjk1234567nahlq",
    *("question_mark", "slash", "colon", "plus", "minus", "space", "enter", "escape", "tab"),
    *("shift+tab", "up", "down", "home", "end", "pageup", "pagedown", "ctrl+p", "ctrl+d", "ctrl+s"),
    *("ctrl+u", "backspace", "delete", "f1", "é", "漢"),
)
SIZES = ((1, 1), (3, 50), (60, 16), (59, 16), (80, 24), (120, 36), (200, 70))
WORDS = ("filter", "sort", "theme", "adapter", "evict", "priority", "interval", "resume", "seek")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_keys_and_no_news_end_it(play, boards, fakes, tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(seed)
    shown = (boards.small(), boards.hostile(), boards.empty(), boards.many())
    foreign = (*boards.HOSTILE_NAMES, "", "nan", "-1", "999")

    async def news(stage):
        """A board, a delta to it, an event, a broken link, or a clock that jumps."""
        board = chance.choice(shown)
        kind = chance.randrange(5)
        if kind == 0:
            await stage.tell(Whole(board))
        elif kind == 1:
            some = dict(chance.sample(sorted(board.slots.items()), min(5, len(board.slots))))
            delta = Delta(sequence=1, time=board.time, slots=some, status=board.status)
            gone = {"requests": tuple(list(board.requests)[:3])}
            before = replace(board, sequence=0)
            await stage.tell(Whole(before), Changed(replace(delta, gone=gone)))
        elif kind == 2:
            name, said = chance.choice(foreign), chance.choice(foreign)
            await stage.tell(Happened(EventItem(id=0, time=said, type=name, message=said)))
        elif kind == 3:
            await stage.tell(Lost(chance.choice(foreign), 1.0))
        else:
            stage.clock.now += chance.choice((0.5, 3600.0, -100.0, 1e9))

    async def act(stage):
        app = stage.app
        app.exit = lambda *args, **more: None
        for _ in range(300):
            what = chance.random()
            if what < 0.2:
                await news(stage)
            elif what < 0.26:
                await stage.resize(*chance.choice(SIZES))
            elif what < 0.3:
                await app.command(f"{chance.choice(WORDS)} {chance.choice(foreign)}")
            else:
                await stage.press(chance.choice(KEYS))
            app.paint()
            await stage.pilot.pause()
            assert set(stage.cells()) == {app.size.width}

    play(act, boards.small(), (120, 36), daemon=fakes.FakeDaemon(fakes.adapter(1)))
