"""Random lives of a whole core, with real reads and copies, whose freed blocks are poisoned.

Goes in: drivers of two cores of the same configuration (tests/integration/engine), in deterministic
mode.  One lives; the other says what each request answers alone, to the bit.  A block is filled
with huge numbers the moment that it is free: whoever reads it before its new owner wrote it says so
in every token after it.  On a card the poison is one more reader of the block, for which its next
owner has to wait as for the steps before (rule 11).
"""

import os
import random
from collections import Counter
from itertools import count

import torch

from engine.adapters.states import TRANSITIONS, State
from engine.messages import (
    Abort,
    AddRevision,
    Evict,
    Load,
    RemoveRevision,
    SamplingParams,
    SetRevision,
    Submit,
)

#: Bytes that are large and finite in every dtype: 14.6 in float16, 1.3e7 in bfloat16 and float32.
#: A poison of NaN hid the trace of a real bug.
POISON = 0x4B
LENGTHS = (3, 16, 33, 60, 90)
ENDS = {"length", "abort", "draining", "load_failed", "no_room", "model_not_found"}


def poison(core) -> Counter:
    """From now on every block that is freed is filled; how many were."""
    pool, arena, filled = core.pool, core.machine.arena, Counter()
    put_back = pool._put_back

    def put_back_poisoned(block):
        put_back(block)
        arena.bytes[block].fill_(POISON)
        if arena.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            pool.fence((block,), event)
        filled["blocks"] += 1

    pool._put_back = put_back_poisoned
    return filled


class Life:
    """Acts on a core, until `end` has compared everything and taken everything away."""

    def __init__(self, driver, adapters, prompt, seed) -> None:
        self.driver, self.core = driver, driver.core
        self.adapters, self.prompt = adapters, prompt
        self.draw, self.seed = random.Random(seed), seed
        self.ids = count(1_000_000 * (seed + 1))
        self.commands: list[int] = []
        self.asked: dict[str, tuple[list[int], str | None, int]] = {}
        self.gone: set[str] = set()  # revisions whose file is out of the way
        for adapter in adapters:
            self.order(AddRevision, manifest=adapter.manifest)

    def order(self, kind, **fields) -> None:
        self.commands.append(next(self.ids))
        self.core.take(kind(command_id=self.commands[-1], **fields))

    def any(self):
        return self.draw.choice(self.adapters)

    # ------------------------------------------------------------- acts
    def play(self, acts) -> None:
        kinds = ["submit"] * 9 + ["step"] * 7 + ["abort", "load", "load", "evict", "evict", "evict"]
        kinds += ["pin", "readd", "readd", "lose", "slow"]
        for _ in range(acts):
            getattr(self, self.draw.choice(kinds))()
            self.core.scheduler.check()

    def step(self) -> None:
        for _ in range(self.draw.randrange(1, 8)):
            self.driver.step()

    def submit(self) -> None:
        draw = self.draw
        rev = draw.choice([None, *(adapter.rev for adapter in self.adapters)])
        ids = self.prompt(max(LENGTHS), draw.randrange(3))[: draw.choice(LENGTHS)]
        length, name = draw.choice([1, 4, 12, 30]), f"life {self.seed}, request {len(self.asked)}"
        self.asked[name] = ids, rev, length
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        priority = draw.choice([10, 50, 50, 90])
        self.core.take(
            Submit(request_id=name, prompt=ids, sampling=sampling, rev=rev, priority=priority)
        )

    def abort(self) -> None:
        if self.asked:
            self.core.take(Abort(self.draw.choice(list(self.asked))))

    def load(self) -> None:
        self.order(Load, rev=self.any().rev, tier=self.draw.choice(["gpu", "ram"]))

    def evict(self) -> None:
        tier, now = self.draw.choice(["ram", "disk"]), self.draw.random() < 0.5
        timeout = 0.0 if now else self.draw.choice([0.001, 5.0])
        options = {"abort_running": now, "force": True, "drain_timeout": timeout}
        self.order(Evict, rev=self.any().rev, to=tier, **options)

    def pin(self) -> None:
        self.order(SetRevision, rev=self.any().rev, pinned=self.draw.random() < 0.2, priority=50)

    def readd(self) -> None:
        """Removed and back at once: the old requests end on what they have."""
        adapter = self.any()
        self.order(RemoveRevision, rev=adapter.rev)
        if self.draw.random() < 0.5:
            self.step()
        self.order(AddRevision, manifest=adapter.manifest)

    def lose(self) -> None:
        """A file that is not there for a while."""
        adapter = self.any()
        away = adapter.manifest.path + ".away"
        if adapter.rev in self.gone:
            self.gone.discard(adapter.rev)
            os.rename(away, adapter.manifest.path)
        elif self.draw.random() < 0.3:
            self.gone.add(adapter.rev)
            os.rename(adapter.manifest.path, away)

    def slow(self) -> None:
        self.core.machine.host.slow_seconds = self.draw.choice([0.0, 0.0, 0.01])

    # ------------------------------------------------------------- the end
    def end(self, control) -> Counter:
        """Every answer is what `control` says alone, and nobody holds anything."""
        self.core.machine.host.slow_seconds = 0.0
        for adapter in self.adapters:
            if adapter.rev in self.gone:
                os.rename(adapter.manifest.path + ".away", adapter.manifest.path)
            self.order(SetRevision, rev=adapter.rev, pinned=False, priority=50)
        self.gone.clear()
        driver, census = self.driver, Counter()
        driver.until(lambda: all(self.finish(name) for name in self.asked))
        most: Counter = Counter()  # tokens of a prompt's longest answer
        for name, (ids, rev, _) in self.asked.items():
            key = (tuple(ids), rev)
            most[key] = max(most[key], len(driver.stories[name].tokens))
        for name, (ids, rev, length) in self.asked.items():
            story = driver.stories[name]
            right = control(ids, rev, most[tuple(ids), rev])
            assert story.tokens == right[: len(story.tokens)], f"{name} on {rev}, after {ids}"
            why = story.code or story.finish
            assert why in ENDS, (why, story.message)
            assert why != "length" or len(story.tokens) == length
            census[why] += 1
        for adapter in self.adapters:
            self.order(RemoveRevision, rev=adapter.rev)
        answered = driver.answers
        driver.until(lambda: all(c in answered for c in self.commands) and self.core.idle)
        self.check_empty()
        self.check_transitions()
        census.update(f"{event.after}: {event.cause}" for event in driver.events)
        driver.events.clear()
        return census

    def finish(self, name):
        story = self.driver.stories.get(name)
        return story and story.finish

    def check_empty(self) -> None:
        core = self.core
        core.scheduler.check()
        snapshot = core.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.slots_used) == (0, 0, 0)
        assert snapshot.revisions == () and snapshot.ram_used_bytes == 0
        assert snapshot.pool.free + snapshot.pool.kv_cached == snapshot.pool.total
        core.prefix.drop("base")
        assert core.pool.num_free == core.pool.num_blocks
        assert core.machine.host.used_bytes == 0 and not core.machine.host.in_flight
        assert not core.machine.copier.in_flight

    def check_transitions(self) -> None:
        states: dict[str, str] = {}
        for event in self.driver.events:
            before = states.get(event.rev, State.REGISTERED)
            assert event.before == before, f"{event} does not follow {before}"
            assert State(event.after) in TRANSITIONS[State(event.before)]
            states[event.rev] = event.after


def control_on(driver, adapters, known=None):
    """control(ids, rev, length): what a core that does nothing else answers, or more of it.

    `known` is what another control of the same adapters has found.
    """
    known = {} if known is None else known
    driver.add(*adapters)
    numbers = count()

    def control(ids, rev, length):
        key = (tuple(ids), rev)
        if len(known.get(key, ())) < length:
            name = f"alone {next(numbers)}"
            story = driver.submit(name, ids, rev, max_tokens=length, ignore_eos=True)
            driver.finish()
            known[key] = story.tokens
        return known.get(key, [])

    return control


def live(driver, control, adapters, prompt, seeds, acts) -> Counter:
    """Lives one after another on one core; what happened, and how many blocks were poisoned."""
    census = poison(driver.core)
    for seed in seeds:
        life = Life(driver, adapters, prompt, seed)
        try:
            life.play(acts)
            census += life.end(control)
        except AssertionError as error:
            raise AssertionError(f"life {seed}: {error}") from error
    return census
