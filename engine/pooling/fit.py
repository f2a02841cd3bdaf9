"""What a model's files say it is for, and whether what was asked for fits it.  Torch-free.

Goes in: a folder, a PoolingConfig.  Comes out: tasks by name; the folder, the spec and the pooling
that a start would have, or the error that it would end with.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import FETCH_AGAIN, ConfigError, EngineError, ModelUnsupported
from engine.models.bases import BaseSpec, read_base
from engine.models.encoder_families import is_encoder
from engine.models.encoder_spec import EncoderSpec
from engine.models.families import FAMILIES
from engine.models.head_spec import CLASSIFIER
from engine.models.hf_config import read_json
from engine.pooling.config import PoolingConfig
from engine.pooling.files import MODULES_FILE, module_kinds, read_pooling
from engine.pooling.spec import PoolingSpec

GENERATE, EMBED, CLASSIFY, RERANK = "generate", "embed", "classify", "rerank"


def usual_tasks(folder: Path) -> tuple[str, ...]:
    """What the model in `folder` is for, by its files; of files that cannot be read: to generate.

    A classifier of one label scores pairs of texts, for there is nothing to choose from.
    """
    listed = (folder / MODULES_FILE).is_file()
    try:
        kinds = module_kinds(folder)
        if "LogitScore" in kinds:
            return (RERANK,)
        config = read_json(folder / "config.json", required=not listed)
        known = is_encoder(config) or str(config.get("model_type")) in FAMILIES
    except EngineError:
        return (EMBED,) if listed else (GENERATE,)
    if known and "Pooling" not in kinds and _class_of(config).endswith(CLASSIFIER):
        return (RERANK, CLASSIFY) if _num_labels(config) == 1 else (CLASSIFY,)
    bare = known and _class_of(config).endswith("Model")
    return (EMBED,) if listed or bare or is_encoder(config) else (GENERATE,)


def scores_by_words(config: PoolingConfig) -> bool:
    """Whether a pair of texts is scored by words that somebody has to name: the base is a decoder,
    and its files have neither a classifier nor the words.  Raises as `read_model` does."""
    _, spec, pooling = read_model(config)
    return not isinstance(spec, EncoderSpec) and not spec.num_labels and not pooling.score_tokens


def read_model(config: PoolingConfig) -> tuple[Path, BaseSpec, PoolingSpec]:
    """The folder of config.json, weights and tokenizer, and what it says.

    Raises ConfigError for files that cannot be read, for a length beyond the model's and for what
    is not served so; ModelUnsupported for what is not computed.
    """
    root = Path(config.model)
    pooling = read_pooling(root)
    if config.pooling and pooling.late:
        raise ConfigError(
            f"pooling = {config.pooling!r}: the model was trained to give a vector for each token",
            hint='leave pooling at ""',
        )
    if config.pooling:
        pooling = dataclasses.replace(pooling, kinds=(config.pooling,), origin="the configuration")
    if config.score_tokens:
        pooling = dataclasses.replace(pooling, score_tokens=config.score_tokens)
    folder = root / pooling.folder
    spec = read_base(folder, config.purpose)
    width = pooling.width(spec.hidden_size)
    if pooling.late and pooling.late.query_length > (config.max_length or spec.default_length):
        length = config.max_length or spec.default_length
        raise ConfigError(
            f"{pooling.origin}: queries have {pooling.late.query_length} tokens, and an input"
            f" {length} at the most",
            hint="raise max_model_len, or leave it out",
        )
    if any(size > width for size in pooling.dimensions):
        raise ModelUnsupported(
            f"matryoshka_dimensions has {max(pooling.dimensions)}, a vector has {width} numbers",
            hint=FETCH_AGAIN,
        )
    if config.max_length > spec.default_length:
        raise ConfigError(
            f"max_length = {config.max_length} is above the model's {spec.default_length} tokens",
            hint=f"set it to {spec.default_length} or less",
        )
    _check_words(spec, pooling)
    _check_reuse(config, spec, pooling)
    return folder, spec, pooling


def _check_reuse(config: PoolingConfig, spec: BaseSpec, pooling: PoolingSpec) -> None:
    """Raises ConfigError for what was asked for and cannot be."""
    if config.generates_too and config.chunked_prefill == "off":
        raise ConfigError(
            "chunked_prefill = 'off': inputs share steps with those who wait for their next token",
            hint='leave chunked_prefill at "auto"; sums over chunks are exact',
        )
    reuses = pooling.kinds == ("last",) and not isinstance(spec, EncoderSpec)
    if config.prefix_cache == "on" and not reuses:
        raise _no_reuse("prefix_cache", spec, pooling)
    if config.chunked_prefill == "on" and not (reuses or config.generates_too):
        raise _no_reuse("chunked_prefill", spec, pooling)


def _class_of(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [""]
    return str(named[0] if isinstance(named, list) else named)


def _num_labels(config: Mapping[str, Any]) -> int:
    """As they are named, else counted; what is neither is refused when the model is read."""
    named, count = config.get("id2label"), config.get("num_labels")
    if isinstance(named, dict) and named:
        return len(named)
    return count if isinstance(count, int) else 2


def _check_words(spec: BaseSpec, pooling: PoolingSpec) -> None:
    """Raises ConfigError for words that could not score."""
    tokens = pooling.score_tokens
    if not tokens:
        return
    if isinstance(spec, EncoderSpec) or spec.num_labels:
        what = "an encoder" if isinstance(spec, EncoderSpec) else "a classifier"
        raise ConfigError(
            f"score_tokens = {list(tokens)}: the base is {what}, which scores itself",
            hint="leave score_words out",
        )
    if max(tokens) >= spec.vocab_size:
        raise ConfigError(
            f"score_tokens = {list(tokens)}: the base has {spec.vocab_size} token ids",
            hint="name words of this model's own vocabulary",
        )


def _no_reuse(name: str, spec: BaseSpec, pooling: PoolingSpec) -> ConfigError:
    """Why an input is always computed whole, in one step."""
    told = f"{name} = 'on': "
    if isinstance(spec, EncoderSpec):
        why = "an encoder's rows see both sides, so a prefix alone has no state"
    else:
        pools = " and ".join(pooling.kinds)
        why = f"pooling by {pools} reads rows that neither a cache nor an earlier chunk would leave"
    return ConfigError(told + why, hint=f'leave {name} at "auto"')
