"""The base models' folders, as far as they can be judged without loading them.

Goes in: Settings, and which model.  Comes out: its spec, or BadConfig with what a start would say
too; what tells it from another base.  Torch-free: config.json is understood, the tokenizer read,
and of the weights the headers alone, so that a wrong base is told in a second and not after minutes
of loading.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

from engine.client import (
    BaseSpec,
    EncoderSpec,
    check_weight_files,
    draft_doubt,
    read_base,
    read_model,
    usual_tasks,
)
from engine.errors import ConfigError, EngineError
from engine.pooling.fit import GENERATE
from lorad.config import Settings, model_key
from lorad.errors import BadConfig
from lorad.pairs import pair_form
from lorad.service.text import TextService


def spec_of(settings: Settings, index: int = 0) -> BaseSpec:
    """What config.json says.  Raises BadConfig for a model that is not served, or not for this."""
    return _read(settings, index)[1]


def drafts_in_doubt(settings: Settings) -> tuple[str, ...]:
    """Of each model that guesses for another and is too large to pay, a line."""
    found = []
    for index, model in enumerate(settings.models):
        if not model.draft_model:
            continue
        spec, draft = spec_of(settings, index), read_base(Path(model.draft_model))
        if isinstance(spec, EncoderSpec) or isinstance(draft, EncoderSpec):
            continue
        if why := draft_doubt(draft, spec):
            found.append(f"{model_key(index, 'draft_model')} = {model.draft_model}: {why}")
    return tuple(found)


def folder_of(settings: Settings, index: int = 0) -> Path:
    """Where config.json, weights and tokenizer are: of some pooling models a folder below the base.
    Raises BadConfig."""
    return _read(settings, index)[0]


def _read(settings: Settings, index: int) -> tuple[Path, BaseSpec]:
    folder, spec = _read_files(settings, index)
    if isinstance(spec, EncoderSpec) or settings.models[index].pools:
        return folder, spec
    return folder, dataclasses.replace(spec, extra_vocab=settings.lora.extra_vocab)


def _read_files(settings: Settings, index: int) -> tuple[Path, BaseSpec]:
    model, key = settings.models[index], model_key(index, "base")
    folder = Path(model.base)
    try:
        if model.pools:
            return read_model(settings.pooling_config(index))[:2]
        spec = read_base(folder)
        if model.pools_too and not isinstance(spec, EncoderSpec):
            return read_model(settings.pooling_config(index))[:2]
    except ConfigError as error:
        raise settings.refused(error, index) from error
    except EngineError as error:
        usual = usual_tasks(folder)
        fits = model.pools or model.tasks == usual
        hint = error.hint if fits or GENERATE in usual else _tasks(usual)
        raise BadConfig(f"{key}: {error.message}", hint=hint) from error
    except OSError as error:
        raise BadConfig(
            f"{key}: {error}", hint="check who may read the folder, and its disk"
        ) from error
    if isinstance(spec, EncoderSpec):
        raise BadConfig(
            f"{model_key(index, 'tasks')}: the base is an encoder, which generates nothing",
            hint=_tasks(usual_tasks(folder)),
        )
    return folder, spec


def _tasks(tasks: tuple[str, ...]) -> str:
    return f"tasks = [{', '.join(map(json.dumps, tasks))}]"


def check_base(settings: Settings) -> None:
    """Raises BadConfig unless spec, tokenizer and weight files are there and can be read, those of
    a model that drafts too, and it is known how pairs are asked about.  Whether the weights hold
    every tensor, and fit the device, is found when they are loaded."""
    check_files(settings)
    for index in range(len(settings.models)):
        folder = folder_of(settings, index)
        text = TextService(folder, folder_of=Path, key=model_key(index, "base"))
        pair_form(settings, text.base, index)


def check_files(settings: Settings) -> None:
    """The same, but for the tokenizer: a start reads that to keep it."""
    for index, model in enumerate(settings.models):
        folders = {"base": folder_of(settings, index)}
        if model.draft_model:
            folders["draft_model"] = Path(model.draft_model)
        for name, folder in folders.items():
            try:
                check_weight_files(folder)
            except EngineError as error:
                key = model_key(index, name)
                raise BadConfig(f"{key}: {error.message}", hint=error.hint) from error


def fingerprint_of(folder: Path) -> str:
    """Tells two bases apart in `system_fingerprint`, without reading gigabytes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for weights in sorted(folder.glob("*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}".encode())
    return digest.hexdigest()
