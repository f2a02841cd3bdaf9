"""What the model that is served can do with texts besides generating: `Facts`, or None.

Goes in: the base's folder and tokenizer, what the engine says of itself, the registry's revisions.
Comes out: `Facts` for `PoolingService`, read once the engine has said that it pools.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from engine.messages import EngineInfo
from engine.pooling.files import read_pooling
from lorad.registry.records import RevisionRecord
from lorad.service.pooling import Facts
from lorad.text.pair_prompt import PairPrompt
from lorad.text.pooling import PoolingText
from lorad.text.tokenizer import Tokenizer

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
    ) -> None:
        self._base, self._tokenizer, self._info = base, tokenizer, info
        self._tasks, self._num_types, self._truncate = tasks, num_types, truncate
        self._asks = asks
        self._text: PoolingText | None = None
        self._labels_of = lru_cache(CACHED)(lambda rev: labels_of(revision(rev)))
        self._own_text = lru_cache(CACHED)(lambda rev: has_own_text(revision(rev)))

    def __call__(self) -> Facts | None:
        """None while no engine runs, and of a model that only generates."""
        info = self._info()
        if info is None or info.pooling is None:
            return None
        if self._text is None:
            spec = read_pooling(self._base)  # the engine has read it
            self._text = PoolingText(
                self._tokenizer, spec, num_types=self._num_types, asks=self._asks
            )
        return Facts(
            info.pooling,
            self._text,
            self._tasks,
            self._truncate,
            self._labels_of,
            self._own_text,
        )


def has_own_text(record: RevisionRecord | None) -> bool:
    """Whether its texts are read by a tokenizer of its own."""
    return record is not None and record.own_tokenizer


def labels_of(record: RevisionRecord | None) -> tuple[str, ...]:
    """The classes of a revision's own head, which nobody has named; () if it has none."""
    modules = record.modules if record is not None else ()
    count = next((m.rank for m in modules if m.module == HEAD), 0)
    return tuple(f"LABEL_{i}" for i in range(count))
