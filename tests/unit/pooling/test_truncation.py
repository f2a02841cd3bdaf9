"""Inputs that are too long: refused, or cut as tokenizers cut them."""

import pytest

from engine.errors import RequestInvalid
from engine.pooling.truncation import PairCut, Truncation, pair_lengths


def test_up_to_the_length_nothing_is_cut() -> None:
    fits = Truncation(4)
    assert fits.fit([1, 2, 3, 4]) == [1, 2, 3, 4] and fits.fit([1]) == [1]


def test_an_input_that_is_too_long_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestInvalid, match=r"5 tokens.* 4"):
        Truncation(4).fit([1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("keeps", "left"), [(0, [1, 2, 3, 4]), (1, [1, 2, 3, 9]), (2, [1, 2, 8, 9]), (7, [6, 7, 8, 9])]
)
def test_what_is_cut_stands_ahead_of_the_last_tokens(keeps: int, left: list[int]) -> None:
    cut = Truncation(4, cuts=True, keeps=keeps)
    assert cut.fit([1, 2, 3, 4, 5, 6, 7, 8, 9]) == left
    assert cut.fit_types([1, 2, 3, 4, 5, 6, 7, 8, 9]) == left and cut.fit_types([1]) == [1]


def test_pairs_are_cut_as_the_tokenizers_library_cuts_them() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for room in (1, 2, 5, 8, 9):
        tokenizer.enable_truncation(room, strategy="longest_first")
        for first in range(1, 8):
            for second in range(1, 8):
                theirs = tokenizer.encode("a " * first, "b " * second).ids
                expected = theirs.count(0), theirs.count(1)
                assert pair_lengths(first, second, room, "longest_first") == expected


@pytest.mark.parametrize(("how", "left"), [("only_first", (2, 4)), ("only_second", (5, 1))])
def test_one_text_alone_may_be_cut(how: PairCut, left: tuple[int, int]) -> None:
    assert pair_lengths(5, 4, 6, how) == left
    assert pair_lengths(5, 4, 9, how) == (5, 4)


def test_a_text_that_is_all_cut_away_and_still_does_not_fit_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="the text that may be cut has 4"):
        pair_lengths(9, 4, 6, "only_second")
