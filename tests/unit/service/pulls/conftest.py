"""Pulls over a registry and a store that are real, from a hub in a folder that a test steers."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from lorad.service.dynamic import Dynamic
from lorad.service.fetching import Fetching, Refetch
from lorad.service.operations import Operations
from lorad.service.pulls import Pulls
from lorad.wire_operations import PullStart


def _load():
    path = Path(__file__).parents[3] / "fakes" / "sources.py"
    spec = importlib.util.spec_from_file_location("sources_of_pulls", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fakes = _load()


class Scene:
    commit_of = staticmethod(fakes.commit_of)

    def __init__(self, world):
        self.world = world
        self.hub = fakes.Hub(world.dir.parent / "hub")
        self.operations = Operations(world.registry, world.events, world.tasks)
        world.adapters.outcomes.on_left = self.operations.adopt
        self.fetching = Fetching(self.hub.fetcher)
        self.pulls = Pulls(
            self.operations, self.fetching, world.adapters, world.names, world.intake
        )
        world.revisions.files.refetch = Refetch(
            self.fetching, world.registry, world.intake, stopping=lambda: self.operations.stopping
        )

    async def begin(self, reference, **wishes):
        return await self.pulls.begin(PullStart(reference=reference, **wishes), actor="uid 7")

    async def pull(self, reference, **wishes):
        begun = await self.begin(reference, **wishes)
        return await self.operations.wait(begun.id)

    async def until(self, condition):
        async with asyncio.timeout(30):  # a pull is a process, and cores may be few
            while not condition():
                await asyncio.sleep(0.002)

    async def at_bytes(self, id, count):
        await self.until(lambda: self.operations.get(id).done_bytes >= count)

    @property
    def fetched(self):
        """(pinned reference, bytes that were there already) of every fetch."""
        words = [call.split() for call in self.hub.calls() if call.startswith("fetch")]
        return [(reference, int(start)) for _, reference, start in words]

    def adapter(self, n, chunks=3):
        """Files of an adapter whose identity is `n`, as the services of these tests read it."""
        config = json.dumps({"n": n}).encode()
        weights = bytes(chunks * fakes.CHUNK)
        return {"adapter_config.json": config, "adapter_model.safetensors": weights}

    def put(self, repo, n, chunks=3, **rules):
        return self.hub.put(repo, self.adapter(n, chunks), **rules)

    def dynamic(self, *allow, every=600.0, max_waiting=8, clock=None):
        given = {"clock": clock} if clock is not None else {}
        return Dynamic(
            self.fetching,
            self.pulls,
            self.operations,
            self.world.names,
            self.world.events,
            self.world.tasks,
            allow=allow,
            every=every,
            max_waiting=max_waiting,
            **given,
        )

    def staged(self):
        return sorted(p.name for p in (self.world.store.directory / ".staging").iterdir())


@pytest.fixture
def scene(world):
    """Run `scenario(scene)`; again with the same directory is a restart."""

    def run(scenario, **options):
        async def inner(world):
            scene = Scene(world)
            try:
                return await scenario(scene)
            finally:
                scene.operations.close()

        return world(inner, **options)

    return run
