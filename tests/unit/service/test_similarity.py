"""How alike vectors are."""

import numpy as np
import pytest

from lorad.service import similarity

ONE, TWO = (np.array(v, np.float32) for v in ([3, 4], [4, 3]))


def test_cosine_is_of_any_lengths_and_zero_is_like_nothing():
    assert similarity.cosine(ONE, TWO) == pytest.approx(24 / 25)
    assert similarity.cosine(ONE, 7 * TWO) == pytest.approx(24 / 25)
    assert similarity.cosine(ONE, 0 * TWO) == 0.0


def test_the_others_are_larger_for_what_is_nearer():
    assert similarity.dot(ONE, TWO) == 24
    assert similarity.euclidean(ONE, TWO) == pytest.approx(-(2**0.5))
    assert similarity.manhattan(ONE, TWO) == -2
    for measure in (similarity.euclidean, similarity.manhattan):
        assert measure(ONE, ONE) == 0 > measure(ONE, TWO)


def test_maxsim_adds_the_best_of_each_of_the_first_texts_tokens():
    query = np.array([[1, 0], [0, 1]], np.float32)
    document = np.array([[0.5, 0], [0.25, 1], [0.75, 0]], np.float32)
    assert similarity.maxsim(query, document) == 0.75 + 1
    assert similarity.maxsim(document, query) == 0.5 + 1 + 0.75
