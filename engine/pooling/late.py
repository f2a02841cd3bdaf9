"""What the files of a model of late interaction say: a vector for each token, and how queries and
documents are read.  Torch-free.

Goes in: `config_sentence_transformers.json` as PyLate writes it, or `artifact.metadata` of
ColBERT's own code.  Comes out: a LateSpec; or ModelUnsupported with the name of what is not
computed.  Defaults are those of whose file it is, since either leaves a model's own out.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.models.hf_config import Fields, read_json
from engine.pooling.spec import DenseSpec, LateSpec

METADATA, PYLATE = "artifact.metadata", "config_sentence_transformers.json"
#: The field by which PyLate's files are told from those of others.
MARKS = "query_prefix"
PUNCTUATION = tuple(string.punctuation)
#: Of `artifact.metadata`, what would be another model unless it has this value.  What else it holds
#: is of training and of indexes.
_NEUTRAL = {"interaction": "colbert", "similarity": "cosine", "reranker": False, "relu": False}


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Whose names for the same things."""

    query_mark: tuple[str, str]  # name, and what is meant where the file has none
    document_mark: tuple[str, str]
    query_length: tuple[str, int]
    document_length: tuple[str, int]
    seen: str


_PYLATE = _Dialect(
    (MARKS, "[Q] "),
    ("document_prefix", "[D] "),
    ("query_length", 32),
    ("document_length", 180),
    "attend_to_expansion_tokens",
)
_COLBERT = _Dialect(
    ("query_token_id", "[unused0]"),
    ("doc_token_id", "[unused1]"),
    ("query_maxlen", 32),
    ("doc_maxlen", 220),
    "attend_to_mask_tokens",
)


def pylate(ours: Mapping[str, Any]) -> LateSpec:
    """Of config_sentence_transformers.json.  Raises ModelUnsupported."""
    told = Fields(ours, PYLATE)
    similarity = told.take("similarity_fn_name", None) or "MaxSim"
    if str(similarity).lower() not in ("maxsim", "cosine"):  # the latter of its first versions
        raise told.refusal("similarity_fn_name", "vectors of tokens are compared by MaxSim")
    words = told.take("skiplist_words", None)
    if words is None:
        words = list(PUNCTUATION)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise told.refusal("skiplist_words", "expected words")
    return _late(told, _PYLATE, tuple(words), expands=told.flag("do_query_expansion", True))


def colbert(folder: Path, hidden_size: int) -> tuple[LateSpec, DenseSpec]:
    """Of a checkpoint of ColBERT's own code, whose projection lies among its weights.  Raises
    ConfigError for a file that cannot be read, ModelUnsupported."""
    told = Fields(read_json(folder / METADATA, required=False), METADATA)
    for name, neutral in _NEUTRAL.items():
        if told.take(name, neutral) not in (None, neutral):
            raise told.refusal(name, f"served is {neutral}")
    words = PUNCTUATION if told.flag("mask_punctuation", True) else ()
    spec = replace(_late(told, _COLBERT, words, expands=True), skips_read=True)
    width = told.integer("dim", 128)
    return spec, DenseSpec("", hidden_size, width, bias=False, activation="identity", among=True)


def _late(told: Fields, dialect: _Dialect, skipped: tuple[str, ...], *, expands: bool) -> LateSpec:
    return LateSpec(
        query_mark=_mark(told, *dialect.query_mark),
        document_mark=_mark(told, *dialect.document_mark),
        query_length=told.integer(*dialect.query_length),
        document_length=told.integer(*dialect.document_length),
        expands=expands,
        sees_expansion=told.flag(dialect.seen) and expands,
        skipped=skipped,
    )


def _mark(told: Fields, name: str, default: str) -> str:
    value = told.take(name, None)
    if value is not None and not isinstance(value, str):
        raise told.refusal(name, "expected a token as the vocabulary writes it")
    return default if value is None else value
