"""The bodies of the routes for vectors and scores, as msgspec Structs.

Goes in: JSON of a client.  Comes out: typed requests whose optional fields are None when absent or
null, and answers in the shapes that clients of OpenAI, Cohere, Jina, vLLM and Text Embeddings
Inference read.  Knows no adapter, no token and no engine.

`user` and what else is only a label of the caller's is accepted without effect.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Encoding = Literal["float", "base64"]
Role = Literal["query", "document", "search_query", "search_document", "passage"]
Scoring = Literal["cosine", "maxsim"]


# ----------------------------------------------------------------- requests
class PoolingBody(Struct, frozen=True, kw_only=True):
    """What all but TEI's take.  `truncate_prompt_tokens`: at most so many tokens of an input, -1 =
    as many as the model takes."""

    model: str
    user: str | None = None
    priority: int | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingsRequest(PoolingBody, frozen=True, kw_only=True):
    """`input` is a text, texts, token ids, or lists of those."""

    input: str | tuple[str | int | tuple[int, ...], ...]
    encoding_format: Encoding | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    input_type: Role | None = None
    instruction: str | None = None


class PoolingRequest(EmbeddingsRequest, frozen=True, kw_only=True):
    """`task`: a vector for each token unless it says otherwise."""

    task: Literal["token_embed", "embed", "classify"] | None = None


class ClassifyRequest(PoolingBody, frozen=True, kw_only=True):
    """`input` as for embeddings."""

    input: str | tuple[str | int | tuple[int, ...], ...]


class Document(Struct, frozen=True, kw_only=True):
    """One document of a rerank; only its text is read."""

    text: str


class RerankRequest(Struct, frozen=True, kw_only=True):
    """Cohere's and Jina's.  Without a `model`, the one that is served."""

    query: str
    documents: tuple[str | Document, ...]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    user: str | None = None
    priority: int | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    truncate_prompt_tokens: int | None = None
    scoring: Scoring | None = None
    instruction: str | None = None


class TeiRerankRequest(Struct, frozen=True, kw_only=True):
    """That of Text Embeddings Inference, which serves one model; `model` is ours."""

    query: str
    texts: tuple[str, ...]
    model: str | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None


class TeiVectors(Struct, frozen=True, kw_only=True):
    """What TEI takes beside the inputs."""

    model: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


class TeiEmbedRequest(TeiVectors, frozen=True, kw_only=True):
    """`inputs` as `input` of embeddings."""

    inputs: str | tuple[str | int | tuple[int, ...], ...]


class TeiCompared(Struct, frozen=True, kw_only=True):
    """One text against several."""

    source_sentence: str
    sentences: tuple[str, ...]


class TeiParameters(Struct, frozen=True, kw_only=True):
    """What TEI puts beside `inputs` there, and not beside those of an embed."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


class TeiSimilarityRequest(Struct, frozen=True, kw_only=True):
    """TEI's."""

    inputs: TeiCompared
    model: str | None = None
    parameters: TeiParameters | None = None


class TeiRequest(TeiVectors, frozen=True, kw_only=True):
    """Of TEI's root, where clients ask who know no route: either of the two."""

    inputs: str | tuple[str | int | tuple[int, ...], ...] | TeiCompared
    parameters: TeiParameters | None = None


class ScoreRequest(PoolingBody, frozen=True, kw_only=True):
    """One text against several, or as many against as many."""

    text_1: str | tuple[str, ...]
    text_2: str | tuple[str, ...]
    scoring: Scoring | None = None


# ----------------------------------------------------------------- answers
class PoolingUsage(Struct, frozen=True, kw_only=True):
    """Tokens that were computed, special ones and prompts included."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, frozen=True, kw_only=True):
    """As base64, little-endian fp32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: tuple[float, ...] | str


class EmbeddingList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[Embedding, ...]
    model: str
    usage: PoolingUsage


class PoolingItem(Struct, frozen=True, kw_only=True):
    """A row for each token, or one vector; as base64 the rows one behind the other, and how many
    there are of what width in `shape`."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: tuple[tuple[float, ...] | float, ...] | str
    shape: tuple[int, ...]


class PoolingList(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: tuple[PoolingItem, ...]
    usage: PoolingUsage


class Classified(Struct, frozen=True, kw_only=True):
    """`label` is the likeliest; `probs` are in the order of the model's classes."""

    index: int
    label: str
    probs: tuple[float, ...]
    num_classes: int


class ClassifiedList(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: tuple[Classified, ...]
    usage: PoolingUsage


class ScoreItem(Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: tuple[ScoreItem, ...]
    usage: PoolingUsage


class RankedItem(Struct, frozen=True, kw_only=True):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class ApiVersion(Struct, frozen=True, kw_only=True):
    version: str


class BilledUnits(Struct, frozen=True, kw_only=True):
    search_units: int


class RankedMeta(Struct, frozen=True, kw_only=True):
    """What Cohere's clients look for."""

    api_version: ApiVersion
    billed_units: BilledUnits


class Ranked(Struct, frozen=True, kw_only=True):
    """`results` have the best first."""

    id: str
    model: str
    results: tuple[RankedItem, ...]
    usage: PoolingUsage
    meta: RankedMeta


class TeiRank(Struct, frozen=True, kw_only=True):
    index: int
    score: float
    text: str | UnsetType = UNSET


class TeiError(Struct, frozen=True, kw_only=True):
    """How TEI says that something failed."""

    error: str
    error_type: str
