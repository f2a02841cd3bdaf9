"""PoolingSpec: how hidden states become a vector, or logits a score.  Plain data, torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: `last` and `cls` take one row, `max` the largest of each column.  `weighted_mean` weighs a row by
#: its place, counted from 1; `mean_sqrt_length` divides the sum by the root of the number of rows.
PoolingKind = Literal["cls", "last", "mean", "mean_sqrt_length", "weighted_mean", "max"]
#: What logits become: `softmax` over the classes of one text.
ScoreRule = Literal["sigmoid", "softmax", "identity"]


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear map of the vector; `folder` holds its weights, relative to the model's."""

    folder: str
    d_in: int
    d_out: int
    bias: bool
    activation: Literal["tanh", "identity", "gelu", "relu", "sigmoid"]
    among: bool = False  # they lie among the model's own weights


@dataclass(frozen=True, slots=True)
class LateSpec:
    """How a model of late interaction reads a query and a document, of which it gives a vector for
    each token.  Lengths are in tokens, special ones and the mark among them."""

    query_mark: str  # a token of the vocabulary, behind the first one; "" = none
    document_mark: str
    query_length: int
    document_length: int
    expands: bool  # a query is filled up to its length with the vocabulary's mask token
    sees_expansion: (
        bool  # and all its tokens see those; else they see the others, and none sees them
    )
    skipped: tuple[str, ...]  # words whose token has no vector in a document
    skips_read: bool = False  # that token is the first that the word is read as, and not its entry


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """What a model's files say about its vectors.  Several `kinds` are put side by side."""

    kinds: tuple[PoolingKind, ...] = ("mean",)
    include_prompt: bool = True  # a prompt's tokens are pooled too
    #: Behind pooling, in order; of late interaction behind each token.
    steps: tuple[DenseSpec | Literal["normalize"], ...] = ()
    origin: str = ""  # where this was said, for who asks
    folder: str = ""  # where the model itself lies, relative to the folder that was given
    max_length: int | None = None  # tokens, special ones among them
    lower_case: bool = False  # texts are lowered before the tokenizer sees them
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name
    default_prompt: str | None = None  # a name
    similarity: str = "cosine"
    dimensions: tuple[int, ...] = ()  # those that it was trained to be cut to; () = not said
    score: ScoreRule | None = None  # of a classifier, where it is said
    #: Of a base that scores by the logits of words: the one for a text, and if any the one against.
    score_tokens: tuple[int, ...] = ()
    late: LateSpec | None = None  # nothing is pooled: `kinds` is ()

    @property
    def normalizes(self) -> bool:
        """Whether vectors come out with length 1."""
        return self.steps[-1:] == ("normalize",)

    def width(self, hidden_size: int) -> int:
        """Numbers of a vector."""
        dense = [step.d_out for step in self.steps if isinstance(step, DenseSpec)]
        return dense[-1] if dense else len(self.kinds) * hidden_size

    def score_rule(self, num_labels: int) -> ScoreRule:
        """What becomes of `num_labels` logits: as it is said, else a single one is squashed, and of
        several the share of each is told."""
        return self.score or ("sigmoid" if num_labels == 1 else "softmax")
