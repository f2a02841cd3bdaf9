"""How alike two texts are, by their vectors.

Goes in: fp32 vectors that an engine made.  Comes out: numbers, larger for what is more alike.
Knows no texts.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def cosine(one: Floats, two: Floats) -> float:
    """one, two (width,) -> -1 to 1; 0 where one has no length."""
    a, b = one.astype(np.float64), two.astype(np.float64)
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0


def dot(one: Floats, two: Floats) -> float:
    """one, two (width,) -> their product."""
    return float(one.astype(np.float64) @ two.astype(np.float64))


def euclidean(one: Floats, two: Floats) -> float:
    """one, two (width,) -> their distance, negated."""
    return -float(np.linalg.norm(one.astype(np.float64) - two))


def manhattan(one: Floats, two: Floats) -> float:
    """one, two (width,) -> the sum of their differences, negated."""
    return -float(np.abs(one.astype(np.float64) - two).sum())


def maxsim(one: Floats, two: Floats) -> float:
    """one (tokens, width), two (other tokens, width) -> for each token of `one` the largest product
    with a token of `two`, summed."""
    return float((one @ two.T).max(axis=1).sum())


#: What models call theirs.
BY_NAME: dict[str, Callable[[Floats, Floats], float]] = {
    "cosine": cosine,
    "dot": dot,
    "dot_score": dot,
    "euclidean": euclidean,
    "manhattan": manhattan,
}
