"""NgramIndex: what came after these words the last time, within one sequence.

Goes in: the tokens of a sequence, again and again as they grow.  Comes out: tokens that may follow,
copied from behind the longest earlier place that ends as the sequence does now.  The work is
bounded whatever the length: places are found by a hash of three tokens and followed from the newest
back, as zlib does it, and a long prompt is learned a part at a time.  Costs 128 KiB, and 4 bytes a
token.
Knows no model, and nothing of what becomes of its guesses.
"""

from array import array

#: Tokens that an earlier place has to share at the least.  Two are shared by chance all the time.
GRAM = 3
#: Earlier places that are looked at, the newest first; and tokens of each that are compared.
TRIES, LONGEST = 8, 16
#: Heads of the chains of places with one hash.
HEADS = 1 << 15
_MASK = HEADS - 1


class NgramIndex:
    """Of one sequence.  Every call gets its tokens: a list that only grows at its end."""

    __slots__ = ("_before", "_heads")

    def __init__(self) -> None:
        self._heads = array("i", [-1]) * HEADS  # hash -> the newest place where such a gram ends
        #: Of place GRAM - 1 + i: the place before it with the same hash, -1 = none.
        self._before = array("i")

    def learn(self, tokens: list[int], most: int) -> int:
        """File up to `most` further places; how many those were.

        The last token's is not filed before something stands behind it.
        """
        heads, before = self._heads, self._before
        first = GRAM - 1 + len(before)
        stop = min(first + most, len(tokens) - 1)
        for place in range(first, stop):
            key = _hash(tokens[place - 2], tokens[place - 1], tokens[place])
            before.append(heads[key])
            heads[key] = place
        return max(stop - first, 0)

    def guess(self, tokens: list[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow; () if the end of `tokens` stands nowhere else.

        A copy that reaches the end goes on with itself: what repeats is guessed at any length.
        """
        place = self._find(tokens) if len(tokens) > GRAM else -1
        if place < 0 or most < 1:
            return ()
        guessed = tokens[place + 1 : place + 1 + most]
        period = len(tokens) - 1 - place
        while len(guessed) < most:
            guessed.append(guessed[-period])
        return tuple(guessed)

    def _find(self, tokens: list[int]) -> int:
        """Where the longest match ends, the newest of equals; -1: nowhere."""
        end = len(tokens) - 1
        place = self._heads[_hash(tokens[end - 2], tokens[end - 1], tokens[end])]
        best, longest = -1, GRAM - 1
        for _ in range(TRIES):
            if place < 0:
                break
            length, room = 0, min(place + 1, LONGEST)
            while length < room and tokens[place - length] == tokens[end - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == LONGEST:
                    break  # none is better, and those to come are older
            place = self._before[place - GRAM + 1]
        return best


def _hash(first: int, second: int, third: int) -> int:
    return (first * 7919 + second * 104729 + third * 15485863) & _MASK
