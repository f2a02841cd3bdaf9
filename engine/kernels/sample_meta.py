"""What the sampling ops are told of a draw: a record a row, entries, masks, in one run of words.

Plain data; `engine/sampling_plan.py` fills it, on the host.  All of it is int32 words, so that it
goes up in one copy: first `RECORD` words for each row, then what the records point at.  `Field`
says where a row's values lie; those marked fp32 are the float's bits.

An entry is a token whose logit is changed in one row: its id, how often the row's output holds it
(0 = its prompt alone, NEVER = neither, or nobody counts) and what is added in the end.  The entries
of all rows lie in three runs of `num_entries` words: ids, counts, biases (fp32).  No row has a
token twice.  A mask is ceil(vocab / 32) words, bit `i % 32` of word `i // 32` for token `i`.

Ids are those of the base's tokenizer, below `vocab`, as long as no row has a limit of its own.
Where some adapter's vocabulary is another, every row has its limit, and a row is `width` columns.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

#: Words of a row's record.
RECORD = 16
#: The count of an entry that no penalty concerns.
NEVER = -1
#: In place of a token: every one is banned, or the logits hold NaN or +inf.
NOTHING_LEFT, NOT_FINITE = -1, -2


class Kind(IntEnum):
    """How a row is drawn."""

    GREEDY = 0
    PLAIN = 1  # at a temperature, from everything
    FILTERED = 2  # from what top-k, top-p and min-p leave


class Field(IntEnum):
    """Places within a record."""

    KIND = 0
    KEY_LOW = 1  # of the row's noise
    KEY_HIGH = 2
    HEAT = 3  # fp32: 1 / temperature
    TOP_K = 4  # no limit: beyond any vocabulary
    TOP_P = 5  # fp32, above 0; from 1 on it is off
    FLOOR = 6  # fp32: how far below the best logit min-p begins; off = -inf
    ASKED = 7  # 1: its log-probabilities are told
    FIRST = 8  # its entries
    COUNT = 9
    REPETITION = 10  # fp32
    FREQUENCY = 11  # fp32
    PRESENCE = 12  # fp32
    MASK = 13  # where in the words its mask begins; 0 = everything is allowed
    LIMIT = 14  # its ids are below; read only where `least` is not 0


@dataclass(frozen=True, slots=True)
class SampleMeta:
    """One draw's words on the device, and what the host knows of them."""

    words: Tensor  # (n,) int32; none if every row is plainly greedy
    num_rows: int
    num_hot: int = 0  # rows that are not greedy
    num_filtered: int = 0
    num_masked: int = 0
    num_entries: int = 0
    most_entries: int = 0  # of one row
    num_asked: int = 0
    least: int = 0  # of the rows' limits, where some row has one of its own; 0 = none has

    @property
    def entries_at(self) -> int:
        """Where the entries begin in the words."""
        return self.num_rows * RECORD

    @property
    def changes(self) -> bool:
        """Whether any logit is changed before the draw."""
        return bool(self.num_entries or self.num_masked)

    def ints(self, field: Field) -> Tensor:
        """(rows,) int32: one field of every record."""
        return self.words[: self.entries_at].view(-1, RECORD)[:, field]

    def floats(self, field: Field) -> Tensor:
        """(rows,) fp32: the same of a field that holds a float."""
        return self.words[: self.entries_at].view(torch.float32).view(-1, RECORD)[:, field]

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, counts (int32) and biases (fp32), (num_entries,) each."""
        size = self.num_entries
        ids, counts, biases = self.words[self.entries_at :][: 3 * size].view(3, size)
        return ids, counts, biases.view(torch.float32)
