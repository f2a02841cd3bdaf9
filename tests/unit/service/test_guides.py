"""Whose grammar is compiled when: one tenant's many never take every process."""

import asyncio
import threading
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.service import guides
from lorad.service.ask import Format
from tests.unit.service.conftest import INFO


class Checker:
    """Every grammar with the word `long` takes until `end` is set."""

    def __init__(self, path, vocab_size, eos_token_ids):
        self.end = threading.Event()
        self.asked = []

    def check(self, grammar):
        self.asked.append(grammar)
        if "long" in grammar:
            self.end.wait(60)

    def close(self):
        self.end.set()


@pytest.fixture
def made(monkeypatch, tmp_path):
    checker = Checker(None, 0, ())
    monkeypatch.setattr(guides, "GrammarChecker", lambda *_: checker)

    def make(**settings):
        return guides.Guides(Path(tmp_path), **settings), checker

    yield make
    checker.end.set()


def choice(word):
    return Format("choice", f'["{word}"]', "structured_outputs")


async def until(true):
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


def test_a_tenant_whose_grammars_take_long_leaves_a_process_to_the_others(made):
    async def scenario():
        desk, checker = made()
        hog = [
            asyncio.ensure_future(desk.grammar(choice(f"long {n}"), INFO, "hog")) for n in range(4)
        ]
        await until(lambda: checker.asked)
        assert "quick" in await desk.grammar(choice("quick"), INFO, "other")
        assert len(checker.asked) == 2, "a second one of the same tenant was begun"
        checker.end.set()
        assert len(await asyncio.gather(*hog)) == 4
        desk.close()

    asyncio.run(scenario())


def test_without_tenants_as_many_are_at_work_as_there_are_threads(made):
    async def scenario():
        desk, checker = made()
        asked = [asyncio.ensure_future(desk.grammar(choice(f"long {n}"), INFO)) for n in range(4)]
        await until(lambda: len(checker.asked) == guides.THREADS)
        checker.end.set()
        await asyncio.gather(*asked)
        desk.close()

    asyncio.run(scenario())


def test_who_waits_too_long_behind_its_own_is_asked_to_come_again(made):
    async def scenario():
        desk, checker = made(wait_seconds=0.05)
        first = asyncio.ensure_future(desk.grammar(choice("long 1"), INFO, "hog"))
        await until(lambda: checker.asked)
        for n in (
            2,
            3,
        ):  # the third after the first one gave up, whose thread works on
            with pytest.raises(LoradError, match="waits behind") as caught:
                await desk.grammar(choice(f"long {n}"), INFO, "hog")
            assert caught.value.code == "queue_full"
        with pytest.raises(LoradError, match="waits behind"):
            await first
        assert len(checker.asked) == 1
        checker.end.set()
        await until(lambda: not desk._works)
        desk.close()

    asyncio.run(scenario())
