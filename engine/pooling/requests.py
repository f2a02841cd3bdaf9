"""What is asked of a pooling core, and what it answers.  Every request has one result.

Plain data.  Torch-free.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float32]
#: One vector, one for each token, or class scores.
PoolingTask = Literal["embed", "tokens", "classify"]


class PoolRequest(Struct, frozen=True, kw_only=True, tag="pool"):
    """Run one input on the base, or on `rev`.  Leases `rev` until its result."""

    request_id: str
    tokens: list[int]  # the tokenizer's special ones among them
    task: PoolingTask = "embed"
    types: list[int] | None = None  # one a token, where the model tells two texts apart so
    rev: str | None = None
    normalize: bool | None = None  # None: as the model does it
    dimensions: int | None = None  # numbers of the vector that are told
    prompt_tokens: int = 0  # of these tokens, the first; where the model leaves prompts out
    truncate: bool | None = None  # None: as configured
    keeps: int = 1  # tokens at the end that are never cut: the tokenizer's own
    priority: int = 50
    deadline_seconds: float | None = None  # from receipt


class AbortPool(Struct, frozen=True, tag="abort_pool"):
    """Forget a request; it has no result.  Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PoolResult:
    """`values` (width,), (tokens, width) or (labels,); with an error there are none."""

    request_id: str
    num_tokens: int = 0  # that were computed
    num_cut: int = 0  # that were not
    values: Floats | None = None
    logits: Floats | None = None  # (labels,) of a classifier: sort by these
    code: str = ""
    message: str = ""
