"""Whoever reads a revision's files holds a lease on it, and gives it back once."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from lorad.service.requests import RequestService


class Adapters:
    def __init__(self):
        self.leases = Counter()

    def resolve(self, model):
        return SimpleNamespace(rev=None if model == "base" else model)

    def lease(self, rev):
        self.leases[rev] += 1

    def release(self, rev):
        self.leases[rev] -= 1


@pytest.mark.parametrize("call", ["tokenize", "detokenize"])
def test_a_revision_whose_template_is_read_is_leased_meanwhile(call):
    adapters, seen = Adapters(), []

    def text(rev):
        seen.append(adapters.leases[rev])
        return SimpleNamespace(encode=lambda text, special: [1], decode=lambda ids: "x")

    async def scenario():
        service = RequestService(
            adapters, SimpleNamespace(), text, limits=None, version="0", base_digest="0"
        )
        if call == "tokenize":
            assert await service.tokenize("r1", "x", add_special=True) == [1]
        else:
            assert await service.detokenize("r1", [1]) == "x"

    asyncio.run(scenario())
    assert seen == [1]
    assert adapters.leases["r1"] == 0
