"""Random lives of a daemon: wishes, requests, crashes and damage meet; nothing is lost or confused.

See conftest.py for the daemon and its engine.  What is played: add, replace, rm, load, evict, pin,
unpin, priorities, requests, clients that leave, slow reads and copies, copies without memory,
packed files that are spoilt, cut or gone, content that cannot be packed, an engine that dies (while
it loads, restarts or answers) or hangs.  After every act and engine step each owner checks itself.
At the end each wish had one outcome, each request one end with the tokens of the revision that it
leased, and nobody holds anything.
"""

import asyncio
import random
from collections import Counter

import pytest

from engine.messages import Fatal
from lorad import wire
from lorad.errors import LoradError

FAST = (8, 36, 38, 45, 48)  # lives in two or more of which each of HAPPENINGS is met
LATE = (range(100, 118), range(118, 136))
ALL = 1500
ACTS = 80
NAMES = ("a", "b", "c", "d", "t/e", "t/f")
PROMPTS = [tuple(range(n)) for n in (1, 4, 9, 17)] + [(7,) * 12, (1, 2, 3, 4, 9, 9)]
CANNOT_BE_PACKED = 1000  # contents from this number on
ANY = object()
NOT_READY = {"engine_restarting", "engine_stalled", "loading_base"}
#: How a request may be refused or end besides "length".  `internal_error` is not among them.
REQUEST_ENDS = NOT_READY | {"model_not_found", "draining", "no_room", "deadline_exceeded"}
REQUEST_ENDS |= {"load_failed", "adapter_damaged", "queue_full", "tenant_rate_limited"}
#: How a wish may fail.
WISH_ENDS = NOT_READY | {"model_not_found", "no_room", "conflict", "pinned", "name_taken"}
WISH_ENDS |= {"adapter_invalid", "adapter_damaged", "load_failed", "deadline_exceeded"}
#: What has to have happened, or the seeds prove little.
HAPPENINGS = (
    *("answered", "left", "crashes", "hangs", "replaced", "added", "removed", "spoilt", "cut"),
    *("request: engine_restarting", "request: model_not_found", "wish: engine_restarting"),
    *("wish: adapter_invalid", "wish: pinned", "wish: name_taken", "rests"),
    *("replaced in use", "adapter.repacked", "engine.stalled", "slot.evict", "slot.drain"),
)


class Life:
    """One daemon from its first act to its rest."""

    def __init__(self, home, seed) -> None:
        self.home, self.draw = home, random.Random(seed)
        self.census: Counter[str] = Counter()
        self.means: dict[str, str | None] = dict.fromkeys(NAMES)
        self.changing: Counter[str] = Counter()  # changes of a name's meaning under way
        self.overlapped: set[str] = set()
        self.unsure: set[str] = set()  # names whose last change failed: it may be done yet
        self.spoilt: set[str] = set()  # revisions whose packed file was touched
        self.tasks: list[asyncio.Task] = []
        self.readers: list[asyncio.Task] = []
        self.fresh = iter(range(100, CANNOT_BE_PACKED))

    async def play(self) -> None:
        for n, name in enumerate(NAMES[:4]):
            await self.one_add(name, n, {})
        acts = {
            **dict(request=34, leave=6, add=10, remove=3, load=5, evict=5, evict_all=1, pin=3),
            **dict(unpin=3, priority=2, crash=2, hang=1, damage=3, slow=2, wait=4, rest=1),
        }
        for act in self.draw.choices(list(acts), list(acts.values()), k=ACTS):
            await getattr(self, act)()
            await asyncio.sleep(self.draw.choice([0.0, 0.01, 0.03, 0.1, 0.3]))
            self.check()
        await self.rest()
        await self.end()

    # ------------------------------------------------------------- acts
    async def request(self) -> None:
        draw, model = self.draw, self.draw.choice([*NAMES, "base"])
        for _ in range(draw.choice([1, 1, 3])):
            patience = draw.random() * 0.3 if draw.random() < 0.15 else None
            prompt, length = draw.choice(PROMPTS), draw.choice([1, 3, 8, 40])
            task = asyncio.create_task(self.one_request(model, prompt, length, patience))
            self.readers.append(task)

    async def leave(self) -> None:
        live = [task for task in self.readers if not task.done()]
        if live:
            self.draw.choice(live).cancel()
            self.census["left"] += 1

    async def add(self) -> None:
        draw, name = self.draw, self.draw.choice(NAMES)
        n = draw.choice([draw.randrange(6), next(self.fresh)])
        if draw.random() < 0.1:
            n += CANNOT_BE_PACKED
            self.home.pack_fails.add(self.home.rev(n))
        options = {
            "replace": draw.random() < 0.8,
            "pin": draw.choice([None, None, None, True, False]),
            "load": draw.random() < 0.3,
        }
        self.wish(self.one_add(name, n, options))

    async def remove(self) -> None:
        self.wish(self.one_removal(self.draw.choice(NAMES)))

    async def load(self) -> None:
        names = self.draw.sample(NAMES, self.draw.choice([1, 1, 2]))
        tier = self.draw.choice(["gpu", "gpu", "ram"])
        wish = wire.Names(names=names, tier=tier, timeout_s=self.draw.choice([0.1, 100.0]))
        self.wish(self.results(self.home.adapters.load(wish)))

    async def evict(self, every=False) -> None:
        draw = self.draw
        wish = wire.Names(
            names=[] if every else [draw.choice(NAMES)],
            all=every,
            to=draw.choice(["ram", "disk"]),
            now=draw.random() < 0.3,
            force=draw.random() < 0.3,
            drain_timeout_s=draw.choice([0.05, 5.0]),
        )
        self.wish(self.results(self.home.adapters.evict(wish)))

    async def evict_all(self) -> None:
        await self.evict(every=True)

    async def pin(self) -> None:
        wish = wire.Names(names=[self.draw.choice(NAMES)], no_load=self.draw.random() < 0.5)
        self.wish(self.results(self.home.adapters.pin(wish)))

    async def unpin(self) -> None:
        self.wish(self.results(self.home.adapters.unpin(wire.Names(names=list(NAMES)))))

    async def priority(self) -> None:
        patch = wire.AdapterPatch(priority=self.draw.choice([10, 50, 90]))
        self.wish(self.home.adapters.patch(self.draw.choice(NAMES), patch))

    async def crash(self) -> None:
        """At most four in a life: the fifth would be the daemon's end."""
        if len(self.home.link._crashes) < 4 and self.home.client.state != "new":
            self.home.engine_seconds = self.draw.choice([0.05, 0.3, 2.0])
            if self.home.client.state == "starting" and self.home.link.restarts:
                self.census["crashes while it starts"] += 1
            self.home.client.die(Fatal("internal_error", "killed"))
            self.census["crashes"] += 1

    async def hang(self) -> None:
        """For a while, or for good: it is replaced after a minute."""
        client = self.home.client
        seconds = self.draw.choice([1.0, 5.0, 100.0])
        if client.state != "ready" or (seconds > 60 and len(self.home.link._crashes) >= 4):
            return

        def go_on() -> None:
            if client.state == "stalled":
                client.state = "ready"

        client.state = "stalled"
        asyncio.get_running_loop().call_later(seconds, go_on)
        self.census["hangs"] += 1

    async def damage(self) -> None:
        rev = self.means[self.draw.choice(NAMES)]
        path = self.home.packed_file(rev) if rev else None
        if path is None:
            return
        self.spoilt.add(rev)
        what = self.draw.choice(["spoilt", "cut", "gone"])
        self.census[what] += 1
        if what == "gone":
            path.unlink()
        else:
            size = path.stat().st_size
            path.write_bytes(b"spoilt".ljust(size, b"x") if what == "spoilt" else bytes(size - 1))

    async def slow(self) -> None:
        engine, rev = self.home.client.engine, self.means[self.draw.choice(NAMES)]
        engine.host.delay[rev] = self.draw.randrange(1, 40)
        engine.copier.copies_take = self.draw.randrange(1, 8)
        engine.copier.no_memory = {rev} if self.draw.random() < 0.2 else set()

    async def wait(self) -> None:
        await asyncio.sleep(self.draw.choice([1.0, 3.0, 20.0]))

    async def rest(self) -> None:
        """Let everything end, and look whether everybody agrees."""
        await asyncio.gather(*self.tasks, *self.readers, return_exceptions=False)
        await self.home.settled()
        self.check()
        self.check_rest()
        self.tasks, self.readers = [], []
        self.census["rests"] += 1

    # ------------------------------------------------------------- what they come to
    def wish(self, work) -> None:
        async def whole() -> None:
            try:
                await work
            except LoradError as error:
                self.note_wish(error.code, error.message)

        self.tasks.append(asyncio.create_task(whole()))

    def note_wish(self, code, message) -> None:
        assert code in WISH_ENDS, (code, message)
        self.census[f"wish: {code}"] += 1

    async def results(self, work) -> None:
        for item in (await work).items:
            if not item.ok:
                self.note_wish(item.code, item.message)

    async def one_add(self, name, n, options) -> None:
        rev, before = self.home.rev(n), self.begin(name)
        try:
            added = await self.home.add(name, n, **options)
        except LoradError as error:
            if error.code in ("name_taken", "adapter_invalid"):
                self.finish(name, before)
            else:  # it took the name, and could not be loaded
                self.finish(name, ANY)
            raise
        assert added.rev == rev
        self.census["replaced" if added.replaced_rev else "added"] += 1
        old = added.replaced_rev
        self.census["replaced in use"] += bool(old and self.home.catalog.leases(old))
        self.finish(name, rev)

    async def one_removal(self, name) -> None:
        before = self.begin(name)
        try:
            await self.home.adapters.remove(name)
        except LoradError:
            self.finish(name, before)
            raise
        self.census["removed"] += 1
        self.finish(name, None)

    def begin(self, name):
        """What it means before a change."""
        self.changing[name] += 1
        if self.changing[name] > 1:
            self.overlapped.add(name)
        return ANY if name in self.unsure else self.means[name]

    def finish(self, name, rev) -> None:
        """What the name has to mean from now on, if that can be said."""
        self.changing[name] -= 1
        if self.changing[name]:
            return
        (self.unsure.add if rev is ANY or name in self.overlapped else self.unsure.discard)(name)
        self.means[name] = None if rev is ANY else rev
        self.overlapped.discard(name)

    async def one_request(self, model, prompt, length, patience) -> None:
        sure = not self.changing[model] and model not in self.unsure
        right = self.means.get(model)
        try:
            generation = await self.home.ask(model, prompt, length)
        except LoradError as error:
            assert error.code in REQUEST_ENDS, (error.code, error.message)
            if error.code == "model_not_found" and sure:
                assert right is None or right in self.spoilt, f"{model} is lost: {error.message}"
            self.census[f"request: {error.code}"] += 1
            return
        except asyncio.CancelledError:
            return
        try:
            assert not sure or generation.rev == right, f"{model} is {generation.rev}, not {right}"
            async with asyncio.timeout(patience):
                await generation.wait()
        except (TimeoutError, asyncio.CancelledError):
            pass
        finally:
            pieces = generation.pull()
            generation.close()
        text = "".join(piece.text for piece in pieces)
        count = text.count(",")
        assert text == self.home.expected(prompt, generation.rev, count), "a stale answer"
        if generation.error is not None:
            code = generation.error.code
            assert code in REQUEST_ENDS, (code, generation.error.message)
            self.census[f"request: {code}"] += 1
        elif generation.over:
            assert count == length and pieces[-1].finish == "length"
            self.census["answered"] += 1

    # ------------------------------------------------------------- what has to hold
    def check(self) -> None:
        home = self.home
        home.client.engine.scheduler.check()
        assert home.tasks.failures == 0, "background work failed"
        assert not home.link.failed.done(), home.link.failed
        for task in (*self.tasks, *self.readers):
            if task.done() and not task.cancelled():
                task.result()
        assert home.requests.waiting >= 0
        for rev in list(home.catalog._leases):
            assert home.store.has(rev), f"{rev[:8]} is leased, and its files are gone"
        for entry in home.catalog:
            assert entry.rev is None or home.store.has(entry.rev), f"{entry} without files"

    def check_rest(self) -> None:
        """Daemon, engine and store say the same, and nobody holds anything."""
        home, engine = self.home, self.home.client.engine
        assert (home.requests.active, home.requests.waiting, home.link.running) == (0, 0, 0)
        assert home.catalog._leases == {} and not home.link.flights._preparing
        doors = home.requests.reception.doors.values()
        assert not any(+door._lines for door in doors), "somebody waits at the door"
        known = {revision.rev: revision for revision in engine.residency.revisions()}
        assert set(known) == home.link.known, "engine and daemon know different revisions"
        used = {rev for e in home.catalog for rev in (e.rev, e.candidate) if rev}
        quarantined = {r.serving_rev for r in home.registry.list(limit=100).items}
        assert used <= set(home.store.revs()) <= used | quarantined, "files of nobody"
        assert set(known) <= used
        for rev, revision in known.items():
            assert revision.leases == revision.running == 0
            pinned, priority = home.catalog.wanted(rev)
            refused = rev in home.revisions.standing.unpinned
            assert revision.pinned == (pinned and not refused), f"{rev[:8]}: pin"
            assert revision.priority == priority
            assert home.revisions.tiers.get(rev, "registered") == revision.state
        for name, right in self.means.items():
            entry = home.catalog.get(name)
            assert entry is None or entry.candidate in (None, entry.rev), f"{entry} is unfinished"
            serves = entry.rev if entry else None
            sure = name not in self.unsure and right not in self.spoilt
            assert serves == right or not sure, f"{name} is {serves}, not {right}"
            self.means[name] = serves
        self.unsure.clear()
        counts = engine.pool.counts
        held = sum(len(row.blocks) for row in engine.slots.rows.values())
        assert (counts.kv_active, counts.adapter) == (0, held)
        assert engine.host.used_bytes == 100 * sum(
            known[rev].num_blocks for rev in engine.host.sizes
        ), "bytes of nobody in host memory"
        assert not engine.host.protected, "host memory held for nobody"
        assert list((home.store.directory / ".staging").iterdir()) == []

    async def end(self) -> None:
        """Every name that serves answers right; then all go, and nothing is left."""
        home = self.home
        for name, rev in self.means.items():
            if rev is not None and rev not in self.spoilt:
                await self.one_request(name, (5, 6, 7), 3, None)
        for name in NAMES:
            if home.registry.get(name) is not None:
                await home.adapters.remove(name)
        await home.settled()
        engine = home.client.engine
        assert list(engine.residency.revisions()) == [] and engine.host.sizes == {}
        assert home.store.revs() == [] or set(home.store.revs()) == set()
        engine.prefix.drop("base")
        assert engine.pool.num_free == engine.pool.num_blocks
        assert engine.slots.num_free == engine.slots.num_slots
        self.census.update(home.types())
        self.census["steps"] += sum(client.engine.turns for client in home.clients)


def live(at_home, seeds) -> Counter[str]:
    census: Counter[str] = Counter()

    for seed in seeds:

        async def scenario(home, seed=seed):
            life = Life(home, seed)
            await life.play()
            return life.census

        try:
            census += at_home(scenario, seed=seed)
        except (AssertionError, LookupError, TypeError, TimeoutError) as error:
            raise AssertionError(f"life {seed}: {error}") from error
    return census


def assert_nothing_was_left_out(census) -> None:
    never = {what for what in HAPPENINGS if not census[what]}
    assert not never, f"never happened, so nothing is proved of it: {never}"


def test_random_lives_lose_and_confuse_nothing(at_home):
    assert_nothing_was_left_out(live(at_home, FAST))


@pytest.mark.late
@pytest.mark.parametrize("seeds", LATE, ids=str)
def test_ten_thousand_steps_among_crashes_lose_and_confuse_nothing(at_home, seeds):
    """Five thousand of the engine's in either half."""
    census = live(at_home, seeds)
    assert_nothing_was_left_out(census)
    assert census["steps"] > 5_000 and census["crashes"] > 30


@pytest.mark.slow
def test_a_thousand_lives_lose_and_confuse_nothing(at_home):
    assert_nothing_was_left_out(live(at_home, range(ALL)))
