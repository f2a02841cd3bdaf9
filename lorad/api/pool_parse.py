"""Bodies of the routes for vectors and scores → asks; after this no dict travels.

Goes in: Structs of `wire_pooling`.  Comes out: a `PoolAsk` or a `ScoreAsk`, or a 400 LoradError
with the JSON path in `param`.  What depends on the model is checked later, by
`service/pool_inputs.py` and `service/scoring.py`.
"""

from collections.abc import Sequence
from typing import TypeVar

from engine.pooling.requests import PoolingTask
from lorad.api.conversation import invalid
from lorad.service.pool_ask import Cut, Endpoint, Input, PoolAsk, ScoreAsk, Scoring, Wish
from lorad.text.pooling import Role
from lorad.wire_pooling import (
    ClassifyRequest,
    EmbeddingsRequest,
    PoolingBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TeiCompared,
    TeiParameters,
    TeiRequest,
    TeiRerankRequest,
)
from lorad.wire_pooling import Scoring as NamedScoring

T = TypeVar("T", str, str | tuple[int, ...])

_ROLES: dict[str, Role] = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "search_document": "document",
    "passage": "document",
}
_SCORINGS: dict[NamedScoring | None, Scoring | None] = {
    None: None,
    "cosine": "vectors",
    "maxsim": "maxsim",
}
_TASKS: dict[str, PoolingTask] = {
    "token_embed": "tokens",
    "embed": "embed",
    "classify": "classify",
}


def embeddings(body: EmbeddingsRequest, timeout: float | None) -> PoolAsk:
    """`POST /v1/embeddings`."""
    return _vectors(body, "embeddings", "embed", timeout)


def pooling(body: PoolingRequest, timeout: float | None) -> PoolAsk:
    """`POST /pooling`."""
    return _vectors(body, "pooling", _TASKS[body.task or "token_embed"], timeout)


def classify(body: ClassifyRequest, timeout: float | None) -> PoolAsk:
    """`POST /classify`."""
    wish = _wish(body, "classify", timeout)
    return PoolAsk(wish=wish, task="classify", inputs=_inputs(body.input, None))


def rerank(body: RerankRequest, served: str, timeout: float | None) -> ScoreAsk:
    """`POST /v1/rerank` and `/v2/rerank`.  Documents that are too long are cut, queries never."""
    _within("top_n", body.top_n, 1, 1 << 31)
    _within("max_tokens_per_doc", body.max_tokens_per_doc, 1, 1 << 31)
    truncate = body.truncation if body.truncate is None else body.truncate
    cut = Cut(
        truncate=truncate is not False,
        length=_length(body.truncate_prompt_tokens),
        pair="only_second",
        second=body.max_tokens_per_doc,
    )
    documents = tuple(d if isinstance(d, str) else d.text for d in body.documents)
    return ScoreAsk(
        wish=Wish(
            model=_named(body.model, served),
            endpoint="rerank",
            cut=cut,
            priority=_priority(body.priority),
            timeout=timeout,
        ),
        firsts=(_some("query", body.query),),
        seconds=_several("documents", documents),
        params=("query", "documents"),
        ranks=True,
        scoring=_SCORINGS[body.scoring],
        instruction=body.instruction or "",
    )


def tei_rerank(body: TeiRerankRequest, served: str, timeout: float | None) -> ScoreAsk:
    """`POST /rerank`.  Nothing is cut unless it says so."""
    cut = Cut(truncate=bool(body.truncate), pair="only_second")
    return ScoreAsk(
        wish=Wish(model=_named(body.model, served), endpoint="rerank", cut=cut, timeout=timeout),
        firsts=(_some("query", body.query),),
        seconds=_several("texts", body.texts),
        params=("query", "texts"),
        ranks=True,
        raw=bool(body.raw_scores),
    )


def tei(body: TeiRequest, served: str, timeout: float | None) -> PoolAsk | ScoreAsk:
    """`POST /embed`, `/similarity`, and `/`, which is either."""
    if isinstance(body.inputs, TeiCompared):
        return _tei_similarity(body, body.inputs, served, timeout)
    inputs = _inputs(body.inputs, None, "inputs")
    if body.prompt_name is not None:
        _textual("prompt_name", inputs)
    cut = Cut(truncate=bool(body.truncate))
    return PoolAsk(
        wish=Wish(
            model=_named(body.model, served), endpoint="embeddings", cut=cut, timeout=timeout
        ),
        task="embed",
        inputs=inputs,
        dimensions=body.dimensions,
        normalize=body.normalize is not False,
        prompt_name=body.prompt_name,
    )


def _tei_similarity(
    body: TeiRequest, inputs: TeiCompared, served: str, timeout: float | None
) -> ScoreAsk:
    given = body.parameters or TeiParameters()
    if (given.truncation_direction or "right").lower() != "right":
        raise invalid("parameters.truncation_direction", "inputs are cut at their end")
    if given.prompt_name is not None:
        raise invalid("parameters.prompt_name", "both sides have the model's default prompt")
    cut = Cut(truncate=bool(given.truncate))
    return ScoreAsk(
        wish=Wish(model=_named(body.model, served), endpoint="score", cut=cut, timeout=timeout),
        firsts=(_some("inputs.source_sentence", inputs.source_sentence),),
        seconds=_several("inputs.sentences", inputs.sentences),
        params=("inputs.source_sentence", "inputs.sentences"),
        scoring="vectors",
    )


def score(body: ScoreRequest, timeout: float | None) -> ScoreAsk:
    """`POST /v1/score`."""
    firsts, seconds = (
        _several(name, (texts,) if isinstance(texts, str) else texts)
        for name, texts in (("text_1", body.text_1), ("text_2", body.text_2))
    )
    if len(firsts) not in (1, len(seconds)):
        why = f"{len(firsts)} texts against {len(seconds)}: one, or as many as text_2"
        raise invalid("text_1", why)
    return ScoreAsk(
        wish=_wish(body, "score", timeout),
        firsts=firsts,
        seconds=seconds,
        params=("text_1", "text_2"),
        scoring=_SCORINGS[body.scoring],
    )


# ----------------------------------------------------------------- shared values
def _vectors(
    body: EmbeddingsRequest, endpoint: Endpoint, task: PoolingTask, timeout: float | None
) -> PoolAsk:
    if body.prompt_name is not None and body.input_type is not None:
        raise invalid("prompt_name", "contradicts input_type; give one of them")
    if task == "classify":
        for name in ("dimensions", "normalize"):
            if getattr(body, name) is not None:
                raise invalid(name, "scores are neither cut nor normalised")
    role = None if body.input_type is None else _ROLES[body.input_type]
    if body.instruction and role != "query":
        raise invalid("instruction", 'needs input_type = "query"')
    inputs = _inputs(body.input, role)
    for name in ("prompt_name", "input_type"):
        if getattr(body, name) is not None:
            _textual(name, inputs)
    return PoolAsk(
        wish=_wish(body, endpoint, timeout),
        task=task,
        inputs=inputs,
        dimensions=body.dimensions,
        normalize=body.normalize,
        prompt_name=body.prompt_name,
        instruction=body.instruction or "",
    )


def _wish(body: PoolingBody, endpoint: Endpoint, timeout: float | None) -> Wish:
    cut = Cut(truncate=_truncate(body), length=_length(body.truncate_prompt_tokens))
    return Wish(
        model=_some("model", body.model),
        endpoint=endpoint,
        cut=cut,
        priority=_priority(body.priority),
        timeout=timeout,
    )


def _inputs(
    given: str | tuple[str | int | tuple[int, ...], ...], role: Role | None, name: str = "input"
) -> tuple[Input, ...]:
    if isinstance(given, str):
        return (Input(_some(name, given), None, name, role),)
    if not given:
        raise invalid(name, "must not be empty")
    ids = tuple(item for item in given if isinstance(item, int))
    if len(ids) == len(given):
        return (Input(ids, None, name, role),)
    if ids or len({type(item) for item in given}) > 1:
        raise invalid(name, "mixes text and token ids")
    inputs = []
    for index, item in enumerate(given):
        assert not isinstance(item, int)
        param = f"{name}[{index}]"
        inputs.append(Input(_some(param, item), None, param, role))
    return tuple(inputs)


def _textual(param: str, inputs: tuple[Input, ...]) -> None:
    if not isinstance(inputs[0].text, str):
        raise invalid(param, "puts text ahead of text: token ids are taken as they are")


def _truncate(body: PoolingBody) -> bool | None:
    """A number of tokens to keep is a wish to be cut."""
    if body.truncate is None and body.truncate_prompt_tokens is not None:
        return True
    return body.truncate


def _length(tokens: int | None) -> int | None:
    if tokens in (None, -1):
        return None
    _within("truncate_prompt_tokens", tokens, 1, 1 << 31)
    return tokens


def _named(model: str | None, served: str) -> str:
    return served if model is None else _some("model", model)


def _some(param: str, value: T) -> T:
    if not value:
        raise invalid(param, "must not be empty")
    return value


def _several(param: str, texts: Sequence[str]) -> tuple[str, ...]:
    if not texts:
        raise invalid(param, "must not be empty")
    return tuple(texts)


def _priority(value: int | None) -> int | None:
    _within("priority", value, 0, 100)
    return value


def _within(param: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(param, f"must be {low} to {high}")
