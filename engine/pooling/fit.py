"""What a model's files say it is for, and whether what was asked for fits it.  Torch-free.

Goes in: a folder, a PoolingConfig.  Comes out: tasks by name; the folder, the encoder and the
pooling that a start would have, or the error that it would end with.
"""

import dataclasses
from pathlib import Path

from engine.errors import ConfigError, EngineError, ModelUnsupported
from engine.models.bases import read_base
from engine.models.encoder_families import CLASSIFIER, is_encoder
from engine.models.encoder_spec import EncoderSpec, read_encoder_spec
from engine.models.hf_config import read_json
from engine.pooling.config import PoolingConfig
from engine.pooling.files import MODULES_FILE, read_pooling
from engine.pooling.spec import PoolingSpec

GENERATE, EMBED, CLASSIFY, RERANK = "generate", "embed", "classify", "rerank"


def usual_tasks(folder: Path) -> tuple[str, ...]:
    """What the model in `folder` is for, by its files; of files that cannot be read: to generate.

    A classifier of one label scores pairs of texts, for there is nothing to choose from.
    """
    if (folder / MODULES_FILE).is_file():
        return (EMBED,)
    try:
        config = read_json(folder / "config.json", required=True)
        if not is_encoder(config):
            return (GENERATE,)
    except EngineError:
        return (GENERATE,)
    named = config.get("architectures") or [""]
    if not str(named[0]).endswith(CLASSIFIER):
        return (EMBED,)
    labels = config.get("id2label") or range(config.get("num_labels") or 2)
    return (RERANK, CLASSIFY) if len(labels) == 1 else (CLASSIFY,)


def read_encoder(config: PoolingConfig) -> tuple[Path, EncoderSpec, PoolingSpec]:
    """The folder of config.json, weights and tokenizer, and what it says.

    Raises ConfigError for files that cannot be read and for a length beyond the model's,
    ModelUnsupported for what is not computed.
    """
    root = Path(config.model)
    pooling = read_pooling(root)
    if config.pooling:
        pooling = dataclasses.replace(pooling, kinds=(config.pooling,), origin="the configuration")
    folder = root / pooling.folder
    values = read_json(folder / "config.json", required=True)
    if not is_encoder(values):
        read_base(folder)  # what is not known at all is told first
        raise ModelUnsupported(
            f"model_type {values.get('model_type')!r} is a decoder, which makes no vectors so far",
            hint='tasks = ["generate"], or an encoder',
        )
    spec = read_encoder_spec(folder)
    width = pooling.width(spec.hidden_size)
    if any(size > width for size in pooling.dimensions):
        raise ModelUnsupported(
            f"matryoshka_dimensions has {max(pooling.dimensions)}, a vector has {width} numbers"
        )
    if config.max_length > spec.max_length:
        raise ConfigError(
            f"max_length = {config.max_length} is above the model's {spec.max_length} tokens",
            hint=f"set it to {spec.max_length} or less",
        )
    return folder, spec, pooling
