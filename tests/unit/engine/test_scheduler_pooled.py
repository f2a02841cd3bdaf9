"""Inputs that are pooled among sequences that generate: who has which rows, and when."""

import pytest


def many(h, count: int, length: int = 12, **more) -> list[str]:
    names = [f"p{n}" for n in range(count)]
    for n, name in enumerate(names):
        h.pool_input(name, [n + 100] * length, **more)
    return names


def test_a_chat_that_comes_behind_many_inputs_begins_at_once(make):
    h = make(max_num_seqs=4, max_batch_tokens=16)
    names = many(h, 40)
    h.step()
    h.submit("chat", [1, 2, 3, 4], max_tokens=2)
    h.step(4)
    assert h.end("chat") and sum(h.end(name) is not None for name in names) < 8
    h.run()
    assert h.tokens("chat") == h.alone([1, 2, 3, 4], None, 2)
    assert all(
        h.pooled[name] == h.alone([n + 100] * 12, None, 1)[0] for n, name in enumerate(names)
    )


def test_who_always_chats_does_not_keep_an_input_waiting_for_ever(make):
    h = make(max_num_seqs=2, max_batch_tokens=16)
    chats = 0

    def chat() -> None:
        nonlocal chats
        h.submit(f"c{chats}", [chats, 2, 3, 4], max_tokens=4)
        chats += 1

    for _ in range(6):
        chat()
    h.pool_input("p", [9] * 10)
    steps = 0
    while h.end("p") is None:
        h.step()
        steps += 1
        while h.scheduler.num_waiting < 6:
            chat()
        assert steps < 200, "it starves"
    assert chats > 6


def test_rows_of_inputs_beside_a_stream_are_bounded_and_make_no_step_larger(make):
    h = make(max_batch_tokens=64, mixed_tokens=8, crowd_tokens=32, pooled_tokens=3)
    h.submit("chat", [1, 2], max_tokens=40)
    h.step(2)
    many(h, 6, length=30)
    for _ in range(10):
        work = h.step()
        rows = {chunk.seq.request_id: chunk.length for chunk in work.chunks}
        assert rows.pop("chat") == 1 and sum(rows.values()) == 3


@pytest.mark.parametrize("streams", [1, 4])
def test_half_as_many_rows_as_streams_where_nobody_says(make, streams):
    h = make(max_batch_tokens=64, mixed_tokens=32, pooled_tokens=0)
    for n in range(streams):
        h.submit(f"c{n}", [n, 2], max_tokens=20)
    h.step(2)
    many(h, 3)
    work = h.step()
    assert sum(chunk.length for chunk in work.chunks) == streams + max(streams // 2, 1)


def test_a_prompt_beside_inputs_keeps_its_half_of_the_step(make):
    h = make(max_batch_tokens=16, mixed_tokens=16)
    many(h, 4, length=40)
    h.step()
    h.submit("chat", [1] * 40, max_tokens=1)
    h.step()
    rows = {chunk.seq.request_id: chunk.length for chunk in h.step().chunks}
    assert rows["chat"] >= 8


def test_an_input_gives_way_before_a_stream_of_its_priority(make):
    h = make(num_blocks=8, block_size=4, kv_floor=0, max_batch_tokens=4, pooled_tokens=1)
    h.pool_input("p", list(range(20)))
    h.step()
    h.submit("chat", [1, 2], max_tokens=20)
    chat, gave_way = h.scheduler._live["chat"], h.scheduler._live["p"]
    h.run()
    assert (chat.stay, gave_way.stay) == (1, 2), "each leaves once, and one gave way before"
    assert h.tokens("chat") == h.alone([1, 2], None, 20)
    assert h.pooled["p"] == h.alone(list(range(20)), None, 1)[0]


def test_those_who_begin_alike_wait_for_the_first_of_them_alone(make):
    h = make(max_batch_tokens=64, max_num_seqs=8)
    for n in range(4):
        h.pool_input(f"a{n}", [7] * 16 + [n] * 3)
    h.pool_input("read whole", [7] * 16 + [9] * 3, reuses=False, tenant="another")
    work = h.step()
    assert {c.seq.request_id: c.length for c in work.chunks} == {"a0": 19, "read whole": 19}
    work = h.step()
    assert {c.seq.request_id: c.length for c in work.chunks} == {"a1": 3, "a2": 3, "a3": 3}
    h.run()
    assert h.prefix.reuse.total.hit == 3 * 16 and h.prefix.reuse.total.asked == 4 * 19


def test_one_that_waits_for_the_first_goes_on_where_that_is_taken_back(make):
    h = make(max_batch_tokens=8)
    h.pool_input("first", [7] * 16 + [1])
    h.step()
    h.pool_input("second", [7] * 16 + [2])
    assert {c.seq.request_id for c in h.step().chunks} == {"first"}
    h.scheduler.abort("first")
    h.run()
    assert h.pooled["second"] == h.alone([7] * 16 + [2], None, 1)[0] and "first" not in h.pooled


def test_inputs_that_begin_are_not_taken_for_the_speed_of_the_queue(make):
    h = make(max_num_seqs=2, max_batch_tokens=8)
    names = [f"c{n}" for n in range(400)]
    for n, name in enumerate(names):
        h.submit(name, [n, 1], max_tokens=3)
    inputs = many(h, 400, length=4)
    began = h.clock()
    h.step(350)
    ended = [sum(h.end(name) is not None for name in some) for some in (names, inputs)]
    assert min(ended) > 50
    assert h.scheduler.backlog.per_second < 1.2 * ended[0] / (h.clock() - began)


def test_of_two_that_were_served_alike_the_one_that_generates_is_next(make):
    h = make(max_num_seqs=1)
    h.pool_input("p", [1, 2, 3])
    h.submit("chat", [4, 5], max_tokens=1)
    assert [chunk.seq.request_id for chunk in h.step().chunks] == ["chat"]
    assert [chunk.seq.request_id for chunk in h.step().chunks] == ["p"]
