"""The token budget: what prompts do to those who decode, and what that costs the prompts.

`milliseconds` models a step of an 8B model on an H200: 15 GB of weights are read or 16 GFLOP a row
computed, whichever takes longer, and 2.8 ms go to everything else.  Times in these tests are that
model's; what is asserted is how the scheduler fills steps.
"""

import itertools
import random

import pytest

from engine.admission import SchedulerLimits, StepBuilder
from engine.scheduler import Sampled

DECODING = 64
SIZES = {
    "num_blocks": 2500,
    "block_size": 16,
    "max_num_seqs": 128,
    "max_batch_tokens": 2048,
    "mixed_tokens": 192,
    "max_model_len": 20_000,
}


def milliseconds(rows: int) -> float:
    return 2.8 + max(15.01e9 / 4.06e12, rows * 16.06e9 / 650e12) * 1e3


class Road:
    """A harness whose steps take time; notes who made a token when, and the rows of each step."""

    def __init__(self, make, **sizes) -> None:
        class Fast(make):
            """Draws the same token always: what is computed is not the question here."""

            def _run(self, work):
                return {c.seq.request_id: Sampled(1) for c in work.chunks if c.samples}

        self.h = Fast(**{**SIZES, **sizes})
        self.now = 0.0
        self.sent: dict[str, float] = {}
        self.sent_in: dict[str, int] = {}
        self.first: dict[str, float] = {}
        self.first_in: dict[str, int] = {}  # number of the step
        self.last: dict[str, float] = {}
        self.gaps: list[float] = []
        self.rows: list[dict[str, int]] = []

    def send(self, name: str, length: int, max_tokens: int = 1, **options) -> None:
        start = len(self.sent) * 7919
        self.sent[name], self.sent_in[name] = self.now, len(self.rows)
        prompt = [(start + i) % 5003 for i in range(length)]
        self.h.submit(name, prompt, max_tokens=max_tokens, **options)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            work = self.h.launch()
            self.h.settle()
            chunks = work.chunks if work else ()
            self.rows.append({c.seq.request_id: c.length for c in chunks})
            self.now += milliseconds(sum(self.rows[-1].values()))
            for chunk in chunks:
                if chunk.samples:
                    self._token(chunk.seq.request_id)

    def decode(self, count: int) -> list[str]:
        """`count` streams that make tokens from the next step on."""
        names = [f"stream {n}" for n in range(count)]
        for name in names:
            self.send(name, 1, max_tokens=10_000)
        self.step(2)
        self.gaps.clear()
        return names

    def until_first(self, name: str) -> int:
        """Steps from its arrival to its first token."""
        while name not in self.first:
            self.step()
            assert len(self.rows) < 5000, f"{name} starves"
        return self.first_in[name] - self.sent_in[name] + 1

    def _token(self, name: str) -> None:
        if name in self.last:
            self.gaps.append(self.now - self.last[name])
        elif name not in self.first:
            self.first[name], self.first_in[name] = self.now, len(self.rows) - 1
        self.last[name] = self.now


def ratio(gaps: list[float]) -> float:
    """99th percentile over median."""
    ordered = sorted(gaps)
    return ordered[int(0.99 * (len(ordered) - 1))] / ordered[len(ordered) // 2]


def gaps_while_prompts_arrive(make, **sizes) -> float:
    road = Road(make, **sizes)
    road.decode(DECODING)
    for n in range(8):
        road.send(f"prompt {n}", 512)
        road.step(12)
        assert f"prompt {n}" in road.first
    return ratio(road.gaps)


@pytest.mark.parametrize("lookahead", [False, True])
def test_pauses_between_tokens_stay_even_while_prompts_arrive(make, lookahead):
    assert gaps_while_prompts_arrive(make, lookahead=lookahead) <= 1.3


def test_without_a_budget_of_their_own_mixed_steps_are_what_makes_pauses_uneven(make):
    assert gaps_while_prompts_arrive(make, mixed_tokens=2048) > 2


def test_a_step_with_decode_rows_is_filled_to_its_budget_and_no_further(make):
    road = Road(make)
    road.decode(DECODING)
    road.send("prompt", 512)
    road.until_first("prompt")
    assert [sum(rows.values()) for rows in road.rows[-4:]] == [192] * 4
    assert [rows["prompt"] for rows in road.rows[-4:]] == [128] * 4


def test_the_whole_step_is_for_prompts_while_nobody_decodes(make):
    road = Road(make)
    for n in range(5):
        road.send(f"prompt {n}", 512)
    road.step()
    assert road.rows[-1] == {f"prompt {n}": 512 for n in range(4)}


def test_the_last_row_of_a_prompt_is_no_decode_row(make):
    road = Road(make)
    road.send("long", 2049)
    road.send("other", 512)
    road.step(2)
    assert road.rows[-1] == {"long": 1, "other": 512}


def test_several_short_prompts_share_the_room_of_one_step(make):
    road = Road(make)
    road.decode(DECODING)
    for n in range(4):
        road.send(f"prompt {n}", 32)
    road.step()
    assert all(f"prompt {n}" in road.first for n in range(4))


def test_a_full_house_of_decoding_sequences_leaves_prompts_a_quarter_of_the_budget(make):
    road = Road(make, max_num_seqs=301)
    road.decode(300)
    road.send("prompt", 480)
    assert road.until_first("prompt") == 10
    assert all(rows["prompt"] == 48 for rows in road.rows[-10:])


def test_a_prompt_goes_on_even_if_sequences_that_decode_could_fill_the_step(make):
    road = Road(make, max_num_seqs=32, max_batch_tokens=32)
    road.decode(31)
    road.send("prompt", 5)
    assert road.until_first("prompt") == 5


def test_short_prompts_go_past_a_long_one_which_goes_on(make):
    road = Road(make)
    road.decode(DECODING)
    road.send("long", 8192)
    road.step()
    for n in range(20):
        road.send(f"short {n}", 60)
        assert road.until_first(f"short {n}") == 1
    assert all(rows["long"] >= 64 for rows in road.rows[-20:]), "half of the room is its own"


def test_a_long_prompt_ends_in_time_however_many_short_ones_arrive(make):
    road = Road(make)
    road.decode(DECODING)
    road.send("long", 4096)
    while "long" not in road.first:
        for n in range(3):
            road.send(f"short {len(road.rows)} {n}", 60)
        road.step()
        assert len(road.rows) < 100, "it starves"
    assert road.first_in["long"] - road.sent_in["long"] + 1 <= 4096 / 64 + 1


def test_short_prompts_do_not_wait_for_the_long_ones_before_them(make):
    """Two long ones are ahead in the queue; the second begins with a block and steps back."""
    road = Road(make)
    road.decode(DECODING)
    road.send("long 0", 8192)
    road.send("long 1", 8192)
    road.send("short", 60)
    assert road.until_first("short") == 3
    road.step(20)
    assert sum(rows.get("long 1", 0) for rows in road.rows) == 16
    assert all(rows["long 0"] == 128 for rows in road.rows[-20:])


def test_short_prompts_do_not_wait_for_a_long_one_that_goes_past_a_longer_one(make):
    """The second takes the half that the first has no right to, but for a block for newcomers."""
    road = Road(make)
    road.decode(DECODING)
    road.send("longest", 8192)
    road.step()
    road.send("long", 4096)
    road.step(3)
    assert road.rows[-1] | {"longest": 64, "long": 64} == road.rows[-1]
    for n in range(3):
        road.send(f"short {n}", 60)
        assert road.until_first(f"short {n}") == 2
    assert [rows["long"] for rows in road.rows[-6:]] == [48, 20, 48, 20, 48, 20]
    assert all(rows["longest"] >= 64 for rows in road.rows[-6:])


@pytest.mark.parametrize(("priority", "sooner"), [(50, "short"), (40, "medium")])
def test_beside_the_first_prompt_priority_decides_and_then_length(make, priority, sooner):
    road = Road(make)
    road.decode(DECODING)
    road.send("long", 8192)
    road.step()
    road.send("medium", 600)
    road.step(2)
    road.send("short", 300, priority=priority)
    later = {"short": "medium", "medium": "short"}[sooner]
    road.until_first(sooner)
    assert later not in road.first
    assert road.until_first(later)


def test_what_the_first_prompt_leaves_over_goes_by_priority_too(make):
    road = Road(make)
    road.decode(DECODING)
    road.send("first", 700)
    road.step()
    road.send("long", 5000)
    road.step()
    road.send("short", 300, priority=40)
    road.until_first("first")
    assert "long" in road.rows[-1] and "short" not in road.rows[-1]
    assert sum("short" in rows for rows in road.rows) == 1, "it has begun"


def test_a_small_budget_is_shared_with_the_queue_and_not_given_up_to_it(make):
    road = Road(make, mixed_tokens=20)
    road.h.add("cold")
    road.h.host.delay["cold"] = 10_000
    road.decode(4)
    road.send("long", 4000)
    road.step()
    road.send("short", 60)
    road.send("cold", 60, rev="cold")
    road.step(3)
    assert [rows["short"] for rows in road.rows[-2:]] == [4, 4]
    assert [rows["long"] for rows in road.rows[-2:]] == [12, 12]


def test_equal_prompts_are_computed_one_after_another(make):
    """Sharing between equals would make all of them late."""
    road = Road(make)
    road.decode(DECODING)
    for n in range(4):
        road.send(f"prompt {n}", 512)
    last = road.until_first("prompt 3")
    steps = [road.first_in[f"prompt {n}"] - road.sent_in["prompt 0"] + 1 for n in range(4)]
    assert last == 16 and all(step <= 4 * (n + 1) + 1 for n, step in enumerate(steps))


def test_a_prompt_of_higher_priority_goes_first(make):
    road = Road(make)
    road.decode(DECODING)
    road.send("long", 4096)
    road.step(2)
    road.send("vip", 2048, priority=90)
    road.step(3)
    assert [rows.get("vip") for rows in road.rows[-3:]] == [64, 128, 128]
    road.until_first("vip")
    assert "long" not in road.first
    assert road.until_first("long")


def test_length_decides_among_equals_in_priority_only(make):
    road = Road(make)
    road.decode(DECODING)
    road.send("medium", 1000)
    road.step(2)
    road.send("long vip", 4096, priority=90)
    road.step()
    assert road.rows[-1]["long vip"] == 64, "half, though it is longer"
    road.send("short", 60, priority=10)
    road.step(3)
    assert [rows.get("short") for rows in road.rows[-3:]] == [16, None, None]
    assert all(rows["long vip"] >= 112 for rows in road.rows[-3:])


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_first_ends_its_prompt_in_as_many_steps_as_its_half_of_the_room_allows(
    make, seed
):
    """So every prompt ends: it waits for those before it, and each of them only so long."""
    draw = random.Random(seed)
    mixed, batch = draw.choice([8, 32, 64]), draw.choice([64, 128])
    road = Road(
        make,
        num_blocks=1000,
        block_size=4,
        max_num_seqs=24,
        max_batch_tokens=batch,
        mixed_tokens=mixed,
        lookahead=draw.random() < 0.5,
    )
    lengths: dict[str, int] = {}
    as_first: dict[str, int] = {}
    for n in range(40):
        lengths[f"p{n}"] = draw.choice([1, 5, 20, 90, 150])
        tokens, priority = draw.choice([1, 2, 40]), draw.choice([10, 50, 90])
        road.send(f"p{n}", lengths[f"p{n}"], max_tokens=tokens, priority=priority)
        for _ in range(draw.randrange(8)):
            first = next((s for s in road.h.scheduler._running if s.is_prompt), None)
            road.step()
            if first is not None:
                as_first[first.request_id] = as_first.get(first.request_id, 0) + 1
    for name in lengths:
        road.until_first(name)
    half = max(4, mixed // 4) / 2
    late = {name: n for name, n in as_first.items() if n > lengths[name] / half + 1}
    assert as_first and not late


# ------------------------------------------------------------------- when many prompts wait
CROWD = {"crowd_tokens": 512, "num_blocks": 9000, "max_num_seqs": 256}


def steps_for_a_crowd(make, **sizes) -> int:
    road = Road(make, **{**CROWD, **sizes})
    road.decode(DECODING)
    for n in range(64):
        road.send(f"prompt {n}", 512)
    return max(road.until_first(f"prompt {n}") for n in range(64))


def test_a_crowd_of_prompts_gets_larger_steps_for_as_long_as_it_lasts(make):
    small, large = steps_for_a_crowd(make, crowd_tokens=0), steps_for_a_crowd(make)
    assert small >= 64 * 512 // 128 and large < small / 2


def test_steps_shrink_slowly_as_a_crowd_leaves(make):
    road = Road(make, **CROWD)
    road.decode(DECODING)
    for n in range(20):
        road.send(f"prompt {n}", 512)
    for n in range(20):
        road.until_first(f"prompt {n}")
    rows = [sum(step.values()) for step in road.rows[2:]]
    assert max(rows) == 512
    assert all(b >= 0.8 * a for a, b in itertools.pairwise(rows) if a > 192)


def test_prompts_that_arrive_evenly_are_computed_in_steps_of_one_size(make):
    """One of 512 tokens every 3 steps: more than 128 rows a step can take."""
    road = Road(make, **CROWD)
    road.decode(DECODING)
    for n in range(120):
        road.send(f"prompt {n}", 512)
        road.step(3)
        if n == 60:
            road.gaps.clear()
    assert ratio(road.gaps) <= 1.3
    assert sum(name in road.first for name in road.sent if name.startswith("prompt")) > 100


def test_those_who_cannot_start_do_not_make_steps_larger(make):
    """Neither who waits for an adapter that is not there, nor who finds no seat."""
    road = Road(make, **{**CROWD, "max_num_seqs": DECODING + 1})
    road.decode(DECODING)
    for n in range(20):
        road.send(f"prompt {n}", 512)
    road.step(6)
    assert [sum(rows.values()) for rows in road.rows[-4:]] == [192] * 4


def test_the_queue_counts_the_tokens_of_those_who_wait(make):
    """Also of one that was given back with a token under way: `check` compares them."""
    h = make(lookahead=True, num_blocks=12, max_num_seqs=4)
    for n in range(4):
        h.submit(f"r{n}", list(range(9)), max_tokens=12)
    for _ in range(60):
        h.launch()
        h.settle()
        waiting = h.scheduler._waiting
        total = sum(waiting._counted.values())
        assert waiting.num_tokens(lambda rev: True) == total
        assert len(waiting._counted) == len(waiting)
    assert h.scheduler.num_preemptions


# ------------------------------------------------------------------- the arithmetic of a step
def test_the_rows_of_a_step_by_how_many_decode():
    limits = SchedulerLimits(
        block_size=16, max_num_seqs=256, max_batch_tokens=2048, mixed_tokens=192, max_model_len=4096
    )
    rows = {n: limits.rows(n) for n in (0, 1, 64, 144, 145, 256, 2000)}
    assert rows == {0: 2048, 1: 192, 64: 192, 144: 192, 145: 193, 256: 304, 2000: 2048}


def test_a_step_without_rows_is_no_step(make):
    step = StepBuilder(make().scheduler.limits)
    step.open(None, queued=False)
    assert step.build() is None
