"""What the daemon and an engine that pools say to each other besides `messages`, of which this is a
part.

Goes in: token ids, revisions.  Comes out: vectors and scores as raw bytes, little-endian fp32, so
that a batch of them is copied and not spelled.  Torch-free, numpy-free.
"""

from typing import Literal

from msgspec import Struct

#: One vector, one for each token, or class scores.
PoolingTask = Literal["embed", "tokens", "classify"]

#: What a Submit is told by an engine that only pools.
NO_GENERATION = "this engine makes vectors and scores, and generates nothing"
#: A frame holds no more bytes of values, unless they are one result's.
FRAME_VALUE_BYTES = 8 << 20
#: No single result is larger: it has to fit into one frame.
MAX_VALUE_BYTES = 128 << 20


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
    unseen: int = 0  # of an encoder's: tokens at the end that see the others, and that none sees
    priority: int = 50
    deadline_seconds: float | None = None  # from receipt
    # Where a model generates too, as of a `Submit`:
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0


class AbortPool(Struct, frozen=True, tag="abort_pool"):
    """Forget a request; it has no result.  Unknown ids are ignored."""

    request_id: str


class GiveWay(Struct, frozen=True, tag="give_way"):
    """From now on take no more than `share` of the device's time, above 0; 1: all that there is.
    It has no answer.  Of an engine that computes inputs whole; others ignore it."""

    share: float


class Pooled(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The one result of a PoolRequest; with a `code` there are no values."""

    request_id: str
    num_tokens: int = 0  # of the input, as far as it is looked at
    num_cut: int = 0  # that were not
    num_cached: int = 0  # of `num_tokens`, those whose keys and values were found
    shape: tuple[int, ...] = ()  # (width,), (tokens, width) or (labels,)
    values: bytes = b""
    logits: bytes | None = None  # (labels,) of a classifier
    code: str = ""
    message: str = ""


class PoolingInfo(Struct, frozen=True, kw_only=True):
    """What the engine became after `auto` was resolved, and how it pools.  Bytes of the device."""

    device: str
    dtype: str
    layout: str  # of packed adapters
    base: str  # `BaseFiles.id`
    block_bytes: int
    max_length: int
    max_batch_tokens: int
    width: int  # numbers of a whole vector
    kinds: tuple[str, ...]  # () = each token has a vector of its own, and a text has none
    pooling_origin: str
    normalizes: bool
    num_labels: int  # 0 = the base scores nothing by itself
    labels: tuple[str, ...]
    weight_bytes: int
    adapter_bytes: int
    kv_bytes: int = 0  # of a decoder's step: nothing is kept between steps
    graph_bytes: int = 0  # of an encoder's graphs, at the most
    #: Of a base that scores by words: the one that speaks for a text, and the one against it.
    score_tokens: tuple[int, ...] = ()
