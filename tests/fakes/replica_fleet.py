"""Several engines of one model, over the services of the unit tests.

Goes in: a `World` of tests/unit/service, and the module of its fake engine.  Comes out: a `Fleet`,
whose engines a test lets answer, hang and die.
"""

import asyncio
import time
from functools import partial

from msgspec import structs

from engine.messages import SamplingParams, Submit
from lorad.routing.affinity import ranking
from lorad.service.engine_link import EngineLink
from lorad.service.lineup import Lineup, ModelAdapters
from lorad.service.picture import Picture
from lorad.service.pictures import Pictures
from lorad.service.pins import PinRoom
from lorad.service.registration import Registration
from lorad.service.replica import Replica
from lorad.service.replica_revisions import ReplicaRevisions
from lorad.service.replicas import Replicas
from lorad.service.revisions import Revisions

NAMES = ("0", "1", "2")


class Fleet:
    """The world's names and store over three engines in place of its one."""

    def __init__(self, world, fake):
        w = self.world = world
        self.born_silent = False
        self.clients = {name: [] for name in NAMES}
        self.links, replicas, pictures = {}, [], {}
        for name in NAMES:
            link = self.links[name] = EngineLink(
                w.link.config,
                w.events,
                new_client=partial(self.new_client, fake, name),
                first_pause=0.0,
                replica=name,
            )
            pictures[name] = Picture(link)
            replicas.append(Replica(name, link, pictures[name]))
        self.later = 0.0  # seconds that the router's clock is ahead
        self.replicas = Replicas(replicas, clock=lambda: time.monotonic() + self.later)
        self.pictures = Pictures(pictures, replicas=True)
        shared = (w.intake, w.catalog, w.events, w.tasks, w.revisions.shelf)
        team = self.revisions = ReplicaRevisions(w.registry, self.replicas, *shared, model="base")
        for name, link in self.links.items():
            one = Revisions(w.registry, link, *shared, model="base", team=team, replica=name)
            team.join(one)
            link.on_ready = partial(self.take_ready, name)
        self.pins = PinRoom(
            w.registry, w.catalog, self.replicas, Limits(), model="base", keeps=team.keeps
        )
        told = (w.names, self.replicas, w.intake, team)
        registration = Registration("base", *told, w.events, check_pin=self.pins.check)
        model = ModelAdapters(
            "base",
            *told,
            registration,
            w.events,
            w.tasks,
            check_pin=self.pins.check,
            refresh=self.pictures.refresh,
        )
        w.adapters.models = w.adapters.outcomes._models = Lineup(w.catalog, [model])

    def new_client(self, fake, name):
        self.clients[name].append(client := fake.Client())
        client.silent = self.born_silent
        return client

    def take_ready(self, name):
        self.revisions.settle_pins()
        self.replicas.join(name)

    def say_queued(self, name, number):
        """In its picture, and all that follow."""
        picture = structs.replace(self.engine(name).snapshot(), waiting=number)
        self.engine(name).snapshot = lambda: picture
        self.replicas[name].picture.snapshot = picture

    async def start(self):
        for link in self.links.values():
            link.start()
        async with asyncio.timeout(5):
            for link in self.links.values():
                await link.ready.wait()

    async def stop(self):
        for link in self.links.values():
            await link.stop()

    def engine(self, name):
        return self.clients[name][-1]

    def on(self, n):
        """Which replicas have it on the GPU."""
        rev = self.world.rev(n)
        return {name for name in NAMES if self.engine(name).revisions.get(rev) == "gpu"}

    def pinned_on(self, n):
        return {name for name in NAMES if self.world.rev(n) in self.engine(name).pinned}

    def keeper(self, n):
        return ranking(self.world.rev(n), NAMES)[0]

    def silence(self):
        for name in NAMES:
            self.engine(name).silent = True

    def submit(self, id, rev=None, **told):
        """Its deltas, as they come."""
        deltas = []
        submit = Submit(request_id=id, prompt=[1], sampling=SamplingParams(), rev=rev, **told)
        self.replicas.submit(submit, deltas.append)
        return deltas

    def at(self, id):
        """The living engines that have a request."""
        engines = {name: self.engine(name) for name in NAMES}
        return [n for n, one in engines.items() if id in one.submitted and one.state != "dead"]

    def loads(self):
        return [(r.num_waiting, r.num_running, dict(r.waiting)) for r in self.replicas]


class Limits:
    """No limits of [lora]."""

    pin_limit, kv_floor = 0, 0


class held_back:
    """A turn to start that waits for `gate`."""

    def __init__(self, config, gate):
        self.config, self.gate = config, gate

    async def __aenter__(self):
        await self.gate.wait()
        return self.config

    async def __aexit__(self, *_):
        return None
