"""Scheduler: activated LoRAs.  Base rows before the last invocation, the adapter's from it on."""

import pytest

from engine.admission import last_place

CALL = (7, 8)
LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]


@pytest.fixture
def h(make):
    """Two aLoRAs of the same tokens, and a plain adapter."""
    harness = make()
    for rev in ("one", "two"):
        harness.add(rev, alora_tokens=CALL)
    harness.add("plain")
    return harness


def ask(h, request, prompt, rev=None, **options) -> int:
    """Cached tokens; the answer is that of the request alone."""
    h.submit(request, prompt, rev, **options)
    h.run()
    assert h.end(request).finish_reason == "length", h.end(request)
    assert h.tokens(request) == h.alone(prompt, rev, len(h.tokens(request)))
    return h.deltas[request][0].cached_tokens


@pytest.mark.parametrize(
    ("tokens", "wanted", "place"),
    [
        ([7, 8], (7, 8), 0),
        ([7, 8, 7, 8], (7, 8), 2),
        ([7, 8, 7], (7, 8), 0),
        ([7, 7, 7], (7, 7), 1),
        ([8, 7], (7, 8), -1),
        ([7], (7, 8), -1),
        ([1, 7, 8, 9], (7, 8), 1),
    ],
)
def test_the_last_whole_occurrence_is_found(tokens, wanted, place):
    assert last_place(tokens, wanted) == place


@pytest.mark.parametrize("length", range(17))
def test_rows_before_the_invocation_are_the_bases_and_rows_from_it_on_the_adapters(h, length):
    prompt = [*LONG[:length], *CALL, *LONG[:3]]
    ask(h, "it", prompt, "one")
    assert h.tokens("it") != h.alone(prompt, "plain", 4)


@pytest.mark.parametrize("chunk", range(1, 9))
def test_a_prompt_may_be_cut_anywhere_around_its_invocation(make, chunk):
    h = make(max_batch_tokens=chunk)
    h.add("one", alora_tokens=CALL)
    ask(h, "it", [*LONG[:6], *CALL, *LONG[:4]], "one")


def test_the_last_invocation_counts_wherever_it_is(h):
    for n, prompt in enumerate(([*CALL, *LONG, *CALL, 5], [*CALL, *LONG], [*LONG, *CALL], [*CALL])):
        ask(h, f"r{n}", prompt, "one")


def test_what_comes_before_is_shared_with_the_base_and_with_other_aloras(h):
    prompt = [*LONG[:12], *CALL, *LONG]  # three base blocks of four
    assert ask(h, "cold", prompt, "one") == 0
    assert ask(h, "base", [*LONG[:12], 1]) == 12
    assert ask(h, "two", prompt, "two") == 12
    assert ask(h, "again", prompt, "one") == 28
    assert ask(h, "plain", prompt, "plain") == 0
    assert h.prefix.reuse.of("one").hit == 28 and h.prefix.reuse.of("two").hit == 12


def test_a_base_prefix_serves_an_alora_up_to_its_invocation(h):
    prompt = [*LONG[:10], *CALL, *LONG]
    assert ask(h, "base", prompt) == 0
    assert ask(h, "one", prompt, "one") == 8
    assert ask(h, "base again", prompt) == 28


def test_another_place_of_activation_shares_no_block_behind_it(h):
    """The second prompt goes on to a later invocation, as a conversation does."""
    first = [*LONG[:8], *CALL, *LONG[:6]]
    ask(h, "first", first, "one")
    assert ask(h, "second", [*first, *CALL, 1, 2, 3], "one") == 8


def test_generated_tokens_that_equal_the_invocation_move_nothing(make):
    h = make()

    def says(token: int) -> list[int]:
        h.invocations["one"] = (token,)
        return h.alone([token, 5, 5], "one", 20)

    token = next(t for t in range(9973) if t in says(t)[:10])
    h.add("one", alora_tokens=(token,))
    assert ask(h, "it", [token, 5, 5], "one", max_tokens=20) == 0
    told = [token, 5, 5, *h.tokens("it")]
    assert ask(h, "sent back", told, "one") < len(told) - 5, "here it is a later invocation"


def test_an_activation_stays_through_preemption(make):
    h = make(num_blocks=12, kv_floor=0)
    h.add("one", alora_tokens=CALL)
    prompts = {f"r{n}": [n] * 9 + [*CALL, n] for n in range(3)}
    for name, prompt in prompts.items():
        h.submit(name, prompt, "one", max_tokens=12)
    h.run()
    assert h.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert h.tokens(name) == h.alone(prompt, "one", 12)


def test_a_prompt_without_the_invocation_is_refused(h):
    h.submit("it", LONG, "one")
    h.run()
    end = h.end("it")
    assert (end.finish_reason, end.code) == ("error", "invocation_missing")
    assert "[7, 8]" in end.message and "alora_fallback" in end.message
    assert not h.tokens("it")


def test_told_to_the_base_answers_a_prompt_without_the_invocation(h):
    assert ask(h, "base", LONG) == 0
    h.submit("it", LONG, "one", fallback="base")
    h.submit("called", [*LONG, *CALL], "one", fallback="base")
    h.run()
    assert h.tokens("it") == h.tokens("base")
    assert h.tokens("called") == h.alone([*LONG, *CALL], "one", 4)
    assert h.deltas["it"][0].cached_tokens == 16


def test_removing_one_drops_its_blocks_and_leaves_the_bases(h):
    prompt = [*LONG[:12], *CALL, *LONG]
    ask(h, "it", prompt, "one")
    h.remove("one")
    h.run()
    assert h.prefix.identities() == ["base"]
    assert ask(h, "base", prompt) == 12


def test_rows_before_the_activation_are_scheduled_among_the_bases(make):
    h = make(max_batch_tokens=12)
    h.add("plain")
    h.add("one", alora_tokens=CALL)
    h.resident("plain", "one")
    h.submit("it", [*LONG[:12], *LONG[:12], *CALL, 1], "one")
    h.step()
    h.submit("other", [1, 2], "plain")
    h.launch()
    assert [c.seq.request_id for c in h.work.chunks] == ["it", "other"]
    assert [c.inactive for c in h.work.chunks] == [h.work.chunks[0].length, 0]
