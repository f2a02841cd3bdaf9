"""Draws: which rows of a step are drawn for, whose they are, and the drafts that they stand on.

Goes in: chunks, and where each ends.  Comes out: rows in the order of the chunks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.messages import SamplingParams
from engine.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that are drawn for, whose they are, and the drafts that they stand on."""

    rows: list[int]
    seqs: tuple[Sequence, ...]
    ahead: Mapping[int, tuple[int, ...]]


NO_DRAWS = Draws([], (), {})


def nobodys(draws: int) -> Draws:
    """So many, of a sequence that nobody asked for."""
    seq = Sequence("", [0], 1, SamplingParams(), None, "", "", 0, 0)
    return Draws([], (seq,) * draws, {})


def draws_of(chunks: tuple[Chunk, ...], ends: list[int]) -> Draws:
    """The last row of each chunk that samples; with drafts the last ones."""
    if not any(chunk.drafts for chunk in chunks):
        sampled = [i for i, c in enumerate(chunks) if c.samples]
        return Draws([ends[i] - 1 for i in sampled], tuple(chunks[i].seq for i in sampled), {})
    rows: list[int] = []
    seqs: list[Sequence] = []
    ahead: dict[int, tuple[int, ...]] = {}
    for chunk, end in zip(chunks, ends, strict=True):
        for count in range(chunk.draws):
            if count:
                ahead[len(rows)] = chunk.drafts[:count]
            rows.append(end - chunk.draws + count)
            seqs.append(chunk.seq)
    return Draws(rows, tuple(seqs), ahead)
