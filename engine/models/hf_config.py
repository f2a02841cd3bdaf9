"""A Hugging Face config.json as fields that somebody has to ask for.  Torch-free.

Goes in: a folder.  Comes out: `Fields`, which hands out values by name and type, and refuses in
the end whatever nobody asked for unless it cannot change the maths.  Knows no model family: that
is `models/spec.py`.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import FETCH_AGAIN, OTHER_BASE, ConfigError, ModelUnsupported

# fmt: off
#: Fields of config.json that say nothing about the forward pass of a dense decoder.
HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    "attention_probs_dropout_prob", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "label2id", "num_labels",
    "problem_type", "output_hidden_states", "output_attentions", "output_scores", "return_dict",
    "return_dict_in_generate", "chunk_size_feed_forward", "tokenizer_class",
    "task_specific_params", "prefix", "finetuning_task", "pretraining_tp", "is_llama_config",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "name_or_path",
    "attn_implementation",
})
# fmt: on
#: Values beside null, false, 0 and empty at which a field of another architecture changes nothing.
NEUTRAL = {
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "partial_rotary_factor": 1,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "factor": 1,
    "attn_factor": 1,
    "attention_factor": 1,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MISSING: Any = object()
#: What JSON of another shape than was expected raises where it is read.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
#: A safetensors header is a few MB at most; more is a broken file.
MAX_HEADER_BYTES = 100 << 20
#: No size of a model is larger; indices are int32.
LARGEST = (1 << 31) - 1
#: What is computed is computed in float32: its normal numbers.
SMALLEST_FLOAT, LARGEST_FLOAT = 1.1754944e-38, 3.4028234e38
#: What leads to the text model in a tensor's name, in whatever order a file has it.
_TO_TEXT_MODEL = re.compile(r"^(?:(?:model|language_model)\.)*")


class Fields:
    """A JSON object that remembers which of its fields were asked for.

    Every getter raises ModelUnsupported, naming the field, if the value has the wrong type or is
    missing without a default.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self._asked: set[str] = set()

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """The raw value; `default` only if the field is absent (null is a value)."""
        self._asked.add(name)
        value = self.values.get(name, default)
        if value is _MISSING:
            raise ModelUnsupported(f"{self.where} lacks {name}", hint=FETCH_AGAIN)
        return value

    def integer(self, name: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """A whole number from 1 to `most`; `default` replaces absent and null."""
        value = self._given(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(name, "expected a whole number of 1 or more")
        if value > most:
            raise self.refusal(name, f"expected {most} at most")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; `default` replaces absent and null."""
        value = self._given(name, default)
        if not _is_positive(value):
            raise self.refusal(name, "expected a finite number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number above 0, or None for absent and null."""
        return None if self.take(name, None) is None else self.number(name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        values = self.take(name)
        if not isinstance(values, list) or len(values) != count:
            raise self.refusal(name, f"expected a list of {count} numbers")
        if not all(_is_positive(value) for value in values):
            raise self.refusal(name, "expected finite numbers above 0")
        return tuple(float(value) for value in values)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false; `default` replaces absent and null."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "expected true or false")
        return value

    def refusal(self, name: str, why: str) -> ModelUnsupported:
        """The error that names a field with its value; the caller raises it."""
        shown = json.dumps(self.values.get(name))
        return ModelUnsupported(f"{self.where} has {name} = {short(shown)}: {why}", hint=OTHER_BASE)

    def refuse_rest(self) -> None:
        """Raise ModelUnsupported for the first field that nobody asked for and that may matter."""
        for name, value in self.values.items():
            if name in self._asked or name in HARMLESS or name.startswith("_"):
                continue
            if value and not (name in NEUTRAL and value == NEUTRAL[name]):
                raise self.refusal(name, "the engine does not know this field and cannot ignore it")

    def _given(self, name: str, default: Any) -> Any:
        value = self.take(name, _MISSING if default is None else default)
        if value is None:
            if default is None:
                raise ModelUnsupported(f"{self.where} lacks {name}", hint=FETCH_AGAIN)
            return default
        return value


_FOLDER = "give the folder of a Hugging Face model"


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """The JSON object in `path`; {} if it is absent and not required.  ConfigError otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not required:
            return {}
        raise ConfigError(f"{path.parent} has no {path.name}", hint=_FOLDER) from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent} is not a folder", hint=_FOLDER) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=FETCH_AGAIN) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", hint=FETCH_AGAIN)
    return value


def weights_dtype(folder: Path) -> str:
    """The dtype of the first weights file's embedding or first tensor, as safetensors spells it.

    Only the header is read.  ConfigError if there is no weights file or its header is broken.
    """
    path = weight_files(folder)[0]
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= MAX_HEADER_BYTES else {}
        tensors = {k: v["dtype"] for k, v in header.items() if k != "__metadata__"}
    except (OSError, *MALFORMED) as error:
        raise ConfigError(
            f"{path} has no readable safetensors header: {error}", hint=FETCH_AGAIN
        ) from None
    if not tensors:
        raise ConfigError(f"{path} holds no tensors", hint=FETCH_AGAIN)
    embedding = [d for name, d in tensors.items() if name.endswith("embed_tokens.weight")]
    numbers = [d for d in tensors.values() if str(d).startswith(("F", "BF"))]  # and no buffers
    return str((embedding or numbers or list(tensors.values()))[0])


def text_name(name: str) -> str:
    """A published tensor's name from the text model on: what places are called in the engine."""
    return _TO_TEXT_MODEL.sub("", name, count=1)


def weight_files(folder: Path) -> list[Path]:
    """The single safetensors file, or every shard that the index names.  ConfigError if absent."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    weight_map = read_json(folder / INDEX, required=False).get("weight_map") or {}
    if not weight_map:
        raise ConfigError(
            f"{folder} has neither {SINGLE} nor {INDEX}",
            hint="only safetensors weights are read; convert .bin checkpoints first",
        )
    if not isinstance(weight_map, dict):
        raise ConfigError(f"weight_map in {folder / INDEX} is not an object", hint=FETCH_AGAIN)
    paths = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
    for path in paths:
        if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
            raise ConfigError(
                f"{INDEX} names {short(path.name)}, which is not in {folder}",
                hint="the download is incomplete; fetch the missing shards",
            )
    return paths


def _is_positive(value: Any) -> bool:
    """Whether it is a number above 0 that a float32 holds in full."""
    return type(value) in (int, float) and SMALLEST_FLOAT <= value <= LARGEST_FLOAT


def short(text: str, limit: int = 80) -> str:
    """Foreign text for a message."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
