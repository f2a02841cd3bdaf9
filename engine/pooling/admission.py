"""What is asked of a pooling core, held against what its model can do.

Goes in: a request, and what its adapter has.  Comes out: an Item for the queue, cut if need be; or
the error that says why not.  Knows nothing of queues and of where adapters are.
"""

from collections.abc import Sequence

import numpy as np

from engine.errors import RequestInvalid, UnknownRevision
from engine.messages import PackedManifest
from engine.models.bases import BaseSpec
from engine.models.encoder_spec import EncoderSpec
from engine.pooling.config import PoolingConfig
from engine.pooling.head import Head
from engine.pooling.pooler import Pooler
from engine.pooling.queue import Ids, Item
from engine.pooling.requests import PoolRequest
from engine.pooling.truncation import Truncation


class Admission:
    """Checks requests against one model."""

    def __init__(
        self,
        config: PoolingConfig,
        spec: BaseSpec,
        pooler: Pooler,
        head: Head,
        *,
        scores_words: bool = False,
    ) -> None:
        """`scores_words`: there are scores without a classifier."""
        self._config = config
        self._spec = spec
        self._pooler = pooler
        self._head = head
        self._scores_words = scores_words

    def admit(
        self, request: PoolRequest, manifest: PackedManifest | None, order: int, now: float
    ) -> Item:
        """`manifest` is that of the request's revision, None if that is not known.  `now` in
        seconds.  Raises RequestInvalid, UnknownRevision."""
        if request.rev is not None and manifest is None:
            raise UnknownRevision(f"revision {request.rev[:12]} is unknown")
        tokens, types = self._checked(request, manifest)
        self._check_wishes(request, manifest)
        cuts = self._config.truncate if request.truncate is None else request.truncate
        cuts = cuts and not request.unseen  # which tokens those would be is not known then
        truncation = Truncation(self._config.max_length, cuts, request.keeps)
        if len(tokens) > self._config.max_length:
            tokens = np.array(truncation.fit(request.tokens), np.int64)
            if request.types is not None:
                types = np.array(truncation.fit_types(request.types), np.int64)
        limit = request.deadline_seconds
        return Item(
            request,
            tokens,
            types,
            order,
            num_cut=len(request.tokens) - len(tokens),
            deadline=None if limit is None else now + limit,
        )

    def _checked(
        self, request: PoolRequest, manifest: PackedManifest | None
    ) -> tuple[Ids, Ids | None]:
        """Tokens and types.  A foreign id would end the whole process inside the embedding: it is
        refused here."""
        size, types = self._spec.vocab_size, request.types
        if manifest is not None and manifest.num_tokens:
            size = manifest.num_tokens
        if not len(request.tokens):
            raise RequestInvalid("the input has no tokens", hint="give some text")
        tokens = _ids_below(size, request.tokens, "token id")
        if types is None:
            return tokens, None
        if len(types) != len(tokens):
            raise RequestInvalid(f"there are {len(tokens)} tokens and {len(types)} token types")
        return tokens, _ids_below(max(self._spec.num_types, 1), types, "token type")

    def _check_wishes(self, request: PoolRequest, manifest: PackedManifest | None) -> None:
        if request.keeps < 0 or request.prompt_tokens < 0:
            raise RequestInvalid("keeps and prompt_tokens are 0 or more")
        if request.prompt_tokens >= len(request.tokens):
            raise RequestInvalid(
                f"{request.prompt_tokens} of {len(request.tokens)} tokens are the prompt's",
                hint="a text follows its prompt",
            )
        if request.unseen:
            self._check_unseen(request)
        if request.task == "embed" and self._pooler.spec.late:
            raise RequestInvalid("the model makes a vector for each token, and none for a text")
        if request.task == "classify":
            self._check_head(request, manifest)
        elif request.dimensions is not None:
            self._check_dimensions(request)

    def _check_unseen(self, request: PoolRequest) -> None:
        if not isinstance(self._spec, EncoderSpec):
            raise RequestInvalid("a decoder's tokens are seen by all behind them")
        if not 0 < request.unseen < len(request.tokens):
            raise RequestInvalid(
                f"unseen = {request.unseen} of {len(request.tokens)} tokens: some have to be seen"
            )

    def _check_dimensions(self, request: PoolRequest) -> None:
        wanted, spec = request.dimensions, self._pooler.spec
        known, pooled = spec.dimensions, request.task == "embed" or spec.late
        width = self._pooler.width if pooled else self._spec.hidden_size
        assert wanted is not None
        if not 1 <= wanted <= width:
            raise RequestInvalid(f"dimensions = {wanted}: a vector has {width} numbers")
        if known and request.task == "embed" and wanted not in (*known, width):
            listed = ", ".join(map(str, known))
            raise RequestInvalid(f"dimensions = {wanted}: the model was trained for {listed}")

    def _check_head(self, request: PoolRequest, manifest: PackedManifest | None) -> None:
        if request.dimensions is not None or request.normalize is not None:
            raise RequestInvalid("scores are neither cut nor normalised")
        if self._scores_words:
            return
        modules = manifest.modules if manifest is not None else ()
        own = [m.module.removesuffix(".rows") for m in modules if m.replaces]
        if missing := self._head.missing(own):
            who = "the model" if request.rev is None else f"revision {request.rev[:12]}"
            raise RequestInvalid(
                f"{who} has no classifier: there is no {missing}",
                hint="ask a model, or an adapter, that was trained to classify",
            )


def _ids_below(size: int, values: Sequence[int], what: str) -> Ids:
    try:
        ids = np.array(values, np.int64)
    except OverflowError:
        ids = np.array([-1])
    if ids.view(np.uint64).max() >= size:  # as such a negative one is larger than any
        raise RequestInvalid(f"the input holds a {what} outside 0..{size - 1}")
    return ids
