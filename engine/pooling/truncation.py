"""What happens to inputs that are too long.  Torch-free.

Goes in: token ids.  Comes out: fewer of them, or RequestInvalid.  Knows no text: which tokens stand
at the end whatever is cut is a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.errors import RequestInvalid, TooLong

#: `longest_first` takes from the longer text until both are of a length, then from both.
PairCut = Literal["longest_first", "only_first", "only_second"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """At most `length` tokens.  Longer inputs are refused, or with `cuts` lose tokens ahead of the
    last `keeps`, which are the tokenizer's own, such as [SEP]."""

    length: int
    cuts: bool = False
    keeps: int = 1

    def fit(self, tokens: Sequence[int]) -> list[int]:
        """`tokens`, cut if need be.  Raises TooLong."""
        return self._cut(tokens) if self._is_long(len(tokens)) else list(tokens)

    def fit_types(self, types: Sequence[int]) -> list[int]:
        """The types of the tokens that `fit` leaves."""
        return self._cut(types) if len(types) > self.length else list(types)

    def _is_long(self, count: int) -> bool:
        if count > self.length and not self.cuts:
            raise TooLong(
                f"the input has {count} tokens, the model takes {self.length}",
                hint="shorten it, or ask for it to be truncated",
            )
        return count > self.length

    def _cut(self, values: Sequence[int]) -> list[int]:
        kept = min(self.keeps, self.length)
        return [*values[: self.length - kept], *values[len(values) - kept :]]


def pair_lengths(first: int, second: int, room: int, how: PairCut) -> tuple[int, int]:
    """How many tokens of each of two texts stay where `room` is left for both.

    Raises RequestInvalid where the one that may be cut is not long enough for it.
    """
    excess = first + second - room
    if excess <= 0:
        return first, second
    if how == "longest_first":
        shorter = min(first, second, room // 2)
        if first <= second:
            return shorter, room - shorter
        return room - shorter, shorter
    cut = first if how == "only_first" else second
    if cut < excess:
        raise RequestInvalid(
            f"the pair has {excess} tokens too many, the text that may be cut has {cut}",
            hint="shorten the other text",
        )
    return (first - excess, second) if how == "only_first" else (first, second - excess)
