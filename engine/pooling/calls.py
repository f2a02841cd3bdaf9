"""The half of a library's face that asks for vectors and scores, whatever engine makes them.

Goes in: token ids, revisions.  Comes out: a result for each input, in order.  Knows no step loop.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.errors import error_of
from engine.pooling.requests import Floats, PoolingTask, PoolRequest, PoolResult


class PoolingCalls:
    """`revs` None is the base model throughout.  `options` are fields of PoolRequest, the same for
    all.  Everything here raises EngineError for the first input that ends in an error."""

    @abstractmethod
    def pool(
        self,
        task: PoolingTask,
        inputs: Sequence[Sequence[int]],
        revs: Sequence[str | None] | None = None,
        types: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[PoolResult]:
        """Run all inputs together."""

    def embed(
        self,
        inputs: Sequence[Sequence[int]],
        revs: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[Floats]:
        """One vector (width,) for each input of token ids."""
        return [_values(result) for result in self.pool("embed", inputs, revs, **options)]

    def embed_tokens(
        self,
        inputs: Sequence[Sequence[int]],
        revs: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[Floats]:
        """A vector for each token, (tokens, hidden)."""
        return [_values(result) for result in self.pool("tokens", inputs, revs, **options)]

    def classify(
        self,
        inputs: Sequence[Sequence[int]],
        revs: Sequence[str | None] | None = None,
        types: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[PoolResult]:
        """Scores (labels,) in `values`, what to sort by in `logits`.

        `types`, one list an input, tell the two texts of a pair apart where the model wants it.
        """
        return self.pool("classify", inputs, revs, types, **options)


def requests_of(
    names: Sequence[str],
    task: PoolingTask,
    inputs: Sequence[Sequence[int]],
    revs: Sequence[str | None] | None,
    types: Sequence[Sequence[int]] | None,
    **options: Any,
) -> list[PoolRequest]:
    """One for each input, under these names."""
    nobody: list[None] = [None] * len(inputs)
    return [
        PoolRequest(
            request_id=name,
            tokens=list(tokens),
            task=task,
            rev=rev,
            types=None if kinds is None else list(kinds),
            **options,
        )
        for name, tokens, rev, kinds in zip(
            names, inputs, revs or nobody, types or nobody, strict=True
        )
    ]


def in_order(names: Sequence[str], found: dict[str, PoolResult]) -> list[PoolResult]:
    """Raises what the first of them tells that ended in an error."""
    for name in names:
        if found[name].code:
            raise error_of(found[name].code, found[name].message)
    return [found[name] for name in names]


def _values(result: PoolResult) -> Floats:
    assert result.values is not None
    return result.values
