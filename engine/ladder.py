"""Sizes that steps are padded to on a card, so that few CUDA graphs serve all of them.

Goes in: how many rows and sequences a step has.  Comes out: the rung that holds it, or none.
Decode-only steps (one row a sequence) and mixed ones have ladders of their own, and so have an
encoder's.  Knows no sequences and no device.
"""

from typing import NamedTuple

#: Rows of decode-only steps.  96, as there are products of so many rows: on an H200 an 8B's step of
#: 96 sequences takes 6.69 ms, and 6.88 as one of 128; on 64 adapters 8.84 and 9.14.
DECODE = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
#: Rows of mixed steps.  Below 64 a step of a large model takes the time of reading its weights,
#: padded or not: on an H200 32 rows of an 8B take 4.37 ms and 64 take 4.39.  80 is for those who
#: decode 64 rows while a short prompt comes, or the rest of a cached one: with 16 rows of another
#: adapter such a step takes 6.51 ms, and 6.93 as one of 128 rows; with 24 rows it takes 6.69 ms as
#: one of 96, and 6.95.  Above, a third of a step's rows are padding at most.
MIXED = (64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
#: Sequences of mixed steps, where there may be twice as many, and half as many again in so many
#: rows: attention launches a few programs for each, used or not.
SEQS = (64, 256)
#: Rows of an encoder's steps, and how many inputs they may be.  Attention launches programs for
#: each input as if it had all rows: 512 for 8 inputs in 512 rows with 16 heads, and eight times as
#: many for 64, which all do nothing but a few.
ENCODER = (64, 128, 256, 384, 512, 768, 1024)
INPUTS = (8, 64, 256)
#: Graphs that may be captured after the start; memory plans count them.
LATE_GRAPHS = 32


class Rung(NamedTuple):
    """Sizes of a padded step.  As many sequences as rows: one row each; else fewer."""

    rows: int
    seqs: int

    @property
    def single(self) -> bool:
        """Decode only: row i is sequence i's."""
        return self.rows == self.seqs


class Ladder:
    """Rungs of decode-only steps of up to `max_seqs` rows and of mixed ones of up to `mixed_rows`.

    `max_draws`: rows that one step draws for; 0 = one a sequence.  `often`: rows that mixed steps
    are filled up to, which get a rung of their own.  A mixed step has a sequence of two rows, and
    so at most `rows - 1` sequences.
    """

    def __init__(
        self, *, max_seqs: int, mixed_rows: int, often: int = 0, max_draws: int = 0
    ) -> None:
        self.decode = tuple(Rung(rows, rows) for rows in _up_to(max_seqs, DECODE))
        #: Sampled rows of a step, padded.
        self.draws = _up_to(max(max_seqs, max_draws), DECODE)
        heights = _up_to(mixed_rows, (*MIXED, often) if often > 1 else MIXED)
        widths = (*(seqs for seqs in SEQS if 2 * seqs <= max_seqs), max_seqs)
        pairs = {
            Rung(rows, min(seqs, rows - 1))
            for rows in heights
            for seqs in widths
            if rows > 1 and (seqs == max_seqs or rows <= seqs or 3 * seqs <= 2 * (rows - 1))
        }
        self.mixed = tuple(sorted(pairs))

    @property
    def all(self) -> tuple[Rung, ...]:
        """Every rung, the most rows first."""
        return tuple(sorted((*self.decode, *self.mixed), reverse=True))

    def find(self, rows: int, seqs: int) -> Rung | None:
        """The least rung for a step of `rows` rows of `seqs` sequences; None: it is too large."""
        for rung in self.decode if rows == seqs else self.mixed:
            if rung.rows >= rows and rung.seqs >= seqs:
                return rung
        return None

    def samples(self, count: int) -> int:
        """What `count` sampled rows are padded to, so that one product serves several counts."""
        return next(rows for rows in self.draws if rows >= count)


class InputLadder:
    """Rungs of steps of whole inputs side by side: up to `rows` rows, 2 at least, of `seqs` inputs,
    or of INPUTS at the most.

    No rung has as many inputs as rows: that is a decode-only step's mark.
    """

    def __init__(self, *, rows: int, seqs: int) -> None:
        pairs = {
            Rung(height, min(width, height - 1))
            for height in _up_to(rows, ENCODER)
            for width in _up_to(min(seqs, INPUTS[-1]), INPUTS)
        }
        #: The fewest rows first.
        self.all = tuple(sorted(pairs))

    def find(self, rows: int, seqs: int) -> Rung | None:
        """The least rung for a step of `rows` rows of `seqs` inputs; None: it is too large."""
        fitting = (rung for rung in self.all if rung.rows >= rows and rung.seqs >= seqs)
        return next(fitting, None)


def _up_to(most: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    """The steps below `most`, and `most` itself."""
    return (*(step for step in steps if step < most), most)
