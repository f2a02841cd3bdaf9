"""HeadSpec: from hidden states to class logits, whatever family they are of.  Torch-free.

Goes in: a classifier's config.  Comes out: what a head is made of, and what its classes are called.
Knows no weights.
"""

from dataclasses import dataclass
from typing import Literal

from engine.models.hf_config import Fields

#: What the classes of transformers' classifiers end with.
CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Pool, dense, activation, norm, score; a decoder's has only the first and the last of them."""

    pools: Literal["cls", "mean", "last"]
    activation: Literal["tanh", "gelu"] = "tanh"
    dense: bool = True
    dense_bias: bool = True
    norm: bool = False
    norm_bias: bool = False
    score_bias: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        """What a whole head has, by the engine's names."""
        dense = ("head.dense.weight", *(("head.dense.bias",) if self.dense_bias else ()))
        norm = ("head.norm.weight", *(("head.norm.bias",) if self.norm_bias else ()))
        return (
            *(dense if self.dense else ()),
            *(norm if self.norm else ()),
            *self.scores,
        )

    @property
    def scores(self) -> tuple[str, ...]:
        """Of the parts those that have a row a class."""
        return ("score.weight", *(("score.bias",) if self.score_bias else ()))


#: Of every decoder family: a matrix over the last row.
DECODER_HEAD = HeadSpec("last", dense=False, score_bias=False)


def read_labels(config: Fields) -> tuple[str, ...]:
    """Class names in order.  Often id2label alone says how many there are."""
    named = config.take("id2label", None)
    if isinstance(named, dict) and named:
        if set(named) != {str(number) for number in range(len(named))}:
            raise config.refusal("id2label", "expected names for 0 and on")
        return tuple(str(named[str(number)]) for number in range(len(named)))
    return tuple(f"LABEL_{number}" for number in range(config.integer("num_labels", 2)))
