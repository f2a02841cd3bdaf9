"""Random schedules through a whole core, on the CPU and on a card: no leak, and no wrong token.

Requests, aborts, loads, evictions, pins and replacements meet in a pool that is too small for them.
Every token is judged afterwards by a core on the CPU that computes one request at a time, all its
rows at once: its log-probability there has to be the largest, or a hair below where two tie.
"""

import os
import random
from dataclasses import replace
from itertools import count

import msgspec
import pytest

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

#: Of log-probabilities.  A card's fp32 kernels differ from torch's on the CPU by 1e-3 at most.
TIE = 5e-3
ACTS = 60
SEEDS = [
    range(2),
    pytest.param(range(2, 4), marks=pytest.mark.late),
    pytest.param(range(4, 20), marks=pytest.mark.slow),
]
LENGTHS = (3, 16, 33, 60, 90)
NAMES = {
    "x": ("all", "all anew"),
    "y": ("mlp", "mlp anew"),
    "z": ("late", "late anew"),
    "w": ("called", "called anew"),  # activated LoRAs
}
SHAPES = {
    "all": {"rank": 12},
    "mlp": {"rank": 3, "modules": ("gate_proj", "up_proj", "down_proj")},
    "late": {"rank": 5, "layers": (1,)},
    "called": {"rank": 6},
}
ENDS = {
    *("length", "stop", "abort", "draining", "load_failed", "no_room", "model_not_found"),
    *("deadline_exceeded", "invocation_missing"),
}
SIZES = {"max_num_seqs": 4, "max_batch_tokens": 64, "mixed_tokens": 20, "starve_after": 0.05}


@pytest.fixture(scope="session")
def revisions(make_adapter, prompt):
    """Two for each name, by what they are called."""
    names = [one for pair in NAMES.values() for one in pair]
    made = {
        one: make_adapter(f"schedules {one}", seed=70 + n, **SHAPES[one.split()[0]])
        for n, one in enumerate(names)
    }
    for one in NAMES["w"]:
        # Two ids that are in one prompt of three, and that no answer spells by chance.
        tokens = tuple(prompt(max(LENGTHS), 0)[26:28])
        manifest = msgspec.structs.replace(made[one].manifest, alora_tokens=tokens)
        made[one] = replace(made[one], manifest=manifest)
    return made


@pytest.fixture(scope="session")
def lost(make_adapter):
    """The manifest of one whose file is gone."""
    manifest = make_adapter("schedules lost", seed=80).manifest
    return msgspec.structs.replace(manifest, path=manifest.path + ".gone")


@pytest.fixture
def judge(start_core, revisions):
    """judge(prompt, tokens, rev): how far each token is below the best one, on the CPU, alone."""
    driver = start_core()
    driver.add(*revisions.values())
    known: dict = {}

    def tell(prompt, tokens, rev) -> list[float]:
        ids = (*prompt, *tokens)
        if (rev, ids) not in known:
            name = f"judged {len(known)}"
            story = driver.submit(name, ids, rev, max_tokens=0, prompt_logprobs=1)
            driver.finish()
            scored = story.prompt_logprobs[len(prompt) :]
            assert [one.token for one in scored] == list(tokens)
            known[rev, ids] = [one.top[0][1] - one.logprob for one in scored]
        return known[rev, ids]

    return tell


class Life:
    """One schedule on a core that may have lived before; it leaves the core empty."""

    def __init__(self, driver, revisions, lost, prompt, seed: int) -> None:
        self.driver, self.core = driver, driver.core
        self.revisions, self.lost, self.prompt = revisions, lost, prompt
        self.draw = random.Random(seed)
        self.seed = seed
        self.serving = dict.fromkeys(NAMES, 0)
        self.called = {revisions[one].rev for one in NAMES["w"]}
        self.asked: dict[str, tuple[list[int], str | None]] = {}
        self.commands: list[int] = []
        self.ids = count(1_000_000 + 1000 * seed)
        for name in NAMES:
            self.order(AddRevision, manifest=self.manifest(name))
        self.order(AddRevision, manifest=lost)

    def manifest(self, name):
        return self.revisions[NAMES[name][self.serving[name]]].manifest

    def order(self, kind, **fields) -> None:
        self.commands.append(next(self.ids))
        self.core.take(kind(command_id=self.commands[-1], **fields))

    # ------------------------------------------------------------- acts
    def play(self) -> None:
        acts = ["submit"] * 9 + ["step"] * 6
        acts += ["abort", "load", "evict", "evict", "pin", "replace", "ask_for_lost"]
        for _ in range(ACTS):
            getattr(self, self.draw.choice(acts))()
            self.core.scheduler.check()

    def step(self) -> None:
        for _ in range(self.draw.randrange(1, 8)):
            self.driver.step()

    def submit(self, rev: str | None = None) -> None:
        draw = self.draw
        request_id = f"schedule {self.seed}, request {len(self.asked)}"
        name = draw.choice([None, None, *NAMES])
        rev = rev or (name and self.manifest(name).rev)
        ids = self.prompt(max(LENGTHS), draw.randrange(3))[: draw.choice(LENGTHS)]
        self.asked[request_id] = ids, rev
        self.core.take(
            Submit(
                request_id=request_id,
                prompt=ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=draw.choice([1, 4, 12, 40])),
                rev=rev,
                priority=draw.choice([10, 50, 50, 90]),
                cache_salt=draw.choice(["", "", "x"]),
                deadline_seconds=draw.choice([None] * 9 + [0.01]),
            )
        )

    def ask_for_lost(self) -> None:
        self.submit(self.lost.rev)

    def abort(self) -> None:
        if self.asked:
            self.core.take(Abort(self.draw.choice(list(self.asked))))

    def load(self) -> None:
        self.order(Load, rev=self.any().rev, tier=self.draw.choice(["gpu", "ram"]))

    def evict(self) -> None:
        tier, abort = self.draw.choice(["ram", "disk"]), self.draw.random() < 0.7
        self.order(Evict, rev=self.any().rev, to=tier, abort_running=abort, force=True)

    def pin(self) -> None:
        pinned = self.draw.random() < 0.3
        self.order(SetRevision, rev=self.any().rev, pinned=pinned, priority=50)

    def replace(self) -> None:
        name = self.draw.choice(list(NAMES))
        old = self.manifest(name).rev
        self.serving[name] ^= 1
        self.order(AddRevision, manifest=self.manifest(name))
        self.order(RemoveRevision, rev=old)

    def any(self):
        return self.manifest(self.draw.choice(list(NAMES)))

    # ------------------------------------------------------------- the end
    def end(self, judge) -> dict[str, int]:
        """Everything has ended once and right, and nothing is held; how often what happened."""
        driver = self.driver
        for name in NAMES:
            self.order(SetRevision, rev=self.manifest(name).rev, pinned=False, priority=50)
        driver.until(lambda: all(self.finish(name) for name in self.asked))
        ends: dict[str, int] = {}
        for request_id, (prompt, rev) in self.asked.items():
            story = driver.stories[request_id]
            below = judge(prompt, story.tokens, rev) if story.tokens else []
            assert all(gap <= TIE for gap in below), f"{request_id} on {rev}: {below}"
            why = story.code or story.finish
            assert why in ENDS, (story.code, story.message)
            ends[why] = ends.get(why, 0) + 1
            if story.tokens and rev in self.called:
                invoked = "answered from an invocation on"
                ends[invoked] = ends.get(invoked, 0) + 1
        for rev in (*(one.rev for one in self.revisions.values()), self.lost.rev):
            self.order(RemoveRevision, rev=rev)
        driver.until(lambda: all(c in driver.answers for c in self.commands) and self.core.idle)
        self.core.scheduler.check()
        snapshot = self.core.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.slots_used) == (0, 0, 0)
        assert snapshot.revisions == () and snapshot.ram_used_bytes == 0
        assert snapshot.pool.free + snapshot.pool.kv_cached == snapshot.pool.total
        return ends

    def finish(self, request_id: str) -> str | None:
        story = self.driver.stories.get(request_id)
        return story and story.finish


def live(driver, revisions, lost, prompt, judge, seeds, needed) -> None:
    """Many, one after another; what is `needed` has to have happened in one of them.

    Loads end when the reader's thread does, so what meets what differs from run to run: if
    something is still to happen after the last of `seeds`, up to sixteen further ones follow.
    """
    ends: dict[str, int] = {}
    for seed in range(seeds.start, seeds.stop + 16):
        if seed >= seeds.stop and all(ends.get(one) for one in needed):
            return
        life = Life(driver, revisions, lost, prompt, seed)
        life.play()
        for why, times in life.end(judge).items():
            ends[why] = ends.get(why, 0) + times
        ends["preemptions"] = driver.core.snapshot().preemptions
    assert all(ends.get(one) for one in needed), f"only {ends}"


def tight(revisions) -> int:
    """Blocks for the largest adapter, one long sequence and a little more."""
    return 16 + max(one.manifest.num_blocks for one in revisions.values())


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("seeds", SEEDS)
def test_random_schedules_leak_nothing_and_answer_as_one_by_one(
    start_core, revisions, lost, prompt, judge, lookahead, seeds
) -> None:
    driver = start_core(lookahead=lookahead, num_blocks=tight(revisions), **SIZES)
    needed = ("length", "preemptions", "invocation_missing", "answered from an invocation on")
    live(driver, revisions, lost, prompt, judge, seeds, needed)


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [False, True])
def test_random_schedules_on_a_card_leak_nothing_and_answer_as_the_cpu_one_by_one(
    start_core, revisions, lost, prompt, judge, lookahead
) -> None:
    """LORAD_SCHEDULES=FIRST:BEHIND takes other seeds, and as many as one likes."""
    card = {"device": "cuda", "dtype": "float32", "deterministic": False, "max_rank": 16}
    sizes = SIZES | {"num_blocks": tight(revisions)} | card
    driver = start_core(lookahead=lookahead, **sizes)
    needed = ("length", "abort", "load_failed", "draining", "preemptions")
    first, behind = map(int, os.environ.get("LORAD_SCHEDULES", "0:25").split(":"))
    live(driver, revisions, lost, prompt, judge, range(first, behind), needed)
