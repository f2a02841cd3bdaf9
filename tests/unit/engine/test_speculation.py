"""Who is given drafts, how long they are, what becomes of them, and that nobody else notices."""

import pytest

from engine import speculation
from engine.admission import SchedulerLimits, StepBuilder
from engine.messages import SamplingParams
from engine.sequence import Chunk, Doom, Sampled, Sequence
from engine.speculation import ROWS, Speculation, draft_rows, verified

DOOM = Doom("error", "internal_error", "not finite")


def sequence(rev=None, longest=1 << 20, grammar="", tokens=(1, 2, 3) * 9) -> Sequence:
    return Sequence(
        request_id="r",
        tokens=list(tokens),
        num_prompt=3,
        sampling=SamplingParams(grammar=grammar),
        rev=rev,
        identity=rev or "base",
        salt="",
        priority=50,
        order=1,
        longest=longest,
    )


def lengths(it: Speculation, seq: Sequence, times: int) -> list[int]:
    """Of drafts that are asked for again and again."""
    told = []
    for _ in range(times):
        it.open(1)
        told.append(len(it.drafts(seq, 8)))
    return told


# ------------------------------------------------------------------- what counts
def test_draws_count_up_to_the_first_that_is_another_than_its_draft():
    for right in range(4):
        drawn = [Sampled(n if n < right else 90 + n) for n in range(4)]
        told = verified((0, 1, 2), drawn)
        assert [told.token, *(one.token for one in told.more)] == [
            one.token for one in drawn[: right + 1]
        ]
        assert told.doom is None


def test_a_later_row_that_cannot_be_drawn_from_is_left_to_a_step_of_its_own():
    told = verified((4, 5), [Sampled(4), Sampled(5), Sampled(-2, doom=DOOM)])
    assert [told.token, *(one.token for one in told.more)] == [4, 5]
    first = verified((4, 5), [Sampled(-2, doom=DOOM), Sampled(5), Sampled(6)])
    assert first.doom is DOOM and not first.more


# ------------------------------------------------------------------- how long
def test_drafts_grow_while_they_are_right_and_end_while_they_are_not():
    it, seq = Speculation(8, ROWS), sequence()
    assert lengths(it, seq, 1) == [8], "in a step that has room for them, more tokens cost nothing"
    for _ in range(60):
        it.note(seq, 4, 4, right=4)
    assert lengths(it, seq, 1) == [8]
    for _ in range(120):
        it.note(seq, 2, 0, right=0)
    assert lengths(it, seq, 1) == [0]
    assert len(it.take_outcomes()) == 180 and it.take_outcomes() == []


@pytest.mark.parametrize(
    "share, most, made", [(0.3, 8, 8), (0.3, 1, 0), (0.26, 8, 0), (0.36, 1, 1)]
)
def test_a_draft_is_made_if_what_it_promises_is_more_than_it_costs(share, most, made):
    record = speculation._Record(right=1000 * share, tries=1000.0)
    assert record.length(most, 0.0) == made
    promised = sum(share**place for place in range(1, most + 1))
    assert (promised >= speculation.WORTH) == bool(made)


@pytest.mark.parametrize(
    "share, cost, made", [(0.9, 0.1, 8), (0.7, 0.3, 3), (0.5, 0.3, 0), (0.2, 0.3, 0)]
)
def test_a_model_s_draft_ends_where_a_token_costs_more_than_it_promises(share, cost, made):
    record = speculation._Record(right=1000 * share, tries=1000.0)
    assert record.length(8, cost) == made


def test_a_revision_without_drafts_is_tried_now_and_then_and_comes_back(monkeypatch):
    monkeypatch.setattr(speculation, "PROBE_EVERY", 10)
    it, seq = Speculation(8, ROWS), sequence()
    for _ in range(200):
        it.note(seq, 4, 0, right=0)
    told = lengths(it, seq, 10)
    assert told == [0] * 9 + [1]
    tries = 0
    while not it._records[None].length(8, 0.0):
        assert lengths(it, seq, 30)[-1] == 1
        it.note(seq, 1, 1, right=1)
        tries += 1
    assert tries <= 5, "what was known before counts little beside what a probe says"


def test_a_draft_that_is_asked_for_twice_in_a_turn_counts_once(monkeypatch):
    """With lookahead it is: whether a step waits for it, and then for the draft."""
    monkeypatch.setattr(speculation, "PROBE_EVERY", 10)
    it, bad, good = Speculation(8, ROWS), sequence("bad"), sequence("good")
    for _ in range(200):
        it.note(bad, 4, 0, right=0)
    turns = []
    for _ in range(20):
        it.open(2)
        due = it.is_due(bad), it.is_due(good)
        turns.append(len(it.drafts(bad, 8)))
        assert due == (bool(turns[-1]), True)
        if turns[-1]:
            it.note(bad, 1, 0, right=0)
    assert turns == ([0] * 9 + [1]) * 2


def test_adapters_and_the_base_are_judged_apart_and_forgotten_with_their_revision():
    it, base, good = Speculation(8, ROWS), sequence(), sequence("good")
    for _ in range(100):
        it.note(base, 3, 0, right=0)
        it.note(good, 3, 3, right=3)
    assert lengths(it, base, 1) == [0] and lengths(it, good, 1) == [8]
    it.forget_revision("good")
    assert lengths(it, good, 1) == [8]


@pytest.mark.parametrize("decoding, longest", [(1, 8), (7, 8), (8, 7), (31, 1), (32, 1), (33, 0)])
def test_more_sequences_have_shorter_drafts_and_many_have_none(decoding, longest):
    assert Speculation(8, 2048).open(decoding) == longest
    assert decoding * (1 + longest) <= ROWS or not longest


def test_small_steps_hold_fewer():
    assert [Speculation(8, rows).open(2) for rows in (1, 3, 4, 6, 20)] == [0, 0, 1, 2, 8]
    assert Speculation(8, 2048).open(0) == 0
    assert (draft_rows(2, 4), draft_rows(64, 4), draft_rows(64, 0)) == (8, ROWS - 1, 0)


def test_no_draft_goes_beyond_the_last_token_that_may_come(monkeypatch):
    monkeypatch.setattr(speculation, "WORTH", 0.0)
    for left in range(1, 7):
        seq = sequence(longest=27 + left)
        it = Speculation(8, ROWS)
        it.open(1)
        assert len(it.drafts(seq, 4)) == min(left - 1, 4)
        assert it.is_due(seq) == (left > 2)


def test_guided_sequences_never_have_any():
    it, seq = Speculation(8, ROWS), sequence(grammar="json")
    it.open(1)
    assert it.drafts(seq, 8) == () and not it.is_due(seq)
    assert lengths(it, sequence(), 1) == [8], "the same without its grammar"


def test_a_request_may_have_shorter_drafts_or_none():
    none, two, many = (sequence() for _ in range(3))
    for seq, most in ((none, 0), (two, 2), (many, 8)):
        seq.sampling = SamplingParams(draft_tokens=most)
    it = Speculation(8, ROWS)
    it.open(1)
    assert [len(it.drafts(seq, 8)) for seq in (none, two, many)] == [0, 2, 8]
    assert [it.longest(seq, 8) for seq in (none, two, many)] == [0, 2, 8]
    assert [it.is_due(seq, by_model=by) for seq in (none, two) for by in (False, True)] == [
        *(False, False),
        *(True, True),
    ]


def test_a_model_has_to_be_right_more_often_the_more_it_costs():
    seq = sequence(tokens=range(40))
    told = {cost: Speculation(8, ROWS, cost).longest(seq, 8) for cost in (0.0, 0.1, 0.3, 0.5, 1.0)}
    assert told == {0.0: 8, 0.1: 6, 0.3: 3, 0.5: 0, 1.0: 0}
    dear = Speculation(8, ROWS, 0.5)
    dear.open(1)
    for _ in range(200):
        dear.note(seq, 1, 1, right=1)
    assert dear.longest(seq, 8) > 4
    assert dear.is_due(seq, by_model=True) and not dear.is_due(seq), "nothing in it repeats"


def test_a_sequence_of_no_repeats_is_not_waited_for():
    it = Speculation(8, ROWS)
    it.open(1)
    assert not it.is_due(sequence(tokens=range(40))) and it.is_due(sequence())


# ------------------------------------------------------------------- in the schedule
BIG = {"num_blocks": 200, "max_batch_tokens": 64, "max_model_len": 400}


def drafted(work) -> list[Chunk]:
    return [chunk for chunk in work.chunks if chunk.drafts] if work else []


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_answers_are_those_without_drafts_in_fewer_steps(make, lookahead, tokens, monkeypatch):
    monkeypatch.setattr(speculation, "WORTH", 0.0)
    steps = []
    for most in (0, tokens):
        h = make(lookahead=lookahead, speculation_tokens=most, **BIG)
        h.add("a", 2)
        for n, rev in enumerate([None, "a", "a"]):
            h.submit(f"r{n}", list(range(n, n + 9)), rev, max_tokens=60)
        steps.append(h.run())
        for n, rev in enumerate([None, "a", "a"]):
            assert h.tokens(f"r{n}") == h.alone(list(range(n, n + 9)), rev, 60)
        assert sum(h.num_right.values()) > 0 or not most
        assert len(h.num_right) == most + bool(most), "drafts of every number of right tokens"
    assert steps[1] < steps[0]


def test_a_stop_token_in_a_draft_ends_the_answer_there(make):
    prompt = [1, 2, 3]
    right = make().alone(prompt, None, 30)
    for at in range(4, 24):
        h = make(speculation_tokens=4, eos=frozenset({right[at]}), **BIG)
        h.submit("r", prompt, max_tokens=30)
        h.run()
        assert h.tokens("r") == right[: right.index(right[at]) + 1]
        assert h.end("r").finish_reason == "stop" and h.pool.counts.kv_active == 0


def test_no_block_of_a_wrong_draft_is_kept_or_found(make, monkeypatch):
    """Blocks of four tokens, drafts of eight: most reach into a block that they do not stay in."""
    monkeypatch.setattr(speculation, "WORTH", 0.0)
    h = make(speculation_tokens=8, **BIG)
    h.submit("r", [1, 2, 3], max_tokens=80)
    while not h.end("r"):
        h.step()
        for seq in h.scheduler._running:
            assert len(seq.blocks) <= h.scheduler.limits.blocks(seq.length)
            assert seq.num_entered == seq.num_computed // 4
    assert h.num_right[0] and sum(h.num_right.values()) > 10
    seen = [1, 2, 3, *h.tokens("r")]
    found = h.prefix.find(seen, "base")
    assert len(found) == (len(seen) - 1) // 4 == len(h.prefix)
    h.submit("again", seen[:41], max_tokens=10)
    h.run()
    assert h.tokens("again") == h.alone(seen[:41], None, 10)
    assert h.deltas["again"][0].cached_tokens == 40


def test_a_guess_pushes_nothing_out(make):
    """Two that fill the pool to its last block: there are drafts while there is room, and nobody
    is preempted for one."""
    sizes = {"num_blocks": 20, "max_num_seqs": 2, "kv_floor": 0, "max_batch_tokens": 40}
    plain, h = (make(speculation_tokens=most, **sizes) for most in (0, 8))
    for it in (plain, h):
        for name in "ab":
            it.submit(name, [ord(name)] * 5, max_tokens=34)
        it.run()
    assert h.scheduler.num_preemptions == plain.scheduler.num_preemptions == 0
    assert drafts_of(h) > 0


def drafts_of(h) -> int:
    return sum(h.num_right.values())


def test_who_is_aborted_under_a_draft_leaves_only_what_is_verified(make):
    h = make(lookahead=True, speculation_tokens=8, **BIG)
    h.submit("r", [1, 2, 3], max_tokens=80)
    while not drafted(h.launch()):
        h.settle()
    h.scheduler.abort("r")
    h.settle()
    h.run()
    assert h.end("r").finish_reason == "abort" and h.pool.counts.kv_active == 0
    seen = [1, 2, 3, *h.tokens("r")]
    assert len(h.prefix) == len(seen) // 4
    assert seen[3:] == h.alone(seen[:3], None, len(seen) - 3)


def test_who_has_drafts_is_settled_before_the_next_step_and_who_has_none_is_looked_ahead(make):
    h = make(lookahead=True, speculation_tokens=4, **BIG)
    h.scheduler.speculation._guess = lambda seq, most: ()
    h.submit("r", [1, 2, 3], max_tokens=40)
    h.step(3)
    assert len(h.flights) == 1 and not h.scheduler.drafting.must_know(h.flights[0][0])
    h.scheduler.speculation._guess = h._guess
    while not h.scheduler.drafting.must_know(h.flights[0][0]):
        h.step()
    known = len(h.tokens("r"))
    [chunk] = h.launch().chunks
    assert len(h.tokens("r")) == known + 1, "settled first"
    assert chunk.start == 3 + known and chunk.length == 1 + len(chunk.drafts)
    assert h.scheduler.drafting.must_know(h.work) == bool(chunk.drafts)


def test_prompts_keep_their_share_of_a_step_with_drafts() -> None:
    limits = SchedulerLimits(
        block_size=16, max_num_seqs=8, max_batch_tokens=512, mixed_tokens=64, max_model_len=4096
    )
    one, two = sequence(), sequence(tokens=range(3000))
    two.num_prompt = 3000
    one.num_computed = len(one.tokens) - 1
    step = StepBuilder(limits)
    step.decode(one)
    step.draft(one, tuple(range(60)))
    step.open(two, 3000, queued=False)
    assert {chunk.seq: chunk.length for chunk in step.build().chunks} == {one: 61, two: 16}
