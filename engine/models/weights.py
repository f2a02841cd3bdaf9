"""safetensors files → weights that are already in place.

Goes in: a folder and the tensors to fill, by published name.  Comes out: the tensors, filled.
One tensor at a time is read (mapped, not copied) and cast straight into its place, so a model is
never held twice.  Every tensor has to be asked for and every place has to be filled.  Knows no
model family.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError, ModelUnsupported
from engine.models.hf_config import text_name, weight_files

_READABLE = (torch.float32, torch.bfloat16, torch.float16)


def load(
    places: Mapping[str, Tensor],
    folder: Path,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    rename: Callable[[str], str] = text_name,
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Fill `places` from the folder's weights, whose tensors `rename` leads to them: by itself it
    takes off the leading `model.` and `language_model.`, in whatever order a file has them.

    `ignored` says which other names may lie in the files.  ConfigError for files that are missing
    or broken; ModelUnsupported for a tensor that nobody asked for, is missing, or does not fit.
    """
    filled: set[str] = set()
    for published, tensor in _tensors(folder):
        name = rename(published)
        place = places.get(name)
        if place is None:
            if ignored(name):
                continue
            raise ModelUnsupported(f"{folder} has a tensor that the engine does not use: {name}")
        if name in filled:
            raise ConfigError(f"{folder} holds {name} twice")
        if tensor.shape != place.shape or tensor.dtype not in _READABLE:
            raise ModelUnsupported(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(place.shape)} in float32, bfloat16 or float16"
            )
        place.copy_(tensor)
        filled.add(name)
        progress(len(filled) / len(places))
    missing = sorted(places.keys() - filled)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelUnsupported(f"{folder} lacks the tensor {missing[0]}{more}")


def tensor_names(folder: Path) -> tuple[str, ...]:
    """What the folder's weight files hold.  ConfigError for files that are missing or broken."""
    found: list[str] = []
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found += file.keys()
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    return tuple(found)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
