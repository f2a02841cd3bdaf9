"""Whoever reads a revision's files holds a lease on it, and gives it back once."""

import asyncio
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from lorad.errors import LoradError
from lorad.service.requests import RequestService
from lorad.service.seams import Backend


class Adapters:
    def __init__(self):
        self.leases = Counter()

    def resolve(self, model):
        return SimpleNamespace(rev=None if model == "base" else model, model="base")

    def lease(self, rev):
        self.leases[rev] += 1

    def release(self, rev):
        self.leases[rev] -= 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_revision_whose_text_is_read_is_leased_meanwhile(fails):
    adapters, seen = Adapters(), []

    def text(rev):
        seen.append(adapters.leases[rev])
        return "words"

    def work(text):
        if fails:
            raise LoradError("invalid_value", "no")
        return f"{text} read"

    async def scenario():
        service = RequestService(
            adapters, {"base": Backend(SimpleNamespace(), text, "0")}, limits=None, version="0"
        )
        with pytest.raises(LoradError) if fails else nullcontext():
            assert await service.with_text("r1", work) == ("words read", "base")

    asyncio.run(scenario())
    assert seen == [1]
    assert adapters.leases["r1"] == 0
