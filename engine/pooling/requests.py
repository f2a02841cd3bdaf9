"""What is asked of a pooling core, and what it answers.  Every request has one result.

Plain data, and its way into a frame and out of it.  Torch-free.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.pooling_messages import (
    MAX_VALUE_BYTES,
    AbortPool,
    Pooled,
    PoolingTask,
    PoolRequest,
)

__all__ = ["AbortPool", "Floats", "PoolRequest", "PoolResult", "PoolingTask", "packed", "unpacked"]

Floats = NDArray[np.float32]
_WIRE = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class PoolResult:
    """`values` (width,), (tokens, width) or (labels,); with an error there are none."""

    request_id: str
    num_tokens: int = 0  # of the input, as far as it is looked at
    num_cut: int = 0  # that were not
    num_cached: int = 0  # of `num_tokens`, those whose keys and values were found
    values: Floats | None = None
    logits: Floats | None = None  # (labels,) of a classifier: sort by these
    code: str = ""
    message: str = ""


def packed(result: PoolResult) -> Pooled:
    """As it travels.  One that no frame can hold becomes an error."""
    values = result.values
    if values is not None and values.nbytes > MAX_VALUE_BYTES:
        return Pooled(
            request_id=result.request_id,
            code="invalid_value",
            message=f"the result has {values.nbytes} bytes, more than {MAX_VALUE_BYTES}",
        )
    return Pooled(
        request_id=result.request_id,
        num_tokens=result.num_tokens,
        num_cut=result.num_cut,
        num_cached=result.num_cached,
        shape=() if values is None else values.shape,
        values=b"" if values is None else _bytes(values),
        logits=None if result.logits is None else _bytes(result.logits),
        code=result.code,
        message=result.message,
    )


def unpacked(pooled: Pooled) -> PoolResult:
    """As it was.  The arrays lie over the message's own bytes: nobody may write to them."""
    logits = pooled.logits
    return PoolResult(
        request_id=pooled.request_id,
        num_tokens=pooled.num_tokens,
        num_cut=pooled.num_cut,
        num_cached=pooled.num_cached,
        values=None if pooled.code else np.frombuffer(pooled.values, _WIRE).reshape(pooled.shape),
        logits=None if logits is None else np.frombuffer(logits, _WIRE),
        code=pooled.code,
        message=pooled.message,
    )


def _bytes(values: Floats) -> bytes:
    return values.astype(_WIRE, copy=False).tobytes()
