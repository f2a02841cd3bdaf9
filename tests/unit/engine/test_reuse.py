"""ReuseLog: hits, losses, savings and distances; by hand, then through the scheduler."""

import random

import pytest

from engine.admission import StepBuilder
from engine.memory.reuse import NUM_BUCKETS, ReuseLog

BLOCK = 4  # tokens
TOKEN_SECONDS = 0.5


def keys(count: int, name: str = "k") -> list[bytes]:
    return [f"{name}{n}".encode() for n in range(count)]


def note(log, who="", asked=40, found=(), missed=()) -> None:
    log.note(who, asked, found, missed, block_size=BLOCK, token_seconds=TOKEN_SECONDS)


@pytest.fixture
def log() -> ReuseLog:
    """Ten blocks have been filed."""
    log = ReuseLog(most=8)
    for key in keys(10, "first"):
        log.filed(key)
    return log


def test_hits_and_what_they_saved_are_counted_for_whoever_asked(log):
    note(log, "rev", asked=40, found=[10, 10, 10])
    note(log, "rev", asked=10)
    note(log, "", asked=7, found=[10])
    rev = log.of("rev")
    assert (rev.asked, rev.hit, rev.lost, rev.saved_seconds) == (50, 12, 0, 6.0)
    assert (log.total.asked, log.total.hit, log.total.saved_seconds) == (57, 16, 8.0)
    assert log.of("nobody").asked == 0


def test_the_total_keeps_what_a_forgotten_revision_had(log):
    note(log, "rev", asked=40, found=[10])
    log.forget("rev")
    assert log.of("rev").asked == 0 and log.total.asked == 40


def test_a_distance_is_how_many_blocks_were_filed_since_the_last_use(log):
    note(log, found=[10, 9, 8, 7, 6, 0])
    assert log.found.trimmed() == (1, 1, 2, 1, 1)  # 0; 1; 2, 3; 4; 10


def test_a_distance_beyond_all_buckets_is_in_the_last_one(log):
    log.now = 1 << 40
    note(log, found=[0])
    assert log.found.trimmed()[-1] == 1 and len(log.found.trimmed()) == NUM_BUCKETS


def test_what_was_evicted_and_is_asked_for_again_is_lost_and_has_a_distance(log):
    for n, key in enumerate(keys(3)):
        log.evicted(key, n)
    note(log, "rev", missed=keys(5))
    assert (log.of("rev").lost, log.of("rev").hit) == (12, 0)
    assert log.lost.trimmed() == (0, 0, 0, 0, 3)  # 10, 9, 8
    assert log.found.trimmed() == ()


def test_what_was_never_there_is_not_lost_nor_is_what_would_continue_it(log):
    log.evicted(b"k1", 0)
    note(log, "rev", missed=keys(3))
    assert log.of("rev").lost == 0


def test_what_was_computed_again_is_not_lost_any_more(log):
    log.evicted(b"k0", 0)
    log.filed(b"k0")
    note(log, "rev", missed=keys(1))
    assert log.of("rev").lost == 0


def test_only_the_latest_evictions_are_remembered(log):
    for key in keys(20):
        log.evicted(key, 0)
    assert len(log._evicted) == 8
    note(log, missed=keys(1))
    assert log.total.lost == 0
    note(log, missed=keys(20)[12:])
    assert log.total.lost == 32


# ------------------------------------------------------------------- through the scheduler
PROMPT = list(range(100, 117))  # four full blocks and a token


def ask(h, name, prompt=PROMPT, **options) -> None:
    h.submit(name, prompt, **{"max_tokens": 1, **options})
    h.run()


def counted(h) -> tuple[int, int, int]:
    total = h.prefix.reuse.total
    return total.asked, total.hit, total.lost


def test_blocks_in_use_are_at_no_distance_and_others_age_as_blocks_are_filed(make):
    h = make()
    ask(h, "first")  # files 4 blocks
    ask(h, "second")
    assert h.prefix.reuse.found.trimmed() == (4,)
    ask(h, "other", [7] * 9)  # files 2
    ask(h, "third")
    assert h.prefix.reuse.found.trimmed() == (4, 0, 4)
    h.submit("stays", PROMPT, max_tokens=20)
    h.submit("another", [8] * 9, max_tokens=1)
    h.step(2)
    assert h.end("another") and not h.end("stays")
    h.submit("beside", PROMPT, max_tokens=1)
    before = sum(h.prefix.reuse.found.buckets)
    h.step()
    assert sum(h.prefix.reuse.found.buckets) == before + 4
    assert h.prefix.reuse.found.trimmed() == (12, 0, 4), (
        "though one was filed since they are in use"
    )


def test_saved_seconds_are_hit_tokens_at_the_learnt_price_of_their_day(make):
    h = make()
    ask(h, "first")
    h.memory.costs.token_seconds = 0.5
    ask(h, "second")
    h.memory.costs.token_seconds = 0.25
    ask(h, "third")
    assert h.prefix.reuse.of("").saved_seconds == 16 * 0.5 + 16 * 0.25


def test_a_preempted_sequence_that_finds_its_own_blocks_again_is_no_hit(make):
    h = make(num_blocks=16, kv_floor=0, max_batch_tokens=64)
    h.submit("r", [1] * 30, max_tokens=8)
    h.step(3)
    (seq,) = h.scheduler._running
    h.scheduler._preempt(seq, StepBuilder(h.scheduler.limits))
    work = h.step()
    assert work.chunks[0].start == 32, "all but one row were found"
    h.run()
    assert counted(h) == (30, 0, 0)
    assert sum(h.prefix.reuse.found.buckets) == 0


def test_a_preempted_sequence_whose_blocks_are_gone_is_no_loss(make):
    h = make(num_blocks=8, kv_floor=0)
    h.submit("r", [1] * 15, max_tokens=8)
    h.step(3)
    (seq,) = h.scheduler._running
    h.scheduler._preempt(seq, StepBuilder(h.scheduler.limits))
    h.submit("vip", [2] * 31, max_tokens=1, priority=90)
    h.run()
    assert h.tokens("r") == h.alone([1] * 15, None, 8)
    assert counted(h) == (46, 0, 0)


def test_a_request_that_ends_before_it_is_admitted_has_asked_for_nothing(make):
    h = make(max_num_seqs=1)
    ask(h, "first")
    h.submit("runs", [5], max_tokens=9)
    h.step()
    h.submit("waits", PROMPT)
    h.step()
    h.scheduler.abort("waits")
    h.run()
    assert counted(h) == (18, 0, 0)


def test_an_aborted_request_counts_for_what_it_asked_and_its_blocks_are_found_later(make):
    h = make(max_batch_tokens=8)
    h.submit("r", PROMPT, max_tokens=9)
    h.step(2)
    h.scheduler.abort("r")
    h.run()
    ask(h, "again")
    assert counted(h) == (34, 12 + 4, 0)


def test_what_made_room_for_others_is_lost_and_what_left_with_its_revision_is_not(make):
    h = make(num_blocks=8, kv_floor=0)
    h.add("a", 1)
    ask(h, "first")
    ask(h, "wide", [7] * 27)
    ask(h, "second")
    asked, hit, lost = counted(h)
    assert (asked, hit + lost) == (17 + 27 + 17, 16) and lost >= 8
    before = counted(h)
    ask(h, "adapted", rev="a")
    h.remove("a")
    h.run()
    h.add("a", 1)
    ask(h, "adapted again", rev="a")
    asked, hit, lost = counted(h)
    assert (asked - before[0], hit - before[1], lost - before[2]) == (34, 0, 0)


def test_prompt_logprobs_ask_the_cache_for_nothing(make):
    h = make()
    ask(h, "first")
    ask(h, "second", prompt_logprobs=0)
    assert counted(h) == (17, 0, 0)


@pytest.mark.parametrize("seed", range(9))
def test_counts_are_those_of_a_cache_that_is_looked_at_by_hand(make, seed):
    """Whatever is evicted: hit is what `cached_tokens` says, and never more than was there."""
    draw = random.Random(seed)
    h = make(num_blocks=[9, 25, 60][seed % 3], kv_floor=0, max_batch_tokens=16)
    ever: set[tuple[int, ...]] = set()
    asked = hit = most = 0
    for n in range(60):
        prompt = [draw.randrange(12)] * draw.choice([4, 9, 13, 17]) + [9] * draw.randrange(3)
        ask(h, f"r{n}", prompt)
        asked, hit = asked + len(prompt), hit + h.deltas[f"r{n}"][0].cached_tokens
        blocks = range(BLOCK, len(prompt), BLOCK)
        most += BLOCK * sum(tuple(prompt[:end]) in ever for end in blocks)
        whole = prompt + h.tokens(f"r{n}")[:-1]
        ever |= {tuple(whole[:end]) for end in range(BLOCK, len(whole) + 1, BLOCK)}
    total = h.prefix.reuse.total
    assert (total.asked, total.hit) == (asked, hit)
    assert total.hit + total.lost <= most
    if h.pool.num_blocks >= 25:  # a small one forgets what it evicted long ago
        assert total.hit + total.lost == most
    assert total.lost > 0 or h.pool.num_blocks == 60
    assert sum(h.prefix.reuse.found.buckets) * BLOCK == total.hit
    assert sum(h.prefix.reuse.lost.buckets) * BLOCK == total.lost
