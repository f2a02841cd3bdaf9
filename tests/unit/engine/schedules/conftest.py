"""Random schedules: what is played, by whom, and what has to come of it.

A schedule is sizes and a list of acts.  A `Life` plays them on one of three devices: `now` settles
each step at once, `ahead` one step late, and `late` also computes as late as it may, when a draw is
waited for or a copy waits for its fence.  After each step every owner checks itself; at the end
each answer is compared with the same request alone, and nothing is held by anybody.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

import pytest

from engine.admission import StepBuilder
from engine.sequence import POOLED, Chunk, StepWork

DEVICES = ("now", "ahead", "late")
NAMES = {"a": 2, "b": 3, "c": 5, "d": 2, "e": 2, "f": 3, "huge": 60}  # blocks
SHARES_BASE_KV = {"d"}  # changes no K and no V
INVOKED_BY = {"e": (7,), "f": (3, 4)}  # activated LoRAs
PROMPTS = [list(range(length)) for length in (1, 4, 9, 17, 30)] + [[7] * 12, [1, 2, 3, 4, 9, 9]]
PROMPTS += [[*range(17), 3, 4, 7, *range(6)]]
SIZES: dict[str, list] = {
    "num_blocks": [14, 20, 40],
    "slots": [1, 2, 4],
    "max_num_seqs": [2, 6],
    "max_batch_tokens": [6, 16],
    "mixed_tokens": [0, 3, 8],
    "crowd_tokens": [0, 12],
    "kv_floor": [0, 6],
    "adapter_floor": [0, 4],
    "policy": ["cost", "lru", "fifo", "lfu"],
    "ram_blocks": [5, 8, 100],
    "blocks_in_flight": [1, 6],
    "starve_after": [0.1, 2.0],
    #: One answer in seven ends by itself: with lookahead a row of it is under way by then.
    "eos": [frozenset(), frozenset(range(0, 9973, 7))],
}

Act = tuple  # a kind, then what `Life.act_<kind>` takes
Schedule = tuple[dict, list[Act]]


@dataclass(frozen=True)
class Asked:
    """A request as it was sent."""

    prompt: list[int]
    rev: str | None
    max_tokens: int
    deadline: float | None
    pooled: bool = False


class Life:
    """Plays acts on a harness.  `census` counts what happened: nothing is tested in vain."""

    def __init__(self, harness, pools: bool = False) -> None:
        self.h, self.pools = harness, pools
        self.h.copier.copies_take = 2
        self.asked: dict[str, Asked] = {}
        self.commands: list[int] = []
        self.serving = {name: name for name in NAMES}  # name -> revision
        self.revs: set[str] = set()
        self.census: Counter[str] = Counter()
        self._numbers = count(2)
        for name in NAMES:
            self.add(name, False)

    def play(self, act: Act) -> None:
        kind, *details = act
        handler: Callable[..., None] = getattr(self, f"act_{kind}")
        handler(*details)
        self.h.scheduler.check()

    def add(self, name: str, pinned: bool) -> None:
        rev = self.serving[name]
        self.revs.add(rev)
        command = self.h.add(
            rev,
            NAMES[name],
            changes_kv=name not in SHARES_BASE_KV,
            pinned=pinned,
            alora_tokens=INVOKED_BY.get(name, ()),
        )
        self.commands.append(command)

    # ------------------------------------------------------------- acts
    def act_step(self, times: int) -> None:
        self.h.step(times)

    def act_submit(self, name, prompt, max_tokens, priority, salt="", deadline=None) -> None:
        request_id = f"r{len(self.asked)}"
        rev = name and self.serving[name]
        if self.pools and len(self.asked) % 2:
            self.asked[request_id] = Asked(PROMPTS[prompt], rev, 0, deadline, pooled=True)
            self.h.pool_input(
                request_id,
                PROMPTS[prompt],
                rev,
                reuses=len(self.asked) % 4 > 0,
                priority=priority,
                cache_salt=salt,
                deadline_seconds=deadline,
            )
            return
        self.asked[request_id] = Asked(PROMPTS[prompt], rev, max_tokens, deadline)
        self.h.submit(
            request_id,
            PROMPTS[prompt],
            rev,
            max_tokens=max_tokens,
            priority=priority,
            salt=salt,
            deadline=deadline,
        )

    def act_abort(self, which: int, in_mid_step: bool) -> None:
        if in_mid_step:
            self.census["aborts in mid-step"] += self.h.launch() is not None
        self.h.scheduler.abort(f"r{which % max(len(self.asked), 1)}")
        if in_mid_step:
            self.h.settle()

    def act_preempt(self, which: int) -> None:
        running = self.h.scheduler._running
        if running:
            seq = running[which % len(running)]
            self.h.scheduler._preempt(seq, StepBuilder(self.h.scheduler.limits))

    def act_replace(self, name) -> None:
        """New weights under an old name: requests that have begun end on the old ones."""
        old, self.serving[name] = self.serving[name], f"{name}{next(self._numbers)}"
        self.add(name, False)
        self.commands.append(self.h.remove(old))
        self.census["replaced in use"] += any(seq.rev == old for seq in self.h.scheduler._running)

    def act_add(self, name, pinned) -> None:
        self.add(name, pinned)

    def act_remove(self, name) -> None:
        self.commands.append(self.h.remove(self.serving[name]))

    def act_load(self, name, tier) -> None:
        self.commands.append(self.h.load(self.serving[name], tier))

    def act_evict(self, name, to, abort_running, force, drain_timeout) -> None:
        options = {"abort_running": abort_running, "force": force, "drain_timeout": drain_timeout}
        self.commands.append(self.h.evict(self.serving[name], to=to, **options))

    def act_pin(self, name, pinned, priority) -> None:
        command = self.h.set(self.serving[name], pinned=pinned, priority=priority)
        self.commands.append(command)

    def act_break(self, name, broken) -> None:
        self.h.host.errors[self.serving[name]] = "I/O error" if broken else ""

    def act_starve(self, name, starved) -> None:
        no_memory = self.h.copier.no_memory
        (no_memory.add if starved else no_memory.discard)(self.serving[name])
        self.census["copies without memory"] += starved

    def act_slow(self, name, polls) -> None:
        self.h.host.delay[self.serving[name]] = polls

    def act_copy(self, polls) -> None:
        self.h.copier.copies_take = polls

    def act_wait(self, seconds) -> None:
        self.h.clock.now += seconds

    # ------------------------------------------------------------- the end
    def end(self) -> None:
        """Run out, compare every answer, remove everything: the pool is whole again."""
        h = self.h
        for rev in self.revs:
            self.commands.append(h.set(rev, pinned=False))
        h.run(limit=5000)
        for request_id, asked in self.asked.items():
            self.compare(request_id, asked)
        self.take_census()
        for rev in self.revs:
            self.commands.append(h.remove(rev))
        h.run(limit=200)
        h.step()
        assert [c for c in self.commands if h.code(c) is None] == []
        assert list(h.residency.revisions()) == [], "a lease is left"
        assert h.host.sizes == {}, "bytes left in host memory"
        assert h.slots.num_free == h.slots.num_slots
        assert h.prefix.identities() in ([], ["base"])
        h.prefix.drop("base")
        assert h.pool.num_free == h.pool.num_blocks
        assert h.scheduler._counters.accounts() <= {("", None), ("", POOLED)}

    def compare(self, request_id: str, asked: Asked) -> None:
        end = self.h.end(request_id)
        assert end is not None, f"{request_id} never ended"
        tokens = self.h.tokens(request_id)
        if end.code == "invocation_missing":
            self.census[end.code] += 1
            called = self.h.invocations[asked.rev]
            assert not tokens and not any(
                tuple(asked.prompt[i:][: len(called)]) == called for i in range(len(asked.prompt))
            )
            return
        if asked.pooled and end.finish_reason == "stop":
            [wanted] = self.h.alone(asked.prompt, asked.rev, 1)
            assert self.h.pooled[request_id] == wanted and not tokens
            self.census["pooled"] += 1
            return
        right = self.h.alone(asked.prompt, asked.rev, len(tokens))
        assert tokens == right, f"{request_id}: {asked} answered {tokens}, alone {right}"
        ends = [token in self.h.scheduler.limits.eos_token_ids for token in tokens]
        assert not any(ends[:-1]), f"{request_id} went on after its end"
        self.census[end.code or str(end.finish_reason)] += 1
        if end.finish_reason == "length":
            assert len(tokens) == asked.max_tokens
        elif end.finish_reason == "stop":
            assert ends[-1]
        elif end.finish_reason == "abort":
            assert end.code in ("", "draining")
        elif end.code == "deadline_exceeded":
            assert asked.deadline is not None
        else:
            assert end.code in ("load_failed", "no_room", "model_not_found"), end

    def take_census(self) -> None:
        h, total = self.h, self.h.prefix.reuse.total
        assert total.hit + total.lost <= total.asked
        assert sum(h.prefix.reuse.found.buckets) * h.block_size == total.hit
        self.census["preemptions"] += h.scheduler.num_preemptions
        self.census["prefix hits"] += total.hit > 0
        self.census["prefixes lost"] += total.lost > 0
        causes = Counter(event.cause for event in h.events if event.after == "draining")
        self.census["drained for others"] += causes["starvation"]
        self.census["evictions"] += sum(r.num_evictions for r in h.residency.revisions())
        self.census["copies that waited for a step"] += getattr(h, "num_waits", 0)


def seeded(seed: int) -> Schedule:
    """Sizes and acts drawn evenly, so that pools are full and adapters compete most of the time."""
    draw = random.Random(seed)
    kinds = {
        "submit": 42,
        "step": 33,
        "abort": 5,
        "preempt": 3,
        "replace": 2,
        "add": 3,
        "remove": 2,
        "load": 3,
        "evict": 3,
        "pin": 2,
        "break": 1,
        "starve": 1,
        "slow": 2,
        "copy": 1,
        "wait": 3,
    }
    names = sorted(NAMES)
    some = names[:-1]  # without "huge"

    def details(kind: str) -> tuple:
        coin, name = draw.random() < 0.5, draw.choice(names)
        match kind:
            case "submit":
                who = draw.choice([None, *some, *some, name])
                tokens, priority = draw.choice([0, 1, 3, 8, 30]), draw.choice([10, 50, 50, 90])
                salt, deadline = draw.choice(["", "", "", "x"]), draw.choice([None] * 9 + [0.2])
                return who, draw.randrange(len(PROMPTS)), tokens, priority, salt, deadline
            case "step":
                return (draw.randrange(1, 12),)
            case "abort":
                return draw.randrange(200), coin
            case "preempt":
                return (draw.randrange(6),)
            case "add":
                return name, draw.random() < 0.2
            case "remove" | "replace":
                return (name,)
            case "load":
                return name, draw.choice(["gpu", "ram"])
            case "evict":
                timeout = draw.choice([0.05, 1.0])
                return name, draw.choice(["ram", "disk"]), draw.random() < 0.3, coin, timeout
            case "pin":
                return name, coin, draw.choice([10, 50, 90])
            case "break" | "starve":
                return draw.choice(some), draw.random() < 0.3
            case "slow":
                return draw.choice(some), draw.randrange(1, 30)
            case "copy":
                return (draw.randrange(1, 8),)
            case _:
                return (draw.random() * 5,)

    sizes = {name: draw.choice(values) for name, values in SIZES.items()}
    drawn = draw.choices(list(kinds), list(kinds.values()), k=draw.randrange(30, 250))
    return sizes, [(kind, *details(kind)) for kind in drawn]


# ------------------------------------------------------------------- the late device
class Known:
    """A sequence as the upload has it: nothing that changes later changes it."""

    def __init__(self, seq, rows) -> None:
        self.seq, self.request_id = seq, seq.request_id
        self.tokens, self.blocks = tuple(seq.tokens), tuple(seq.blocks)
        self.activation, self.pooled = seq.activation, seq.pooled
        self.slot = rows.get(seq.slot)  # the row itself: the slot may be another's by then

    def __eq__(self, other) -> bool:
        return self.seq is other.seq

    def __hash__(self) -> int:
        return id(self.seq)


def _is_waited_for(chunk) -> bool:
    return chunk.samples or (
        chunk.seq.pooled and chunk.start + chunk.length == chunk.seq.num_prompt
    )


@pytest.fixture(scope="session")
def make_late(make):
    """Harnesses; `fence_of`: step just launched -> the one that freed blocks wait for."""

    class LateHarness(make):
        def __init__(self, fence_of=lambda step: step, **sizes) -> None:
            super().__init__(lookahead=True, **sizes)
            self.fence_of = fence_of
            self.launched = 0
            self.queue = deque()  # launched, not computed: number, work, what is drawn
            self.num_waits = 0  # copies that had to wait for a step
            self.start, self.copier.start = self.copier.start, self.copy

        def settle(self) -> None:
            if len(self.flights) > (self.work is not None):
                work, drawn = self.flights[0]
                if any(map(_is_waited_for, work.chunks)):
                    while any(entry[2] is drawn for entry in self.queue):
                        self.compute()
            super().settle()

        def copy(self, rev, blocks) -> None:
            fences = [f for f in self.pool.take_fences(blocks) if isinstance(f, int)]
            before = len(self.queue)
            while self.queue and self.queue[0][0] <= max(fences, default=0):
                self.compute()
            self.num_waits += len(self.queue) < before
            self.start(rev, blocks)

        def compute(self) -> None:
            _, work, drawn = self.queue.popleft()
            drawn.update(super()._run(work))

        def _run(self, work):
            rows, drawn = self.slots.rows, {}
            chunks = [
                Chunk(Known(c.seq, rows), c.start, c.length, c.samples, drafts=c.drafts)
                for c in work.chunks
            ]
            self.launched += 1
            self.queue.append((self.launched, StepWork(tuple(chunks)), drawn))
            self.pool.stamp = self.fence_of(self.launched)
            return drawn

        def _weights(self, row):
            if row is None:
                return None
            assert all(self.arena[b] == row.rev for b in row.blocks), "half an adapter"
            return row.rev

    return LateHarness


@pytest.fixture(scope="session")
def live(make, make_late) -> Callable[..., Counter[str]]:
    """live(device, schedule, drafts=0) plays it to its end; what happened in it.  With `pools`
    every other request is an input that is pooled."""

    def play(device: str, schedule: Schedule, drafts: int = 0, pools: bool = False) -> Counter[str]:
        sizes, acts = schedule
        sizes = sizes | {"speculation_tokens": drafts, "pooled_tokens": 3 if pools else 1 << 30}
        if device == "late":
            harness = make_late(**sizes)
        else:
            harness = make(**sizes, lookahead=device == "ahead")
        life = Life(harness, pools)
        for act in acts:
            life.play(act)
        life.end()
        right = harness.num_right
        life.census["wrong drafts"] = right[0]
        life.census["right drafts"] = right.total() - right[0]
        return life.census

    return play


@pytest.fixture(scope="session")
def live_through(live) -> Callable[..., Counter[str]]:
    """live_through(device, seeds): the census of all; a failure names its seed.

    With `drafts` a sequence has 1 to 8, by the seed.
    """

    def play(
        device: str, seeds: Iterable[int], drafts: bool = False, pools: bool = False
    ) -> Counter[str]:
        census: Counter[str] = Counter()
        for seed in seeds:
            try:
                census += live(device, seeded(seed), drafts * (1 + seed % 8), pools)
            except (AssertionError, LookupError, TypeError) as error:
                raise AssertionError(f"device {device}, seed {seed}") from error
        return census

    return play
