"""What is guessed from a sequence's own tokens, against looking at every place of it."""

import random

import pytest

from engine.ngram import GRAM, HEADS, LONGEST, TRIES, NgramIndex


def learned(tokens: list[int]) -> NgramIndex:
    index = NgramIndex()
    while index.learn(tokens, 7):
        pass
    return index


def by_looking(tokens: list[int], most: int) -> tuple[int, ...]:
    """The longest earlier match of the end, the newest of equals, copied on and on."""
    end, best, longest = len(tokens) - 1, -1, GRAM - 1
    for place in range(end - 1, -1, -1):
        shared = 0
        while shared <= place and tokens[place - shared] == tokens[end - shared]:
            shared += 1
        if min(shared, LONGEST) > longest:
            best, longest = place, shared
    if best < 0:
        return ()
    copied = list(tokens)
    for i in range(most):
        copied.append(copied[best + 1 + i])
    return tuple(copied[len(tokens) :])


def test_a_guess_continues_the_longest_match_the_newest_of_equals() -> None:
    draw, met = random.Random(0), 0
    for _ in range(3000):
        ids = draw.choice([2, 3, 5])
        tokens = [draw.randrange(ids) for _ in range(draw.randrange(TRIES + GRAM + 1))]
        most = draw.randrange(1, 9)
        right = by_looking(tokens, most)
        assert learned(tokens).guess(tokens, most) == right, tokens
        met += bool(right)
    assert met > 300


def test_what_repeats_is_guessed_at_any_length() -> None:
    tokens = [9, 8, *[1, 2, 3] * 3, 1]
    assert learned(tokens).guess(tokens, 8) == (2, 3, 1, 2, 3, 1, 2, 3)


@pytest.mark.parametrize("tokens", [[], [5], [5] * 2, [5] * 3, [1, 2, 3, 4, 2, 3]])
def test_nothing_is_guessed_where_three_tokens_are_not_shared(tokens) -> None:
    assert learned(tokens).guess(tokens, 4) == ()


def test_tokens_are_learned_a_part_at_a_time_and_each_once() -> None:
    tokens = list(range(100))
    index = NgramIndex()
    parts = [index.learn(tokens, 40) for _ in range(4)]
    assert parts == [40, 40, 100 - GRAM - 80, 0], "the last place has nothing behind it yet"
    tokens += range(100)  # the text comes back
    assert index.guess(tokens, 3) == (), "its end has not been learned"
    assert index.learn(tokens, 1000) == 100
    assert index.guess(tokens, 3) == (0, 1, 2)


def test_ids_of_one_hash_are_told_apart() -> None:
    first = [1, 2, 3, 77]
    other = [1 + HEADS, 2, 3]  # the same hash, and other ids
    tokens = [*first, *[50] * 2, *other]
    assert learned(tokens).guess(tokens, 1) == ()


def test_the_work_is_bounded_however_often_the_end_stands_in_the_text() -> None:
    class Counted(list):
        looked_at = 0

        def __getitem__(self, place):
            Counted.looked_at += 1
            return super().__getitem__(place)

    plain = [1, 2, 3, 4, 5] * 4000
    index = learned(plain)
    index.guess(Counted(plain), 4)
    assert Counted.looked_at <= 2 * TRIES * (LONGEST + 1) + 8
    assert index.learn(plain, 512) == 0
