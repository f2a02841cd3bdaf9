"""The first pass of a new engine."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.pooling.requests import PoolResult
from lorad.service.engine_start import first_result
from tests.fakes.pooled import info


@pytest.mark.parametrize(("kinds", "task"), [(("mean",), "embed"), ((), "tokens")])
def test_a_model_that_pools_is_asked_for_what_it_makes(kinds, task):
    """One of late interaction has no vector of a text."""
    asked = []

    async def run(request):
        asked.append(request.task)
        return PoolResult(request.request_id)

    asyncio.run(first_result(SimpleNamespace(run=run), info(kinds=kinds)))
    assert asked == [task]
