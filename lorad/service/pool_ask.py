"""What one request for vectors or scores wants, after parsing, and what it gets.

Goes in: nothing.  Comes out: the frozen values that the API hands to `pooling.PoolingService`, and
gets back.  Knows no HTTP and no JSON.
"""

from dataclasses import dataclass
from typing import Literal

from engine.pooling.requests import PoolingTask, PoolResult
from engine.pooling.truncation import PairCut
from lorad.service.text_threads import num_characters
from lorad.text.pooling import Role

Endpoint = Literal["embeddings", "rerank", "score", "classify", "pooling"]
ENDPOINTS: tuple[Endpoint, ...] = ("embeddings", "rerank", "score", "classify", "pooling")
#: How two texts are held against each other: by a head that reads both, by their vectors, or by
#: the vectors of all their tokens.
Scoring = Literal["head", "vectors", "maxsim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What may be cut of inputs that are too long; None is as the model is configured.

    `length`: tokens of an input, if that is less than the model's; `second`: of a pair's second
    text.
    """

    truncate: bool | None = None
    length: int | None = None
    pair: PairCut = "longest_first"
    second: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What every such request says.  `timeout`: seconds that its client allows."""

    model: str
    endpoint: Endpoint
    cut: Cut = Cut()
    priority: int | None = None  # None = the adapter's; more than that is not to be had
    timeout: float | None = None
    traceparent: str = ""  # of whose trace the request is a part, as its client says
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Input:
    """A text, token ids, or with `second` a pair of texts; `param` names it in errors."""

    text: str | tuple[int, ...]
    second: str | None = None
    param: str = "input"
    role: Role | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAsk:
    """One result for each of `inputs`."""

    wish: Wish
    task: PoolingTask
    inputs: tuple[Input, ...]
    dimensions: int | None = None
    normalize: bool | None = None  # None = as the model does it
    prompt_name: str | None = None
    instruction: str = ""
    #: So many of the first inputs' vectors are held until the end; None: those of all.
    num_kept: int | None = None

    @property
    def num_characters(self) -> int:
        """Of what becomes ids."""
        return num_characters([(each.text, each.second) for each in self.inputs])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAsk:
    """One score for each of `seconds`, against the one of `firsts` or its own.

    `params` name the two in errors.  `ranks`: the firsts are queries and the seconds documents, for
    models that read those differently.
    """

    wish: Wish
    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    params: tuple[str, str]
    ranks: bool = False
    scoring: Scoring | None = None  # None = as fits the model
    raw: bool = False  # of a head: logits, as they are before they become scores
    instruction: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """`results` in the order of the inputs.  `name` and `rev` None: the base model."""

    results: tuple[PoolResult, ...]
    name: str | None
    rev: str | None
    labels: tuple[str, ...] = ()  # of a classifier, where they are known

    @property
    def num_tokens(self) -> int:
        """That were computed."""
        return sum(result.num_tokens for result in self.results)


@dataclass(frozen=True, slots=True)
class Scored:
    """`scores` in the order of the seconds; `order` has the best first, by what scores are made of,
    and of equals the earlier one."""

    scores: tuple[float, ...]
    order: tuple[int, ...]
    how: Scoring
    answered: Answered
