"""The half of a library's face that asks for vectors and scores, whatever engine makes them.

Goes in: token ids, revisions.  Comes out: a result for each input, in order.  Knows no step loop.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine.errors import error_of
from engine.pooling.requests import Floats, PoolingTask, PoolRequest, PoolResult


class PoolingCalls:
    """`revs` None is the base model throughout.  `options` are fields of PoolRequest, the same for
    all.  Everything here raises EngineError for the first input that ends in an error.

    An engine that only pools reads `inputs`, and `revs` and `types` beside them, as far as a step
    ahead: where they are iterators, texts become tokens while the device computes.  What those
    raise is raised, and all inputs are forgotten.
    """

    @abstractmethod
    def pool(
        self,
        task: PoolingTask,
        inputs: Iterable[Sequence[int]],
        revs: Iterable[str | None] | None = None,
        types: Iterable[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[PoolResult]:
        """Run all inputs together."""

    def embed(
        self,
        inputs: Iterable[Sequence[int]],
        revs: Iterable[str | None] | None = None,
        **options: Any,
    ) -> list[Floats]:
        """One vector (width,) for each input of token ids."""
        return [_values(result) for result in self.pool("embed", inputs, revs, **options)]

    def embed_tokens(
        self,
        inputs: Iterable[Sequence[int]],
        revs: Iterable[str | None] | None = None,
        **options: Any,
    ) -> list[Floats]:
        """A vector for each token, (tokens, hidden)."""
        return [_values(result) for result in self.pool("tokens", inputs, revs, **options)]

    def classify(
        self,
        inputs: Iterable[Sequence[int]],
        revs: Iterable[str | None] | None = None,
        types: Iterable[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[PoolResult]:
        """Scores (labels,) in `values`, what to sort by in `logits`.

        `types`, one list an input, tell the two texts of a pair apart where the model wants it.
        """
        return self.pool("classify", inputs, revs, types, **options)


def requests_of(
    names: Iterator[str],
    task: PoolingTask,
    inputs: Iterable[Sequence[int]],
    revs: Iterable[str | None] | None,
    types: Iterable[Sequence[int]] | None,
    **options: Any,
) -> Iterator[PoolRequest]:
    """One for each input, under the next of the names.  Raises ValueError where there are more of
    one than of another."""
    columns = [inputs, *(more for more in (revs, types) if more is not None)]
    for tokens, *more in zip(*columns, strict=True):
        rev = None if revs is None else more[0]
        kinds = None if types is None else more[-1]
        yield PoolRequest(
            request_id=next(names),
            tokens=_listed(tokens),
            task=task,
            rev=rev,
            types=None if kinds is None else _listed(kinds),
            **options,
        )


def in_order(names: Sequence[str], found: dict[str, PoolResult]) -> list[PoolResult]:
    """Raises what the first of them tells that ended in an error."""
    for name in names:
        if found[name].code:
            raise error_of(found[name].code, found[name].message)
    return [found[name] for name in names]


def _values(result: PoolResult) -> Floats:
    assert result.values is not None
    return result.values


def _listed(values: Any) -> list[int]:
    return values if isinstance(values, list) else list(values)
