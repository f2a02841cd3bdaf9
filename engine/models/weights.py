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

from engine.errors import FETCH_AGAIN, OTHER_FILES, ConfigError, ModelUnsupported
from engine.models.hf_config import text_name, weight_files
from engine.models.shard import WHOLE, Cut

_READABLE = (torch.float32, torch.bfloat16, torch.float16)


def load(
    places: Mapping[str, Tensor],
    folder: Path,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    rename: Callable[[str], str] = text_name,
    cut: Callable[[str], Cut] = lambda name: WHOLE,
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Fill `places` from the folder's weights, whose tensors `rename` leads to them: by itself it
    takes off the leading `model.` and `language_model.`, in whatever order a file has them.

    `ignored` says which other names may lie in the files, `cut` which part of a tensor its place
    wants.  ConfigError for files that are missing or broken; ModelUnsupported for a tensor that
    nobody asked for, is missing, or does not fit.
    """
    filled: set[str] = set()
    for published, tensor in _tensors(folder):
        name = rename(published)
        place = places.get(name)
        if place is None:
            if ignored(name):
                continue
            raise ModelUnsupported(
                f"{folder} has a tensor that the engine does not use: {name}", hint=OTHER_FILES
            )
        if name in filled:
            raise ConfigError(f"{folder} holds {name} twice", hint=FETCH_AGAIN)
        tensor = _part(tensor, cut(name), place)
        if tensor.shape != place.shape or tensor.dtype not in _READABLE:
            raise ModelUnsupported(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(place.shape)} in float32, bfloat16 or float16",
                hint=OTHER_FILES,
            )
        place.copy_(tensor)
        filled.add(name)
        progress(len(filled) / len(places))
    missing = sorted(places.keys() - filled)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelUnsupported(f"{folder} lacks the tensor {missing[0]}{more}", hint=FETCH_AGAIN)


def _part(tensor: Tensor, cut: Cut, place: Tensor) -> Tensor:
    """What `cut` says of it; all of it if it has not the size that is to be cut."""
    if cut.zero:
        return torch.zeros_like(tensor)
    if cut.columns is not None and tensor.dim() == 2 and tensor.shape[1] == cut.size:
        return tensor[:, slice(*cut.columns)]
    if cut.rows is None or tensor.shape[0] != cut.size:
        return tensor
    part = torch.cat([tensor[slice(*rows)] for rows in cut.rows])
    if len(part) < len(place):  # behind the last word there are none
        part = torch.cat((part, part.new_zeros(len(place) - len(part), *part.shape[1:])))
    return part


def tensor_names(folder: Path) -> tuple[str, ...]:
    """What the folder's weight files hold.  ConfigError for files that are missing or broken."""
    found: list[str] = []
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found += file.keys()
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read: {error}", hint=FETCH_AGAIN) from None
    return tuple(found)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read: {error}", hint=FETCH_AGAIN) from None
