"""Random lives of the engine: every owner's invariants after every step, nothing lost at the end.

Each example is a list of acts on a small pool.  After each step `Scheduler.check` compares pool,
prefix index, slot table, records and sequences; the fake runner of conftest refuses rows on wrong
weights or foreign KV; every answer is compared with the same request alone.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

REVS = {"a": 2, "b": 3, "c": 5, "d": 2, "huge": 60}  # blocks
SHARES_BASE_KV = {"d"}  # changes no K and no V
PROMPTS = [list(range(length)) for length in (1, 4, 9, 17, 30)] + [[7] * 12, [1, 2, 3, 4, 9, 9]]


@dataclass(frozen=True)
class Asked:
    """A request as it was sent."""

    prompt: list[int]
    rev: str | None
    max_tokens: int


rev = st.sampled_from(sorted(REVS))
some = st.booleans()
submit = st.tuples(
    st.just("submit"),
    st.one_of(st.none(), rev, st.sampled_from("abcd")),
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, 30),
    st.sampled_from([10, 50, 50, 90]),
)
step = st.tuples(st.just("step"), st.integers(1, 12))
ACTS = st.one_of(
    *[submit] * 6,
    *[step] * 4,
    st.tuples(st.just("abort"), st.integers(0, 200), some),
    st.tuples(st.just("add"), rev, some),
    st.tuples(st.just("remove"), rev),
    st.tuples(st.just("load"), rev, st.sampled_from(["gpu", "ram"])),
    st.tuples(st.just("evict"), rev, st.sampled_from(["ram", "disk"]), some, some),
    st.tuples(st.just("pin"), rev, some, st.sampled_from([10, 50, 90])),
    st.tuples(st.just("break"), st.just("b"), some),
    st.tuples(st.just("slow"), rev, st.integers(1, 30)),
    st.tuples(st.just("wait"), st.floats(0.1, 5.0)),
)
SIZES: dict[str, list] = {
    "num_blocks": [14, 20, 40],
    "slots": [1, 2, 4],
    "max_num_seqs": [2, 6],
    "max_batch_tokens": [6, 16],
    "kv_floor": [0, 6],
    "adapter_floor": [0, 4],
    "policy": ["cost", "lru", "fifo", "lfu"],
    "ram_blocks": [5, 8, 100],
    "blocks_in_flight": [1, 6],
}
ANY_SIZES = st.fixed_dictionaries({name: st.sampled_from(v) for name, v in SIZES.items()})


class Life:
    """Plays acts on a harness and knows what has to come of them."""

    def __init__(self, harness) -> None:
        self.h = harness
        self.h.copier.copies_take = 2
        self.asked: dict[str, Asked] = {}
        self.commands: list[int] = []
        for name in REVS:
            self.add(name, False)

    def add(self, name: str, pinned: bool) -> None:
        shares = name in SHARES_BASE_KV
        self.commands.append(self.h.add(name, REVS[name], changes_kv=not shares, pinned=pinned))

    def play(self, act: tuple) -> None:
        kind, *details = act
        handler: Callable[..., None] = getattr(self, f"act_{kind}")
        handler(*details)
        self.h.scheduler.check()

    def act_step(self, times: int) -> None:
        self.h.step(times)

    def act_submit(self, name, prompt, max_tokens, priority) -> None:
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = Asked(PROMPTS[prompt], name, max_tokens)
        self.h.submit(request_id, PROMPTS[prompt], name, max_tokens=max_tokens, priority=priority)

    def act_abort(self, which: int, in_mid_step: bool) -> None:
        if in_mid_step:
            self.h.launch()
        self.h.scheduler.abort(f"r{which % max(len(self.asked), 1)}")
        if in_mid_step:
            self.h.settle()

    def act_add(self, name, pinned) -> None:
        self.add(name, pinned)

    def act_remove(self, name) -> None:
        self.commands.append(self.h.remove(name))

    def act_load(self, name, tier) -> None:
        self.commands.append(self.h.load(name, tier))

    def act_evict(self, name, to, abort_running, force) -> None:
        self.commands.append(
            self.h.evict(name, to=to, abort_running=abort_running, force=force, drain_timeout=1.0)
        )

    def act_pin(self, name, pinned, priority) -> None:
        self.commands.append(self.h.set(name, pinned=pinned, priority=priority))

    def act_break(self, name, broken) -> None:
        self.h.host.errors[name] = "I/O error" if broken else ""

    def act_slow(self, name, polls) -> None:
        self.h.host.delay[name] = polls

    def act_wait(self, seconds) -> None:
        self.h.clock.now += seconds

    def end(self) -> None:
        """Run out, compare every answer, remove everything: the pool is whole again."""
        h = self.h
        for name in REVS:
            self.commands.append(h.set(name, pinned=False))
        h.run(limit=5000)
        for request_id, asked in self.asked.items():
            self.compare(request_id, asked)
        for name in REVS:
            self.commands.append(h.remove(name))
        h.run(limit=200)
        assert [c for c in self.commands if h.code(c) is None] == []
        assert list(h.residency.revisions()) == []
        assert h.host.sizes == {}, "bytes left in host memory"
        assert h.slots.num_free == h.slots.num_slots
        assert h.prefix.identities() in ([], ["base"])
        h.prefix.drop("base")
        assert h.pool.num_free == h.pool.num_blocks

    def compare(self, request_id: str, asked: Asked) -> None:
        end = self.h.end(request_id)
        assert end is not None, f"{request_id} never ended"
        tokens = self.h.tokens(request_id)
        right = self.h.alone(asked.prompt, asked.rev, len(tokens))
        assert tokens == right, f"{request_id}: {asked} answered {tokens}, alone {right}"
        ends = [token in self.h.scheduler.limits.eos_token_ids for token in tokens]
        assert not any(ends[:-1]), f"{request_id} went on after its end"
        if end.finish_reason == "length":
            assert len(tokens) == asked.max_tokens
        elif end.finish_reason == "stop":
            assert ends[-1]
        elif end.finish_reason == "abort":
            assert end.code in ("", "draining")
        else:
            assert end.code in ("load_failed", "no_room", "model_not_found"), end


def seeded(seed: int) -> tuple[dict, list[tuple]]:
    """Sizes and acts drawn evenly, so that pools are full and adapters compete most of the time."""
    draw = random.Random(seed)
    kinds = {
        "submit": 42,
        "step": 33,
        "abort": 5,
        "add": 4,
        "remove": 2,
        "load": 3,
        "evict": 3,
        "pin": 2,
        "break": 1,
        "slow": 2,
        "wait": 3,
    }
    names = sorted(REVS)
    some = names[:-1]  # without "huge"

    def details(kind: str) -> tuple:
        coin, name = draw.random() < 0.5, draw.choice(names)
        match kind:
            case "submit":
                rev = draw.choice([None, *some, *some, name])
                tokens, priority = draw.choice([0, 1, 3, 8, 30]), draw.choice([10, 50, 50, 90])
                return rev, draw.randrange(len(PROMPTS)), tokens, priority
            case "step":
                return (draw.randrange(1, 12),)
            case "abort":
                return draw.randrange(200), coin
            case "add":
                return name, draw.random() < 0.2
            case "remove":
                return (name,)
            case "load":
                return name, draw.choice(["gpu", "ram"])
            case "evict":
                return name, draw.choice(["ram", "disk"]), draw.random() < 0.3, coin
            case "pin":
                return name, coin, draw.choice([10, 50, 90])
            case "break":
                return "b", coin
            case "slow":
                return draw.choice(some), draw.randrange(1, 30)
            case _:
                return (draw.random() * 5,)

    sizes = {name: draw.choice(values) for name, values in SIZES.items()}
    drawn = draw.choices(list(kinds), list(kinds.values()), k=draw.randrange(30, 250))
    return sizes, [(kind, *details(kind)) for kind in drawn]


def live(make, sizes, acts) -> None:
    life = Life(make(**sizes))
    for act in acts:
        life.play(act)
    life.end()


settings.register_profile(
    "lives",
    deadline=None,
    database=None,
    phases=[Phase.generate],  # shrinking a life takes longer than reading its acts
    suppress_health_check=list(HealthCheck),
)
LIVES = settings.get_profile("lives")


#: One answer in seven ends by itself: with lookahead a row of it is under way by then.
MANY_ENDS = frozenset(range(0, 9973, 7))
AHEAD = {"lookahead": True, "eos": MANY_ENDS}


@pytest.mark.parametrize("seed", range(25))
def test_a_crowded_life_with_a_step_of_lookahead_loses_or_confuses_nothing(make, seed):
    sizes, acts = seeded(1_000_000 + seed)
    live(make, sizes | AHEAD, acts)


@pytest.mark.slow
def test_thousands_of_crowded_lives_with_lookahead_lose_or_confuse_nothing(make):
    for seed in range(1_000_025, 1_005_000):
        sizes, acts = seeded(seed)
        try:
            live(make, sizes | AHEAD, acts)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@settings(LIVES, max_examples=40, derandomize=True)
@given(sizes=ANY_SIZES, acts=st.lists(ACTS, min_size=60, max_size=150))
def test_no_life_with_lookahead_loses_or_confuses_anything(make, sizes, acts):
    live(make, sizes | AHEAD, acts)


@pytest.mark.parametrize("seed", range(25))
def test_a_crowded_life_loses_or_confuses_nothing(make, seed):
    live(make, *seeded(seed))


@pytest.mark.slow
def test_thousands_of_crowded_lives_lose_or_confuse_nothing(make):
    for seed in range(25, 5000):
        try:
            live(make, *seeded(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@settings(LIVES, max_examples=40, derandomize=True)
@given(sizes=ANY_SIZES, acts=st.lists(ACTS, min_size=60, max_size=150))
def test_no_life_of_the_engine_loses_or_confuses_anything(make, sizes, acts):
    live(make, sizes, acts)


@pytest.mark.slow
@settings(LIVES, max_examples=3000)
@given(sizes=ANY_SIZES, acts=st.lists(ACTS, min_size=60, max_size=200))
def test_thousands_of_lives_lose_or_confuse_nothing(make, sizes, acts):
    live(make, sizes, acts)
