"""The base model's folder, as far as it can be judged without loading it.

Goes in: Settings.  Comes out: its spec, or BadConfig with what a start would say too; what tells it
from another base.  Torch-free: config.json is understood, the tokenizer read, and of the weights
the headers alone, so that a wrong base is told in a second and not after minutes of loading.
"""

import hashlib
import json
from pathlib import Path

from engine.client import (
    BaseSpec,
    EncoderSpec,
    check_weight_files,
    read_base,
    read_model,
    usual_tasks,
)
from engine.errors import ConfigError, EngineError
from engine.pooling.fit import GENERATE
from lorad.config import Settings
from lorad.errors import BadConfig
from lorad.pairs import pair_form
from lorad.service.text import TextService


def spec_of(settings: Settings) -> BaseSpec:
    """What config.json says.  Raises BadConfig for a model that is not served, or not for this."""
    return _read(settings)[1]


def folder_of(settings: Settings) -> Path:
    """Where config.json, weights and tokenizer are: of some pooling models a folder below the base.
    Raises BadConfig."""
    return _read(settings)[0]


def _read(settings: Settings) -> tuple[Path, BaseSpec]:
    folder = Path(settings.model.base)
    try:
        if settings.model.pools:
            return read_model(settings.pooling_config())[:2]
        spec = read_base(folder)
    except ConfigError as error:
        raise settings.refused(error) from error
    except EngineError as error:
        usual = usual_tasks(folder)
        fits = settings.model.pools or settings.model.tasks == usual
        hint = error.hint if fits or GENERATE in usual else _tasks(usual)
        raise BadConfig(f"models.base: {error.message}", hint=hint) from error
    except OSError as error:
        raise BadConfig(f"models.base: {error}") from error
    if isinstance(spec, EncoderSpec):
        raise BadConfig(
            "models.tasks: the base is an encoder, which generates nothing",
            hint=_tasks(usual_tasks(folder)),
        )
    return folder, spec


def _tasks(tasks: tuple[str, ...]) -> str:
    return f"tasks = [{', '.join(map(json.dumps, tasks))}]"


def check_base(settings: Settings) -> None:
    """Raises BadConfig unless spec, tokenizer and weight files are there and can be read, and it is
    known how pairs are asked about.  Whether the weights hold every tensor, and fit the device, is
    found when they are loaded."""
    check_files(settings)
    folder = folder_of(settings)
    pair_form(settings, TextService(folder, folder_of=lambda rev: folder).base)


def check_files(settings: Settings) -> None:
    """The same, but for the tokenizer: a start reads that to keep it."""
    try:
        check_weight_files(folder_of(settings))
    except EngineError as error:
        raise BadConfig(f"models.base: {error.message}", hint=error.hint) from error


def fingerprint_of(folder: Path) -> str:
    """Tells two bases apart in `system_fingerprint`, without reading gigabytes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for weights in sorted(folder.glob("*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}".encode())
    return digest.hexdigest()
