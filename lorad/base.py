"""The base model's folder, as far as it can be judged without loading it.

Goes in: Settings.  Comes out: its spec, or BadConfig with what a start would say too; what tells it
from another base.  Torch-free: config.json is understood, the tokenizer read, and of the weights
the headers alone, so that a wrong base is told in a second and not after minutes of loading.
"""

import hashlib
from pathlib import Path

from engine.client import ModelSpec, check_weight_files, read_spec
from engine.errors import EngineError
from lorad.config import Settings
from lorad.errors import BadConfig
from lorad.service.text import TextService


def spec_of(settings: Settings) -> ModelSpec:
    """What config.json says.  Raises BadConfig for a model that is not served."""
    try:
        return read_spec(Path(settings.model.base))
    except EngineError as error:
        raise BadConfig(f"models.base: {error.message}", hint=error.hint) from error
    except OSError as error:
        raise BadConfig(f"models.base: {error}") from error


def check_base(settings: Settings) -> None:
    """Raises BadConfig unless spec, tokenizer and weight files are there and can be read.  Whether
    the weights hold every tensor, and fit the device, is found when they are loaded."""
    folder = Path(settings.model.base)
    check_files(settings)
    TextService(folder, folder_of=lambda rev: folder)


def check_files(settings: Settings) -> None:
    """The same, but for the tokenizer: a start reads that to keep it."""
    spec_of(settings)
    try:
        check_weight_files(Path(settings.model.base))
    except EngineError as error:
        raise BadConfig(f"models.base: {error.message}", hint=error.hint) from error


def fingerprint_of(folder: Path) -> str:
    """Tells two bases apart in `system_fingerprint`, without reading gigabytes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for weights in sorted(folder.glob("*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}".encode())
    return digest.hexdigest()
