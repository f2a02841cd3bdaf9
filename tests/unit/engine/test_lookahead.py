"""One step of lookahead: the next step is scheduled before the last one's tokens are known."""

from engine.admission import StepBuilder
from engine.memory.pool import Owner


def test_answers_are_those_of_settling_at_once(make):
    told = []
    for lookahead in (False, True):
        h = make(lookahead=lookahead, num_blocks=24, max_batch_tokens=12)
        h.add("a", 2)
        for n, rev in enumerate([None, "a", None, "a", None]):
            h.submit(f"r{n}", list(range(n, n + 9)), rev, max_tokens=10)
        h.run()
        told.append([h.tokens(f"r{n}") for n in range(5)])
    assert told[0] == told[1] and all(len(tokens) == 10 for tokens in told[0])


def test_a_row_is_launched_on_a_token_that_is_still_being_drawn(make):
    h = make(lookahead=True)
    h.submit("r", [1, 2, 3], max_tokens=4)
    assert [c.start for c in h.launch().chunks] == [0]
    h.settle()
    assert h.tokens("r") == [], "nothing is known of the launched step"
    [chunk] = h.launch().chunks
    assert (chunk.start, chunk.length, chunk.samples) == (3, 1, True)
    assert len(chunk.seq.tokens) == 3
    h.settle()
    assert len(h.tokens("r")) == 1


def test_no_row_is_wasted_on_an_end_that_is_known_beforehand(make):
    h = make(lookahead=True)
    h.submit("r", [1, 2, 3], max_tokens=3)
    works = []
    while not h.end("r"):
        works.append(h.launch())
        h.settle()
    assert [w.chunks[0].start for w in works if w] == [0, 3, 4]
    assert works[-1] is None and h.end("r").finish_reason == "length"


def test_the_context_is_never_overrun(make):
    h = make(lookahead=True, max_model_len=8)
    h.submit("r", [1, 2, 3], max_tokens=50)
    h.run()
    assert len(h.tokens("r")) == 5


def test_an_end_of_its_own_wastes_one_row_and_gives_everything_back(make):
    first = make().alone([1, 2, 3], None, 2)
    h = make(lookahead=True, eos=frozenset({first[1]}))
    h.submit("r", [1, 2, 3], max_tokens=50)
    works = []
    while h.scheduler.has_work or h.flights:
        works.append(h.launch())
        h.settle()
    assert h.tokens("r") == first and h.end("r").finish_reason == "stop"
    assert [w.chunks[0].start for w in works if w] == [0, 3, 4], "the last row is for nobody"
    assert h.pool.counts.kv_active == 0


def test_a_wasted_row_enters_no_block_in_the_prefix_index(make):
    """Block size 4: with the wasted row the second block would be full."""
    first = make().alone([1, 2, 3, 4, 5, 6], None, 2)
    h = make(lookahead=True, eos=frozenset({first[1]}))
    h.submit("r", [1, 2, 3, 4, 5, 6], max_tokens=50)
    h.run()
    assert h.tokens("r") == first
    assert len(h.prefix) == 1, "six tokens of prompt and one that was accepted: one full block"


def test_an_abort_with_rows_under_way_ends_in_the_next_settling(make):
    h = make(lookahead=True)
    h.submit("r", [1, 2, 3], max_tokens=50)
    h.step(3)
    h.scheduler.abort("r")
    assert h.launch() is None, "no more rows"
    h.settle()
    assert h.end("r").finish_reason == "abort" and h.pool.counts.kv_active == 0


def test_an_abort_between_launch_and_settling_frees_blocks_with_a_row_under_way(make):
    h = make(lookahead=True)
    h.submit("r", [1, 2, 3], max_tokens=50)
    h.step(3)
    h.launch()
    h.scheduler.abort("r")
    h.settle()
    assert h.end("r").finish_reason == "abort" and h.pool.counts.kv_active == 0
    assert len(h.flights) == 1
    h.submit("next", [4, 5, 6], max_tokens=5)
    h.run()
    assert h.tokens("next") == h.alone([4, 5, 6], None, 5)


def test_who_gives_way_with_a_row_under_way_keeps_the_token_of_it(make):
    h = make(lookahead=True, num_blocks=8, kv_floor=0, max_batch_tokens=16)
    prompts = [[n, n + 1, n + 2, n + 3, n + 4] for n in range(3)]
    for n, prompt in enumerate(prompts):
        h.submit(f"r{n}", prompt, max_tokens=12)
    h.run()
    assert h.scheduler.num_preemptions > 0
    for n, prompt in enumerate(prompts):
        assert h.tokens(f"r{n}") == h.alone(prompt, None, 12)


def test_who_comes_back_with_a_row_under_way_needs_room_for_its_token_too(make):
    """Eight tokens are known and the ninth is being drawn: that is three blocks."""
    h = make(lookahead=True, num_blocks=3, kv_floor=0)
    h.submit("r", list(range(8)), max_tokens=2)
    h.launch()
    (seq,) = h.scheduler._running
    h.scheduler._preempt(seq, StepBuilder(h.scheduler.limits))
    taken = h.pool.allocate(1, Owner.ADAPTER)
    assert h.launch() is None, "two blocks are free"
    h.settle()
    h.pool.release(taken)
    h.run()
    assert h.tokens("r") == h.alone(list(range(8)), None, 2)


def test_an_id_may_be_used_again_while_a_row_of_its_last_life_is_under_way(make):
    first = make().alone([1, 2, 3], None, 2)
    h = make(lookahead=True, eos=frozenset({first[1]}))
    h.submit("r", [1, 2, 3], max_tokens=50)
    while not h.end("r"):
        h.step()
    assert h.flights, "a row of it is under way"
    h.deltas.clear()
    h.submit("r", [7, 8, 9], max_tokens=3)
    h.run()
    assert h.tokens("r") == h.alone([7, 8, 9], None, 3)
