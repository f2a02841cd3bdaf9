"""What the model that is served can do with texts besides generating: `Facts`, or None.

Goes in: the base's folder and tokenizer, what the engine says of itself, the registry's revisions.
Comes out: `Facts` for `PoolingService`, read once the engine has said that it pools.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from engine.messages import EngineInfo
from engine.pooling.config import PoolingInfo
from engine.pooling.files import read_pooling
from engine.pooling.spec import PoolingSpec
from lorad.errors import LoradError
from lorad.registry.records import RevisionRecord
from lorad.service.pooling import Facts
from lorad.service.text import RevisionText
from lorad.text.pair_prompt import PairPrompt
from lorad.text.pooling import PoolingText
from lorad.text.tokenizer import TextError, Tokenizer

#: A head of an adapter's own: its rows are its classes.
HEAD = "score.weight.rows"
#: Revisions whose classes are kept in mind.
CACHED = 1024


class PoolingFacts:
    """Call it for the facts.  `base` has the files of sentence-transformers; `num_types` are token
    types of the model; `truncate` is what requests get that say nothing of it, `asks` what pairs
    are put into."""

    def __init__(
        self,
        base: Path,
        tokenizer: Tokenizer,
        info: Callable[[], EngineInfo | None],
        revision: Callable[[str], RevisionRecord | None],
        *,
        tasks: tuple[str, ...],
        num_types: int,
        truncate: bool,
        asks: PairPrompt | None = None,
        texts: Callable[[str], RevisionText] | None = None,
    ) -> None:
        """`texts`: of a model that generates too, whose adapters may have tokenizers."""
        self._base, self._tokenizer, self._info = base, tokenizer, info
        self._tasks, self._num_types, self._truncate = tasks, num_types, truncate
        self._asks = asks
        self._text: PoolingText | None = None
        self._labels_of = lru_cache(CACHED)(lambda rev: labels_of(revision(rev)))
        self._texts = texts

    def __call__(self) -> Facts | None:
        """None while no engine runs, and of a model that only generates."""
        info = self._info()
        if info is None or info.pooling is None:
            return None
        if self._text is None:
            spec = read_pooling(self._base)  # the engine has read it
            self._text = self._by(self._tokenizer, spec)
        text_of = None
        if self._texts is not None:
            text_of = partial(self._text_of, self._texts, self._text, info.pooling)
        return Facts(
            info.pooling, self._text, self._tasks, self._truncate, self._labels_of, text_of
        )

    def _by(self, tokenizer: Tokenizer, spec: PoolingSpec) -> PoolingText:
        return PoolingText(tokenizer, spec, num_types=self._num_types, asks=self._asks)

    def _text_of(
        self,
        texts: Callable[[str], RevisionText],
        base: PoolingText,
        info: PoolingInfo,
        rev: str,
    ) -> PoolingText:
        """By the adapter's own tokenizer, if it has one.  Scores by words are told by the ids of
        the base's, which must be the same words."""
        tokenizer = texts(rev).tokenizer
        if tokenizer is self._tokenizer:
            return base
        words = tokenizer.spell(info.score_tokens), self._tokenizer.spell(info.score_tokens)
        if words[0] != words[1]:
            raise _unreadable(f"scores are told by {words[1]}, which are {words[0]} in it")
        try:
            return self._by(tokenizer, base.spec)
        except TextError as error:
            raise _unreadable(str(error)) from error


def _unreadable(why: str) -> LoradError:
    return LoradError(
        "invalid_value",
        f"inputs cannot be read by the adapter's own tokenizer: {why}",
        param="model",
        hint="ask the base model, or add the adapter with the base's tokenizer",
    )


def labels_of(record: RevisionRecord | None) -> tuple[str, ...]:
    """The classes of a revision's own head, which nobody has named; () if it has none."""
    modules = record.modules if record is not None else ()
    count = next((m.rank for m in modules if m.module == HEAD), 0)
    return tuple(f"LABEL_{i}" for i in range(count))
